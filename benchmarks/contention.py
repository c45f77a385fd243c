"""What two cores take from each other without our code: vLLM's own `generate` on one, a loop of torch on the other.

What `overlap` finds lost beyond this is ours. Beside a program that trains, both lose; beside products of matrices that
stay in the core's own cache, vLLM should lose nothing. All in turns.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from benchmarks import report, vllm_offline

VLLM_CORE, OTHER_CORE = 0, 1
SEATS = (32, 192)
"""Responses that vLLM samples at a time, as in `overlap`'s loads."""
GROUP_SIZE, PROMPT_LENGTH, NUM_TOKENS, VOCAB_SIZE = 8, 56, 43, 512
IDLE, CACHED, TRAINING = range(3)
NAMES = {IDLE: "nothing", CACHED: "products in cache", TRAINING: "training"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="as little as there is, to see whether it runs")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, _other_core() as other:
        model = _draw_model(Path(folder))
        for seats in SEATS[-1:] if arguments.tiny else SEATS:
            speeds, steps = _measure(model, seats, other, 1 if arguments.tiny else arguments.rounds, arguments.tiny)
            report.table(
                f"vLLM, {seats} responses at a time, beside", {NAMES[kind]: speeds[kind] for kind in NAMES}, "tokens/s"
            )
            report.table("the loop that trains", steps, "steps/s")
            kept = [beside / alone for beside, alone in zip(speeds[TRAINING], speeds[IDLE], strict=True)]
            cached = [beside / alone for beside, alone in zip(speeds[CACHED], speeds[IDLE], strict=True)]
            trained = [beside / alone for beside, alone in zip(steps["beside vLLM"], steps["alone"], strict=True)]
            report.table("kept", {"vLLM": kept, "vLLM, in cache": cached, "training": trained}, "")
            figures[f"vllm_kept_{seats}"] = statistics.median(kept)
            figures |= {"vllm_kept_cached": statistics.median(cached), "training_kept": statistics.median(trained)}
    report.finish(figures)


def _draw_model(folder: Path) -> Path:
    """The model of `overlap`."""
    from tests.e2e import loop

    return loop.draw_model(
        folder / "model", vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip


def _measure(
    model: Path, seats: int, other: "_OtherCore", rounds: int, is_tiny: bool
) -> tuple[dict[int, list[float]], dict[str, list[float]]]:
    """Tokens a second by what the other core does, and steps a second of the loop that trains."""
    draw = random.Random(seats)
    count = 1 if is_tiny else 3 * seats // GROUP_SIZE
    prompts = [[draw.randrange(20, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)] for _ in range(count)]
    sampling = [
        {"n": GROUP_SIZE, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0, "seed": seed}
        for seed in range(count)
    ]
    speeds: dict[int, list[float]] = {kind: [] for kind in NAMES}
    steps: dict[str, list[float]] = {"alone": [], "beside vLLM": []}
    with vllm_offline.start(model, VLLM_CORE, 2048, seats, in_one_process=True) as generate:
        generate(prompts, sampling)
        for _ in range(rounds):
            for kind in NAMES:
                with other.doing(kind):
                    speed, rate = other.watch(lambda: generate(prompts, sampling))
                speeds[kind].append(speed)
            steps["beside vLLM"].append(rate)
            with other.doing(TRAINING):
                steps["alone"].append(other.watch(lambda: _wait(0.2 if is_tiny else 3.0))[1])
    return speeds, steps


def _wait(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class _OtherCore:
    """A process on the other core, which computes what it is told to and counts how often."""

    def __init__(self, kind: "Synchronized[int]", count: "Synchronized[int]") -> None:
        self._kind = kind
        self._count = count

    @contextmanager
    def doing(self, kind: int) -> Iterator[None]:
        self._kind.value = kind
        begun = self._count.value
        # It has taken notice once it counts.
        while kind != IDLE and self._count.value < begun + 2:
            time.sleep(0.01)
        try:
            yield
        finally:
            self._kind.value = IDLE

    def watch(self, action: Callable[[], float]) -> tuple[float, float]:
        """Return what the action does, and the process's counts a second meanwhile."""
        start, begun = time.perf_counter(), self._count.value
        result = action()
        return result, (self._count.value - begun) / (time.perf_counter() - start)


@contextmanager
def _other_core() -> Iterator[_OtherCore]:
    context = multiprocessing.get_context("spawn")
    kind, count = context.Value("i", IDLE), context.Value("q", 0)
    process = context.Process(target=_compute, args=(kind, count), daemon=True)
    process.start()
    try:
        yield _OtherCore(kind, count)
    finally:
        process.kill()
        process.join()


def _compute(kind: "Synchronized[int]", count: "Synchronized[int]") -> None:
    os.sched_setaffinity(0, {OTHER_CORE})
    import torch

    torch.set_num_threads(1)
    small, few = torch.randn(256, 256), torch.randn(64, 256)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(256, 768), torch.nn.SiLU(), torch.nn.Linear(768, 256)) for _ in range(4)
    ]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(256, VOCAB_SIZE))
    tokens, targets = torch.randn(512, 256), torch.randint(0, VOCAB_SIZE, (512,))
    while True:
        if kind.value == IDLE:
            time.sleep(0.005)
            continue
        if kind.value == CACHED:
            for _ in range(100):
                few @ small
        else:
            torch.nn.functional.cross_entropy(model(tokens), targets).backward()
        count.value += 1


if __name__ == "__main__":
    from benchmarks.contention import main as importable_main

    importable_main()
