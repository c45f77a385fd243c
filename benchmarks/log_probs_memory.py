"""Measure the output layer's memory with its log-probs, forward and backward, over the bytes of the logits.

It never holds the logits. 4,096 targets, a vocabulary of 150,000 and a hidden size of 256, all bfloat16, in a fresh
process. The peak is the memory of the process above hidden states, weight and targets. From the backward's peak the
weight's gradient is subtracted too, which any way of computing it has to return. The hidden states' gradient is
counted, and so is all other memory. Beside it, alternating, stand the times of forward and backward at a smaller shape,
and those of the naive form.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import report
from megatron_rl import platforms
from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from tests.naive_log_probs import naive_log_probs
from tests.ranks import run_ranks


@dataclasses.dataclass(frozen=True)
class Shape:
    num_targets: int
    vocab_size: int
    hidden_size: int

    def draw(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw hidden states, weight and targets."""
        hidden_NE = torch.empty(self.num_targets, self.hidden_size, dtype=torch.bfloat16, device=device).normal_()
        weight_VE = torch.empty(self.vocab_size, self.hidden_size, dtype=torch.bfloat16, device=device)
        weight_VE.normal_(std=self.hidden_size**-0.5)
        targets_N = torch.randint(self.vocab_size, (self.num_targets,), device=device)
        return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), targets_N

    def logits_bytes(self) -> int:
        return self.num_targets * self.vocab_size * torch.bfloat16.itemsize


FULL = Shape(num_targets=4096, vocab_size=150_000, hidden_size=256)
MODERATE = Shape(num_targets=1024, vocab_size=32_768, hidden_size=512)
# A processor without instructions for bf16 multiplies it tens of times slower than others.
TINY = Shape(num_targets=256, vocab_size=8_192, hidden_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    large, moderate, rounds = (TINY, TINY, 1) if arguments.tiny else (FULL, MODERATE, arguments.rounds)
    ratio = logprob_peak(large)
    report.table("memory", {"peak / logits": [ratio]}, f"of {large.logits_bytes() / 1e9:.2f} GB")
    # A round may take minutes on the processors that TINY is for.
    times = run_ranks(_times, 1, moderate, rounds, timeout=600 * rounds)[0]
    report.table("forward and backward", times, "s")
    ratios = [a / b for a, b in zip(times["fused"], times["naive"], strict=True)]
    report.table("ratio", {"fused / naive": ratios}, "")
    report.finish({"logprob_peak_vs_logits": ratio, "logprob_vs_naive": statistics.median(ratios)})


def logprob_peak(shape: Shape) -> float:
    """Measure the peak in a fresh process."""
    return run_ranks(peak_over_logits, 1, shape, timeout=600)[0]


def peak_over_logits(shape: Shape) -> float:
    """Measure the peak of this process, which must not have held more before."""
    platform = platforms.select("cpu")
    hidden_NE, weight_VE, targets_N = shape.draw(platform.device())
    platform.reset_peak_memory()
    before = platform.memory().peak
    log_probs_N = output_log_probs(hidden_NE, weight_VE, targets_N, VocabularyShard(0, shape.vocab_size))
    forward_peak = platform.memory().peak - before
    log_probs_N.sum().backward()
    backward_peak = platform.memory().peak - before - weight_VE.nbytes
    return max(forward_peak, backward_peak) / shape.logits_bytes()


def _times(shape: Shape, rounds: int) -> dict[str, list[float]]:
    hidden_NE, weight_VE, targets_N = shape.draw(platforms.select("cpu").device())

    def fused() -> torch.Tensor:
        return output_log_probs(hidden_NE, weight_VE, targets_N, VocabularyShard(0, shape.vocab_size))

    def naive() -> torch.Tensor:
        return naive_log_probs(hidden_NE, weight_VE, targets_N, shape.vocab_size, 1.0)

    times: dict[str, list[float]] = {"fused": [], "naive": []}
    for round_number in range(rounds + 1):
        for name, form in (("fused", fused), ("naive", naive)):
            seconds = _seconds(form, hidden_NE, weight_VE)
            # The first round prepares what the others find ready.
            if round_number > 0:
                times[name].append(seconds)
    return times


def _seconds(form: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> float:
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    form().sum().backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.log_probs_memory import main as importable_main

    importable_main()
