"""How the losses of tokens become that of an update. Registered by the names of `--grpo-aggregation`.

A micro-batch gives a sum and its share of a denominator; the update's denominator is the sum of the shares over all
micro-batches of all replicas, and divides once, at the end. So nothing depends on how responses are packed.

Letters: N targets, S responses of the micro-batch.
"""

from collections.abc import Callable

import torch

Weights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the response of each target and the responses' lengths to each target's weight in the sum, or None for ones."""


def _token(sequences_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(sequences_N), device=sequences_N.device)


def _sequence(sequences_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    # index_select: what reads by position must not depend on the number of threads.
    return (1.0 / lengths_S.clamp(min=1)).float().index_select(0, sequences_N)


WEIGHTS: dict[str, Weights] = {"token": _token, "sequence": _sequence, "constant": _token}


def share(name: str, num_targets: int, num_responses: int, max_tokens: int) -> int:
    """A micro-batch's share of the denominator; whole numbers, so that their sum is exact."""
    return {"token": num_targets, "sequence": num_responses, "constant": num_responses * max_tokens}[name]
