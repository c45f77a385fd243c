"""Measure a training step's use of its core: its floating-point operations a second over those of one large product.

A step lies between a run's groups and its new weights, from slots to update, on one thread. The product has two
matrices of 1,024 x 1,024 in fp32; step and product take turns. Counted are the products of the layers for every token
of a pack, of attention for every pair, and of the output layer for every token of a response, three times for forward
and backward. The rest of the time is listed by the operator that spent it.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import random_models, report, shared_prompt_step
from megatron_rl.types import Architecture
from tests.ranks import run_ranks

SIDE = 1024
NUM_SHOWN = 14


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, and the groups of a step."""

    architecture: Architecture
    prompt: int
    response: int
    num_responses: int
    num_groups: int

    def count(self) -> float:
        """Count the floating-point operations of a step, forward and backward."""
        model = self.architecture
        queries, pairs = model.num_attention_heads * model.kv_channels, model.num_query_groups * model.kv_channels
        of_layer = model.hidden_size * (2 * queries + 2 * pairs + 3 * model.ffn_hidden_size)
        num_targets = self.num_responses * self.response
        num_seen = self.prompt**2 / 2 + self.num_responses * (self.response * self.prompt + self.response**2 / 2)
        products = model.num_layers * ((self.prompt + num_targets) * of_layer + 2 * num_seen * queries)
        return 3 * 2 * self.num_groups * (products + num_targets * model.hidden_size * model.vocab_size)


def _draw_up(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int) -> Architecture:
    return Architecture(
        family="qwen3", num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_heads, num_query_groups=num_heads // 2, kv_channels=32, vocab_size=vocab_size,
        max_position_embeddings=2048, qk_layernorm=True,
    )  # fmt: skip


# Those of the benchmark `trl`.
WORKS = {
    "10m": Work(_draw_up(8, 256, 8, 4096), 1024, 64, 16, num_groups=8),
    "40m": Work(_draw_up(8, 512, 16, 8192), 256, 32, 8, num_groups=16),
}
LEAST = Work(_draw_up(2, 64, 2, 512), 16, 8, 2, num_groups=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    figures = {}
    for name, work in WORKS.items():
        if arguments.tiny:
            work, arguments.rounds = LEAST, 1
        rates, spent = run_ranks(_measure, 1, work, arguments.rounds, timeout=600)[0]
        report.table(f"{name}: 10^9 operations a second", rates, "GFLOP/s")
        print(f"\n{name}: a step's time by operator")
        for operator, share in spent.items():
            print(f"{operator:<60}{share:>8.1%}")
        ratios = [ours / peak for ours, peak in zip(rates["step"], rates["product"], strict=True)]
        report.table("in the same round", {"step / product": ratios}, "")
        figures[f"step_vs_peak_{name}"] = statistics.median(ratios)
    report.finish(figures)


def _measure(work: Work, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the rates of both, and the shares of a step's time by operator."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.trainer.mcore.session import start_session

    torch.set_num_threads(1)
    words = shared_prompt_step.FLAGS.format(
        groups=work.num_groups, k=work.num_responses, r=work.response, length=work.prompt + work.response
    )
    slot = shared_prompt_step.draw_slot(work.prompt, work.response, work.num_responses, work.architecture.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        random_models.make(model, work.architecture)
        settings = command_line.parse([*words.split(), "--hf-model", str(model)])
        with start_session(settings) as session:
            step = shared_prompt_step.our_step(settings, session, slot)
            a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
            rates: dict[str, list[float]] = {"step": [], "product": []}
            for number in range(rounds + 1):
                of_step = work.count() / _seconds(step) / 1e9
                of_product = 2 * SIDE**3 / min(_seconds(lambda: a @ b) for _ in range(10)) / 1e9
                # The first round warms up.
                if number:
                    rates["step"].append(of_step)
                    rates["product"].append(of_product)
            return rates, _shares(step)


def _seconds(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def _shares(step: Callable[[], object]) -> dict[str, float]:
    """Return the shares of a step's time, the largest first; the time outside operators is Python's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        seconds = _seconds(step)
    shares = {event.key: event.self_cpu_time_total / 1e6 / seconds for event in profile.key_averages()}
    largest = sorted(shares.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    rest = sum(shares.values()) - sum(share for _, share in largest)
    return dict(largest) | {"all other operators": rest, "outside operators": 1 - sum(shares.values())}


if __name__ == "__main__":
    from benchmarks.step import main as importable_main

    importable_main()
