"""How the losses of tokens add up to the loss of an update. By the names of --grpo-aggregation.

A micro-batch gives a sum and its share of a denominator. The update's denominator is the sum of these shares over all
micro-batches of all replicas, and divides once, at the end. So nothing depends on how responses are packed.

Letters: N targets.
"""

from collections.abc import Callable

import torch

from megatron_rl.algorithm.sequences import Sequences

Weigh = Callable[[Sequences, torch.Tensor], torch.Tensor]
"""From the losses of targets to what each adds to the sum."""


def _alike(sequences: Sequences, loss_N: torch.Tensor) -> torch.Tensor:
    return loss_N


WEIGHTS: dict[str, Weigh] = {"token": _alike, "sequence": Sequences.divide, "constant": _alike}


def count_share(aggregation: str, num_targets: int, num_responses: int, max_tokens: int) -> int:
    """A micro-batch's share of the denominator; whole numbers, so that their sum is exact."""
    return {"token": num_targets, "sequence": num_responses, "constant": num_responses * max_tokens}[aggregation]
