"""Measure what two cores take from each other without a run: vLLM's own `generate` on one, a loop on the other.

The loop trains a plain torch model, or takes the steps that a run of `overlap` takes, without ever waiting for a
response. Any loss that `overlap` finds beyond this belongs to the run. Beside products of matrices that stay in the
other core's own cache vLLM should lose nothing. All take turns.
"""

import argparse
import dataclasses
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from benchmarks import report, vllm_offline
from benchmarks.overlap import ENGINE_CORE, GROUP_SIZE, LOADS, SEQ_LENGTH, TRAINER_CORE, VOCAB_SIZE, Load, draw_model
from megatron_rl import platforms
from tests.ranks import free_port

NUM_TOKENS = 43
"""The tokens of a response: the mean in `overlap`."""
NUM_PROMPTS = 60
GROUPS_OF_A_STEP = 4
"""A small number, because whole steps are counted."""
IDLE, CACHED, PLAIN, STEPS = range(4)
NAMES = {IDLE: "nothing", CACHED: "products in cache", PLAIN: "a plain loop that trains", STEPS: "a run's steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    rounds = 1 if arguments.tiny else arguments.rounds
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = draw_model(Path(folder) / "model")
        for load in (LOADS["balanced"],) if arguments.tiny else (LOADS["gen_double"], LOADS["balanced"]):
            with _other_core(model, load) as other:
                speeds, beside, alone = _measure(model, load, other, rounds, arguments.tiny)
            figures |= _compare(load, speeds, beside, alone)
    report.finish(figures)


Measured = dict[int, list[float]]


def _compare(load: Load, speeds: Measured, beside: Measured, alone: Measured) -> dict[str, float]:
    """Print tables of the share that each keeps beside the other, and return the figures."""
    report.table(
        f"vLLM, {load.in_flight} responses at a time, beside",
        {name: speeds[kind] for kind, name in NAMES.items()},
        "tokens/s",
    )
    kept = {kind: [now / was for now, was in zip(speeds[kind], speeds[IDLE], strict=True)] for kind in NAMES}
    others = {kind: [now / was for now, was in zip(beside[kind], alone[kind], strict=True)] for kind in beside}
    report.table("vLLM keeps, beside", {NAMES[kind]: kept[kind] for kind in beside}, "")
    report.table("beside vLLM is kept by", {NAMES[kind]: values for kind, values in others.items()}, "")
    of_load, middle = f"_{load.name}", statistics.median
    return {
        f"vllm_kept{of_load}": middle(kept[STEPS]),
        f"steps_kept{of_load}": middle(others[STEPS]),
        f"vllm_kept_plain{of_load}": middle(kept[PLAIN]),
        "vllm_kept_cached": middle(kept[CACHED]),
    }


def _measure(
    model: Path, load: Load, other: "_OtherCore", rounds: int, is_tiny: bool
) -> tuple[Measured, Measured, Measured]:
    """Return vLLM's tokens a second by the other core's work, and the other's counts a second beside vLLM and alone."""
    draw = random.Random(load.in_flight)
    count = 1 if is_tiny else NUM_PROMPTS
    prompts = [[draw.randrange(20, VOCAB_SIZE) for _ in range(load.prompt_length)] for _ in range(count)]
    sampling = [
        {"n": GROUP_SIZE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, "seed": seed}
        for seed in range(count)
    ]
    speeds: Measured = {kind: [] for kind in NAMES}
    beside: Measured = {kind: [] for kind in NAMES if kind != IDLE}
    alone: Measured = {kind: [] for kind in beside}
    with vllm_offline.start(model, ENGINE_CORE, SEQ_LENGTH, load.in_flight, in_one_process=True) as generate:
        generate(prompts, sampling)
        for _ in range(rounds):
            for kind in NAMES:
                with other.doing(kind):
                    speed, rate = other.watch(lambda: generate(prompts, sampling))
                    speeds[kind].append(speed)
                    if kind != IDLE:
                        beside[kind].append(rate)
                        alone[kind].append(other.watch_alone(0.5 if is_tiny else 2.0))
    return speeds, beside, alone


@dataclasses.dataclass(frozen=True)
class _Shared:
    """The values that both processes see."""

    kind: "Synchronized[int]"
    count: "Synchronized[int]"
    seconds: "Synchronized[float]"
    """Seconds that the counts took."""


class _OtherCore:
    """A process on the other core, which computes what it is told to and counts its rounds."""

    def __init__(self, process: BaseProcess, shared: _Shared) -> None:
        self._process = process
        self._shared = shared

    @contextmanager
    def doing(self, kind: int) -> Iterator[None]:
        self._shared.kind.value = kind
        begun = self._shared.count.value
        # It has taken notice once it counts.
        if kind != IDLE:
            self._wait_for(begun + 2)
        try:
            yield
        finally:
            self._shared.kind.value = IDLE

    def watch(self, action: Callable[[], float]) -> tuple[float, float]:
        """Return the action's result, and the process's counts a second meanwhile."""
        count, seconds = self._shared.count.value, self._shared.seconds.value
        result = action()
        counted = self._shared.count.value - count
        return result, counted / (self._shared.seconds.value - seconds) if counted else 0.0

    def watch_alone(self, seconds: float) -> float:
        """Return the process's counts a second over at least these seconds and one count, with nothing beside it."""
        begun = self._shared.count.value

        def wait() -> float:
            time.sleep(seconds)
            self._wait_for(begun + 1)
            return seconds

        return self.watch(wait)[1]

    def _wait_for(self, count: int) -> None:
        while self._shared.count.value < count:
            if not self._process.is_alive():
                raise RuntimeError("the process on the other core has ended; its output is above")
            time.sleep(0.01)


@contextmanager
def _other_core(model: Path, load: Load) -> Iterator[_OtherCore]:
    context = multiprocessing.get_context("spawn")
    shared = _Shared(context.Value("i", IDLE), context.Value("q", 0), context.Value("d", 0.0))
    process = context.Process(target=_compute, args=(shared, model, load), daemon=True)
    process.start()
    other = _OtherCore(process, shared)
    try:
        with other.doing(STEPS):
            pass
        yield other
    finally:
        process.kill()
        process.join()


def _compute(shared: _Shared, model: Path, load: Load) -> None:
    os.sched_setaffinity(0, {TRAINER_CORE})
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Before any module that imports megatron.
    platforms.select("cpu").install()
    import torch

    from benchmarks import shared_prompt_step
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    torch.set_num_threads(1)
    small, few = torch.randn(256, 256), torch.randn(64, 256)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(256, 768), torch.nn.SiLU(), torch.nn.Linear(768, 256)) for _ in range(4)
    ]
    plain = torch.nn.Sequential(*blocks, torch.nn.Linear(256, VOCAB_SIZE))
    tokens, targets = torch.randn(512, 256), torch.randint(0, VOCAB_SIZE, (512,))
    words = shared_prompt_step.FLAGS.format(groups=GROUPS_OF_A_STEP, k=GROUP_SIZE, r=NUM_TOKENS, length=SEQ_LENGTH)
    # The last value of a flag is taken.
    several = ["--micro-batch-size", str(load.groups * GROUP_SIZE)]
    settings = command_line.parse([*words.split(), *several, "--hf-model", str(model)])
    slot = shared_prompt_step.draw_slot(load.prompt_length, NUM_TOKENS, GROUP_SIZE, VOCAB_SIZE, load.groups)
    with start_session(settings) as session:
        step = shared_prompt_step.our_step(settings, session, slot)
        actions: dict[int, Callable[[], object]] = {
            CACHED: lambda: [few @ small for _ in range(100)],
            PLAIN: lambda: torch.nn.functional.cross_entropy(plain(tokens), targets).backward(),
            STEPS: step,
        }
        while True:
            kind = shared.kind.value
            if kind == IDLE:
                time.sleep(0.005)
                continue
            begun = time.perf_counter()
            actions[kind]()
            shared.seconds.value += time.perf_counter() - begun
            shared.count.value += 1


if __name__ == "__main__":
    from benchmarks.contention import main as importable_main

    importable_main()
