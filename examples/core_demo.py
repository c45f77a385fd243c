"""A tiny Qwen3 on two ranks: the same log-probs as transformers, the same gradients, and weights that come back whole.

make demo
"""

import tempfile
import time
from pathlib import Path

import torch

from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES
from tests.ranks import run_ranks

LAYOUTS = ("TP1", "TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2+distopt")


def main() -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        print("drawing a Qwen3 of 4 layers, with random weights, and asking transformers for its log-probs")
        model = hf_models.draw("qwen3", Path(folder) / "qwen3")
        expected = transformers_log_probs(model)
        computed = {}
        for world_size in (1, 2):
            names = [name for name in LAYOUTS if CASES[name].world_size == world_size]
            ranks = "one rank" if world_size == 1 else f"{world_size} ranks"
            print(f"running packed groups through megatron-core on {ranks}: {', '.join(names)}")
            computed |= run_ranks(parity.run_layouts, world_size, names, {"qwen3": model})[0]
    print_table(computed, expected)
    num_tokens = sum(len(values) for values in expected)
    print(f"\n{num_tokens} tokens of responses in {len(expected)} packs, in {time.monotonic() - start:.0f} s")


def transformers_log_probs(folder: Path) -> list[torch.Tensor]:
    """Of the responses alone, each behind its own copy of the prompt."""
    sequences = [[p + r for p, responses in groups for r in responses] for groups in parity.micro_batches()]
    whole = [torch.cat(hf_models.log_probs(folder, pack, parity.TEMPERATURE)) for pack in sequences]
    return parity.of_responses(whole)


def print_table(computed: dict, expected: list[torch.Tensor]) -> None:
    """One line a layout: the largest difference of log-probs and of gradients, and the weights' fingerprint."""
    reference = computed["TP1", "qwen3"][1]
    print(f"\n{'layout':<14}{'log-probs against':>20}{'gradients against':>20}   fingerprint")
    print(f"{'':<14}{'transformers':>20}{'one rank':>20}   of the weights")
    for (layout, _), (log_probs, gradients, fingerprint) in computed.items():
        log_prob = max((a - b).abs().max().item() for a, b in zip(log_probs, expected, strict=True))
        gradient = max(
            ((gradients[name] - value).abs().max() / value.abs().max()).item() for name, value in reference.items()
        )
        print(f"{layout:<14}{log_prob:>20.1e}{gradient:>20.1e}   {fingerprint[:16]}")


if __name__ == "__main__":
    main()
