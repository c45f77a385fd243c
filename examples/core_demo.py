"""Train a tiny Qwen3 on two ranks: the log-probs and gradients of transformers, the same weights in every layout.

make demo
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES
from tests.ranks import run_ranks

LAYOUTS = ("TP1", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2+distopt")


def main() -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        print("drawing a Qwen3 of 4 layers, with random weights, and asking transformers for log-probs and gradients")
        model = hf_models.draw("qwen3", Path(folder) / "qwen3")
        expected = parity.expected(model, temperature=parity.TEMPERATURE)
        computed: dict[tuple[str, str], Any] = {}
        for world_size in (1, 2):
            names = [name for name in LAYOUTS if CASES[name].world_size == world_size]
            ranks = "one rank" if world_size == 1 else f"{world_size} ranks"
            print(f"running packed groups through megatron-core on {ranks}: {', '.join(names)}")
            computed |= run_ranks(parity.run_layouts, world_size, names, {"qwen3": model})[0]
    print_table(computed, expected)
    log_probs = expected.truth.log_probs
    num_tokens = sum(len(values) for values in log_probs)
    print(f"\n{num_tokens} tokens of responses in {len(log_probs)} packs, in {time.monotonic() - start:.0f} s")


def print_table(computed: dict[tuple[str, str], Any], expected: parity.Expected) -> None:
    """Print one line a layout: the largest errors as parts of their bounds, and the weights' fingerprint."""
    print("\nlargest error against float64, of at most 1: twice transformers' own, and rounding")
    print(f"{'layout':<14}{'log-probs':>12}{'gradients':>12}   fingerprint of the weights")
    for (layout, _), (ours, fingerprint) in computed.items():
        (log_prob, _), (gradient, _) = expected.worst(ours).values()
        print(f"{layout:<14}{log_prob:>12.2f}{gradient:>12.2f}   {fingerprint[:16]}")


if __name__ == "__main__":
    main()
