"""Time the output layer with log-probs, and its memory, beside the same by all logits at once."""

import functools

import torch

from benchmarks.gpu import models, turns
from benchmarks.gpu.work import Work
from benchmarks.log_probs_memory import TINY, Shape
from megatron_rl import platforms
from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from tests.naive_log_probs import naive_log_probs

SHAPES = tuple(
    Shape(num_targets, models.LARGEST_VOCABULARY, hidden_size)
    for num_targets, hidden_size in ((4_096, 1_024), (32_768, 1_024), (8_192, 4_096))
)
NUM_ROUNDS = 5
SECONDS_OF_A_SHAPE = 3.0


def measure(work: Work) -> None:
    """Add a row for each shape."""
    for shape in (TINY,) if work.is_tiny else SHAPES:
        name = f"{shape.num_targets:,} x {shape.vocab_size:,} x {shape.hidden_size:,}"
        if work.has_time("output_layer", name, SECONDS_OF_A_SHAPE):
            with work.spared("output_layer", name):
                _add(work, name, shape)


def _add(work: Work, name: str, shape: Shape) -> None:
    platform = platforms.select(work.device)
    hidden_NE, weight_VE, targets_N = shape.draw(torch.device(work.device))

    def run(is_naive: bool) -> None:
        hidden_NE.grad = weight_VE.grad = None
        if is_naive:
            log_probs_N = naive_log_probs(hidden_NE, weight_VE, targets_N, shape.vocab_size, 1.0)
        else:
            log_probs_N = output_log_probs(hidden_NE, weight_VE, targets_N, VocabularyShard(0, shape.vocab_size))
        log_probs_N.sum().backward()

    ways = {"ours": functools.partial(run, False), "naive": functools.partial(run, True)}
    figures, note = {"gib": turns.measure_peak(ways["ours"], platform).above}, ""
    try:
        figures["naive_gib"] = turns.measure_peak(ways["naive"], platform).above
    except torch.OutOfMemoryError:
        del ways["naive"]
        turns.release(platform)
        note = "all logits at once are out of memory"
    seconds = turns.take_turns(ways, platform, NUM_ROUNDS, lambda: work.seconds_left > 0)
    figures |= {way: 1e3 * value for way, value in seconds.items()}
    if "naive" in seconds:
        figures["speedup"] = seconds["naive"] / seconds["ours"]
    work.add("output_layer", name, note, **figures)
