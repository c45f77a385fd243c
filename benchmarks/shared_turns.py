"""Time a training step on conversations that branch, against one that copies the turns before each branch.

A conversation has a prompt of 256 tokens and four turns, each of 64 tokens of the environment and 64 of the policy. It
has eight ends: eight last turns after the same three ("last"), or two turns after each turn but the last ("each"). A
micro-batch has two of them. The step is that of a Qwen3 of 10 M parameters, from slot to update, on one rank with one
micro-batch, and on two pipeline stages with two; each rank has a thread. It is compared with --no-shared-prompt,
where each turn follows its own copy of all before it, in turns; the ratio is the median over rounds.
"""

import argparse
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import random_models, report
from benchmarks.shared_prompt_step import ARCHITECTURE, our_step, time_in_turns
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT, list_rewards
from megatron_rl.trainer.data.batch import Batcher
from tests.ranks import run_ranks

GROUP_SIZE, NUM_TURNS, NUM_ENDS = 2, 4, 8
FLAGS = (
    f"--platform cpu --train-iters 1000 --lr 1e-5 --lr-decay-style constant --grpo-group-size {GROUP_SIZE} "
    f"--micro-batch-size {GROUP_SIZE} --rollout-env any.py:Any"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a conversation."""

    ways: tuple[int, ...]
    """The number of turns that follow each turn; the first one is the prompt's."""
    prompt: int = 256
    given: int = 64
    sampled: int = 64

    @property
    def num_turns(self) -> int:
        """The number of turns, each counted once."""
        return sum(itertools.accumulate(self.ways, int.__mul__))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a response."""
        return self.num_turns * (self.given + self.sampled)

    def saving(self) -> float:
        """Return the formula's saving: tokens that are not computed, over those of whole conversations."""
        whole = NUM_ENDS * (self.prompt + NUM_TURNS * (self.given + self.sampled))
        return 1 - (self.prompt + GROUP_SIZE * self.num_tokens) / (GROUP_SIZE * whole)

    def measured_saving(self) -> float:
        """Return the same, measured on a pack."""
        of = [
            Batcher(lambda part: np.zeros(GROUP_SIZE), is_shared=is_shared).batch(draw_slot(self)).pack.num_tokens
            for is_shared in (True, False)
        ]
        return 1 - of[0] / of[1]


SHAPES = {"last": Shape((1, 1, 1, NUM_ENDS)), "each": Shape((1, 2, 2, 2))}


def list_parents(ways: tuple[int, ...], parent: int = -1, number: int = 0) -> list[int]:
    """List the turns in the order of a response, each by the number of the turn that it follows, -1 for the prompt."""
    found: list[int] = []
    for _ in range(ways[0]):
        mine = number + len(found)
        found.append(parent)
        if len(ways) > 1:
            found += list_parents(ways[1:], mine, mine + 1)
    return found


def draw_response(shape: Shape, draw: np.random.Generator, number: int) -> wire.Response:
    """Draw a response of random tokens."""
    turn = shape.given + shape.sampled
    spans, branches = [], []
    for place, parent in enumerate(list_parents(shape.ways)):
        begin = place * turn
        if parent != place - 1:
            branches.append(wire.Branch(start=begin, after=(parent + 1) * turn))
        spans.append(wire.VersionSpan(version=ENVIRONMENT, start=begin, end=begin + shape.given))
        spans.append(wire.VersionSpan(version="1", start=begin + shape.given, end=begin + turn))
    log_probs = np.tile(np.repeat([0.0, -9.0], [shape.given, shape.sampled]), shape.num_turns)
    return wire.Response(
        tokens=wire.encode_tokens(draw.integers(0, ARCHITECTURE.vocab_size, shape.num_tokens).tolist()),
        log_probs=wire.encode_log_probs(log_probs), finish_reason="stop", seed=number, engine="0", spans=spans,
        branches=branches, fingerprint="weights", reward=float(number % 2),
    )  # fmt: skip


def draw_slot(shape: Shape) -> wire.Slot:
    """Draw a micro-batch of one group."""
    draw = np.random.default_rng(0)
    responses = [draw_response(shape, draw, number) for number in range(GROUP_SIZE)]
    part = wire.GroupPart(
        prompt_index=0, row="row-0", first_response=0, responses=responses,
        prompt_tokens=wire.encode_tokens(draw.integers(0, ARCHITECTURE.vocab_size, shape.prompt).tolist()),
        rewards=list_rewards(responses),
    )  # fmt: skip
    return wire.Slot(run="run", version=1, fingerprint="weights", replica=0, index=0, parts=[part])


def times(shape: Shape, stages: int, num_micro_batches: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each way, in turns, on one thread a rank."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, environment = Path(folder) / "model", Path(folder) / "any.py"
        random_models.make(model, ARCHITECTURE)
        environment.write_text("")
        words = FLAGS.replace("any.py", str(environment)).split()
        words += ["--hf-model", str(model), "--grpo-prompts-per-step", str(num_micro_batches)]
        words += ["--rollout-max-tokens", str(shape.num_tokens), "--seq-length", str(shape.prompt + shape.num_tokens)]
        words += ["--pipeline-model-parallel-size", str(stages), "--rollout-env-max-turns", str(shape.num_turns)]
        shared, separate = command_line.parse(words), command_line.parse([*words, "--no-shared-prompt"])
        if stages > 1:
            torch.distributed.init_process_group("gloo")
        with start_session(shared) as session:
            slot = draw_slot(shape)
            ways = {
                "shared turns": our_step(shared, session, slot),
                "--no-shared-prompt": our_step(separate, session, slot),
            }
            return time_in_turns(ways, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    shapes, rounds = SHAPES, arguments.rounds
    if arguments.tiny:
        shapes = {name: dataclasses.replace(one, prompt=8, given=2, sampled=2) for name, one in SHAPES.items()}
        rounds = 1
    results = {"saving_error": max(abs(one.saving() - one.measured_saving()) for one in shapes.values())}
    for name, key, stages, num_micro_batches in _list_cases():
        taken = run_ranks(times, stages, shapes[name], stages, num_micro_batches, rounds)[-1]
        report.table(f"a step, branches {name}, {stages} stages", taken, "s")
        found = [a / b for a, b in zip(taken["--no-shared-prompt"], taken["shared turns"], strict=True)]
        report.table("ratio", {"copied / shared turns": found}, "")
        results[key] = statistics.median(found)
    report.finish(results)


def _list_cases() -> Iterator[tuple[str, str, int, int]]:
    for name in SHAPES:
        yield name, f"step_{name}", 1, 1
        yield name, f"step_{name}_pp2", 2, 2


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.shared_turns import main as importable_main

    importable_main()
