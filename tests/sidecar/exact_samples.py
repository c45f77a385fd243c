"""Counts of short sampled responses beside their exact probabilities."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import hf_models
from tests.truth import everything_in

NUM_TOKENS = 4
_LEAST_EXPECTED = 5


def compute_probabilities(model: Path, prompt: Sequence[int], vocab_size: int, temperature: float) -> torch.Tensor:
    """Compute the probability of each response of `NUM_TOKENS` tokens, a dimension a token, in float64."""
    first = list(itertools.product(range(vocab_size), repeat=NUM_TOKENS - 1))
    ids = torch.tensor([[*prompt, *tokens] for tokens in first])
    with torch.no_grad(), everything_in(torch.float64):
        logits = hf_models.load(model, torch.float64)(ids).logits[:, len(prompt) - 1 :]
    choices = (logits / temperature).softmax(-1).reshape(*([vocab_size] * (NUM_TOKENS - 1)), NUM_TOKENS, vocab_size)
    joint = torch.ones((), dtype=torch.float64)
    for place in range(NUM_TOKENS):
        # What follows a token does not change its probabilities.
        own = choices[(slice(None),) * place + (0,) * (NUM_TOKENS - 1 - place) + (place,)]
        joint = joint[..., None] * own
    return joint


def find_deviation(responses: Sequence[Sequence[int]], probabilities: torch.Tensor) -> float:
    """Return how far counts of neighboring tokens are from their probabilities: the largest z of three chi-squareds."""
    counts = torch.zeros_like(probabilities)
    counts.index_put_(tuple(torch.tensor(responses).T), torch.ones(len(responses), dtype=counts.dtype), accumulate=True)
    found = []
    for place in range(NUM_TOKENS - 1):
        others = [other for other in range(NUM_TOKENS) if other not in (place, place + 1)]
        seen, expected = (one.sum(others).flatten() for one in (counts, probabilities * len(responses)))
        is_rare = expected < _LEAST_EXPECTED
        seen, expected = (torch.cat([one[~is_rare], one[is_rare].sum()[None]]) for one in (seen, expected))
        chi_squared = ((seen - expected) ** 2 / expected.clamp_min(1e-9)).sum().item()
        found.append(_normalize(chi_squared, len(seen) - 1))
    return max(found)


def _normalize(chi_squared: float, freedom: int) -> float:
    """Return the z of a standard normal with about the same probability (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return ((chi_squared / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
