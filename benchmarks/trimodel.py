"""Time policy, old policy and reference in one run of the schedule against each in passes of its own, in turns.

Two stages with a core each, 8 micro-batches, all three roles. "At hand": every group has arrived at the start.
"Streamed": groups arrive evenly over the time that separate passes take with all at hand; those wait for all groups,
the fused pass for the next one. With one stage the fused pass is compared with the sum of the passes that it replaces.
Seconds are counted until the slowest rank is done. A unit of the bubble model is a micro-batch's forward pass through
one stage; backward is two.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from benchmarks import log_probs_memory, report
from megatron_rl.algorithm.objective import Objective
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.config.settings import Settings
from megatron_rl.shared.protocol.wire import Slot
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity, IterationSlots
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.gpt import build_model
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.forward_step import (
    PolicyStep,
    RoleAssignment,
    compute_log_probs,
    loss_scale,
    run_schedule,
)
from megatron_rl.trainer.mcore.step.policy import build_policy, build_reference
from megatron_rl.trainer.mcore.step.roles import SeparateRoles, TriModel
from tests import hf_models
from tests.distributed.grpo_trials import Source, build_batcher
from tests.distributed.training import settings_of
from tests.grpo_problem import Problem
from tests.grpo_twin import Group
from tests.ranks import run_ranks

MICRO_BATCHES, STAGES = 8, 2
# A micro-batch in one stage: two frozen models, and the policy with its gradients.
UNITS = (1, 1, 3)
PROMPT, RESPONSE, GROUP_SIZE = 32, 40, 4
MODEL = {
    "num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024,
}  # fmt: skip
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
FLAGS = (
    f"--lr 1e-6 --lr-decay-style constant --train-iters 1 --grpo-group-size {GROUP_SIZE} --micro-batch-size "
    f"{GROUP_SIZE} --grpo-prompts-per-step {2 * MICRO_BATCHES} --global-batch-size {MICRO_BATCHES * GROUP_SIZE} "
    f"--seq-length {PROMPT + RESPONSE} --rollout-max-tokens {RESPONSE} --grpo-kl-beta 0.1"
)
# The first one whose old policy is not the policy.
UPDATE = 1

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-log-probs", action="store_true", help="leave their memory out")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds = 1
        MODEL.update(TINY)
    with tempfile.TemporaryDirectory() as folder:
        problem = _draw(Path(folder))
        two = run_ranks(_two_stages, STAGES, problem, arguments.rounds, timeout=600)
        one = run_ranks(_one_stage, 1, problem, arguments.rounds, timeout=600)[0]
    times = two[0][0]
    ratios = {
        "fused_vs_separate_pp2": _ratios(times["fused, at hand"], times["separate, at hand"]),
        "streamed_vs_separate_pp2": _ratios(times["fused, streamed"], times["separate, streamed"]),
        "fused_vs_sum_pp1": _ratios(one["fused"], [sum(parts) for parts in zip(*_parts(one), strict=True)]),
    }
    report.table("two stages", times, "s")
    report.table("one stage", one, "s")
    report.table("ratios", ratios, "")
    _print_bubbles(times, one)
    _print_bytes([sent for _, sent in two])
    figures = {name: statistics.median(values) for name, values in ratios.items()}
    if not arguments.without_log_probs:
        figures["logprob_peak_vs_logits"] = log_probs_memory.logprob_peak(
            log_probs_memory.TINY if arguments.tiny else log_probs_memory.FULL
        )
        report.table("memory of log-probs", {"peak / logits": [figures["logprob_peak_vs_logits"]]}, "")
    report.finish(figures)


def _parts(one: Times) -> list[list[float]]:
    return [seconds for name, seconds in one.items() if name != "fused"]


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _print_bubbles(times: Times, one: Times) -> None:
    """Print the idle share of the schedule, and the measured one: half of one stage's passes have no bubbles."""
    slots = MICRO_BATCHES + STAGES - 1
    free = MICRO_BATCHES * sum(UNITS)
    expected = {"separate, at hand": sum(slots * units for units in UNITS), "fused, at hand": slots * sum(UNITS)}
    unit = statistics.median(sum(parts) for parts in zip(*_parts(one), strict=True)) / STAGES / free
    print(f"\nunits of {unit:.3f} s: {free} without bubbles")
    for name, units in expected.items():
        print(f"{name:<34}{units:>6} expected {statistics.median(times[name]) / unit:>8.1f} measured")


def _print_bytes(sent: list[Counter]) -> None:
    forward, backward = (sum(of_rank[name] for of_rank in sent) for name in ("tensor_send_next", "tensor_send_prev"))
    print(
        f"\nbetween stages, in a fused pass: {forward:,} bytes forward, {backward:,} backward: {backward / forward:.3f}"
    )
    print("of the bytes that three models with gradients send back")


def _draw(folder: Path) -> Problem:
    """Draw a model, and two updates of random groups.

    The models' weights are the same, which no pass takes notice of.
    """
    model = hf_models.draw("qwen3", folder / "model", **MODEL)
    return Problem(model, model, draw_updates(2, MODEL["vocab_size"]))


def draw_updates(count: int, vocab_size: int) -> list[list[Group]]:
    """Draw updates of random groups, a group for each micro-batch."""
    draw = np.random.default_rng(0)

    def group() -> Group:
        prompt, *responses = (
            draw.integers(0, vocab_size, length).tolist() for length in [PROMPT] + [RESPONSE] * GROUP_SIZE
        )
        return Group(prompt, responses, draw.normal(size=GROUP_SIZE).tolist(), [[-7.0] * RESPONSE] * GROUP_SIZE)

    return [[group() for _ in range(MICRO_BATCHES)] for _ in range(count)]


class _Bench:
    """The roles in both forms, on one rank and one core."""

    def __init__(self, session: Session, settings: Settings, problem: Problem):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[session.rank % len(cores)]})
        sizes = compute_sizes(settings, session.num_replicas)
        self._session = session
        self._division = sizes.division
        self._batcher = build_batcher(settings, session.device)
        self.policy = build_policy(settings, session, 1)
        self.reference = build_reference(settings, session, problem.reference).chunks
        self.old = freeze(build_model(settings))
        copy_weights(self.policy.wrapped, self.old)
        self.objective = Objective(settings.algorithm, sizes.longest_response)
        self._identity = Identity("run", 0, "fingerprint")
        self._source = Source(problem, sizes.division, session.replica, self._identity, is_shuffled=False)
        fused = TriModel(self.policy.wrapped, {"reference": self.reference}, self.old, 1.0)
        self._separate = SeparateRoles(self.policy.wrapped, {"reference": self.reference}, 1.0)
        self._fused_learner = Learner(self.policy, fused, self.objective, session)
        self._separate_learner = Learner(self.policy, self._separate, self.objective, session)

    @contextlib.contextmanager
    def slots(self, interval: float = 0.0) -> Iterator[IterationSlots]:
        """Yield an iteration's slots; those of the measured update come one after each interval, from now on."""
        start = self.now()
        first = UPDATE * MICRO_BATCHES

        def fetch(index: int) -> Slot:
            slot = self._source.slot(index)
            time.sleep(max(0.0, start + interval * (index - first + 1) - time.monotonic()) if index >= first else 0.0)
            return slot

        copier = DeviceCopier(self._session.platform)
        slots = IterationSlots(fetch, self._batcher, self._division, self._identity, copier)
        if not interval:
            slots.wait_for_all()
        try:
            yield slots
        finally:
            slots.close()
            for chunk in self.policy.wrapped:
                chunk.zero_grad_buffer()

    def run_fused(self, slots: IterationSlots) -> None:
        self._fused_learner.forward_backward(slots, UPDATE)

    def run_separate(self, slots: IterationSlots) -> None:
        slots.wait_for_all()
        self._separate.keep_old(slots, ())
        self._separate_learner.forward_backward(slots, UPDATE)

    def seconds(self, action: Callable[[], Any]) -> float:
        """Return seconds until the slowest rank is done."""
        start = self.now()
        action()
        return max(self._session.gather(time.monotonic())) - start

    def now(self) -> float:
        """Return one moment on all ranks, once all have arrived."""
        return max(self._session.gather(time.monotonic()))


@contextlib.contextmanager
def _bench(problem: Problem, flags: str) -> Iterator[_Bench]:
    settings = settings_of(problem.policy, f"{FLAGS} {flags}")
    with start_session(settings) as session:
        yield _Bench(session, settings, problem)


def _two_stages(problem: Problem, rounds: int) -> tuple[Times, Counter]:
    times: Times = defaultdict(list)
    with _bench(problem, f"--pipeline-model-parallel-size {STAGES}") as bench:
        forms = {"fused": bench.run_fused, "separate": bench.run_separate}
        with bench.slots() as slots, _counted_bytes() as sent:
            bench.run_fused(slots)
        with bench.slots() as slots:
            bench.run_separate(slots)
        for number in range(rounds):
            for name in in_turns(forms, number):
                with bench.slots() as slots:
                    times[f"{name}, at hand"].append(bench.seconds(lambda: forms[name](slots)))  # noqa: B023
            interval = statistics.median(times["separate, at hand"]) / MICRO_BATCHES
            for name in in_turns(forms, number):
                with bench.slots(interval) as slots:
                    times[f"{name}, streamed"].append(bench.seconds(lambda: forms[name](slots)))  # noqa: B023
    return dict(times), sent


def _one_stage(problem: Problem, rounds: int) -> Times:
    times: Times = defaultdict(list)
    with _bench(problem, "") as bench, bench.slots() as slots:
        micro_batches = slots.select_update(UPDATE)
        policy = bench.policy.wrapped

        # Each role is the policy's.
        on_policy = PolicyStep(
            policy,
            RoleAssignment({"old": "policy", "reference": "policy"}),
            bench.objective,
            1.0,
            loss_scale(len(micro_batches)),
        )

        parts = {
            "fused": lambda: bench.run_fused(slots),
            "policy forward and backward": lambda: run_schedule(on_policy, policy, micro_batches),
            "old forward": lambda: compute_log_probs(bench.old, micro_batches),
            "reference forward": lambda: compute_log_probs(bench.reference, micro_batches),
        }
        for number, name in itertools.product(range(rounds + 1), parts):
            seconds = bench.seconds(parts[name])
            # The first round prepares what the others find ready.
            if number > 0:
                times[name].append(seconds)
    return dict(times)


def in_turns(names: Iterable[str], number: int) -> list[str]:
    return list(names) if number % 2 == 0 else list(names)[::-1]


@contextlib.contextmanager
def _counted_bytes() -> Iterator[Counter]:
    sent: Counter = Counter()
    communicate = P2PCommunicator._communicate

    def counting(self: P2PCommunicator, **arguments: Any) -> tuple:
        for name in ("tensor_send_next", "tensor_send_prev"):
            if arguments[name] is not None:
                sent[name] += arguments[name].nbytes
        return communicate(self, **arguments)

    with mock.patch.object(P2PCommunicator, "_communicate", counting):
        yield sent


if __name__ == "__main__":
    # Under its importable name, where the ranks find the functions they run.
    from benchmarks.trimodel import main as importable_main

    importable_main()
