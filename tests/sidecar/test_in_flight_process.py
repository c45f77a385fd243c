"""The choice of responses in flight, seen from outside: a sidecar as a process, and an engine that samples in steps."""

import json
from pathlib import Path

import msgspec
import pytest

from megatron_rl.observe.trace import Span, read_trace
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient
from tests.sidecar.scripted_service import submission, weights
from tests.sidecar.sidecar_process import sidecar

PLAN = wire.Plan(num_prompts=16, group_size=8, num_replicas=1, micro_batch_size=8)
NUM_RESPONSES, NUM_TOKENS = 128, 50
STEP, RESPONSE = 0.001, 0.00012
# Sampling all at once takes as long as training. Without overlap an iteration takes both, and ideally one of them.
IDEAL = NUM_TOKENS * (STEP + RESPONSE * NUM_RESPONSES)
NUM_ITERATIONS, NUM_LEARNING = 5, 3


def run_iteration(client: RolloutClient, version: int) -> int | None:
    """Take all slots, and report seconds of training; return the most responses that were in flight."""
    client.publish(weights(version), 60)
    sampling = wire.Sampling(max_tokens=NUM_TOKENS)
    client.submit(msgspec.structs.replace(submission(version, PLAN, deadline=600), sampling=sampling))
    for index in range(PLAN.num_prompts):
        assert client.slot(version, 0, index, 600) is not None
    mismatch = wire.Mismatch(mean=0.0, largest=0.0, bound=None)
    return client.complete(version, mismatch, seconds=IDEAL).num_in_flight


def count_begun_late(groups: list[Span]) -> int:
    """Count the groups that began once the first had ended."""
    first = min(span.end for span in groups)
    return sum(span.begin > first for span in groups)


def find_seconds(groups: list[Span]) -> float:
    """Return the seconds of the iteration with a trainer that takes groups as they end, one after the other.

    The engine's times are those of the process. Training is computed, so that a busy machine does not prolong it.
    """
    begin, done = min(span.begin for span in groups), 0.0
    for end in sorted(span.end - begin for span in groups):
        done = max(done, end) + IDEAL / PLAN.num_prompts
    return done


@pytest.mark.each_change
def test_a_sidecar_spreads_the_ends_of_groups_over_an_iteration_once_it_knows_the_engines_steps(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.json", tmp_path / "run"
    script.write_text(json.dumps({"lengths": [NUM_TOKENS, NUM_TOKENS], "step_seconds": [STEP, RESPONSE]}))
    words = ("--rollout-engine", "scripted", "--rollout-script", str(script), "--reward", "length:8")
    words += ("--rollout-max-num-seqs", str(NUM_RESPONSES), "--rollout-max-in-flight", "auto")
    with sidecar(folder, *words) as process, process.client() as client:
        client.take_lease("run")
        numbers = [run_iteration(client, version) for version in range(NUM_ITERATIONS)]
        assert process.end() == 0
    found = read_trace(folder).sidecar
    assert found is not None
    groups = [[span for span in window.spans if span.name == "generate"] for window in found.windows]
    assert [len(one) for one in groups[:NUM_ITERATIONS]] == [PLAN.num_prompts] * NUM_ITERATIONS
    at_once, settled = groups[0], groups[NUM_LEARNING:NUM_ITERATIONS]
    # The first iteration is one with a fixed number that holds all.
    assert (numbers[0], count_begun_late(at_once)) == (2 * NUM_RESPONSES, 0)
    assert find_seconds(at_once) > 1.95 * IDEAL
    assert all(count_begun_late(one) >= PLAN.num_prompts / 4 for one in settled)
    # In virtual time it is 1.3. The machine may be busy during one of them.
    assert min(map(find_seconds, settled)) < 1.5 * IDEAL
