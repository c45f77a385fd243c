"""Sums over the targets of each response, in an order that is always the same, and without asking a device for a size.

The targets of a response lie next to each other, in the order of the responses.

Letters: N targets, S responses of the micro-batch, L the most tokens of a response, B blocks, T tokens of a block.
"""

import dataclasses

import torch

# Suffixes are summed within blocks of this many tokens, then over blocks: a triangle of L x L would be too large.
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The response of each target, and the lengths of responses."""

    sequences_N: torch.Tensor
    lengths_S: torch.Tensor
    max_tokens: int

    def total(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over each response, [S]."""
        return self._spread(values_N).sum(1)

    def sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the sum over the response of each target."""
        # index_select: its result does not depend on the number of threads.
        return self.total(values_N).index_select(0, self.sequences_N)

    def mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean over the response of each target."""
        return self.divide(self.sum(values_N))

    def divide(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return values over the length of each target's response."""
        return values_N / self.lengths_S.clamp(min=1).index_select(0, self.sequences_N)

    def shift(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the value of the next target of each target's response, and 0 for the last one."""
        after_N = torch.nn.functional.pad(values_N[1:], (0, 1))
        is_last_N = torch.nn.functional.pad(self.sequences_N[1:] != self.sequences_N[:-1], (0, 1), value=True)
        return after_N.masked_fill(is_last_N[: len(after_N)], 0.0)

    def sum_from(self, values_N: torch.Tensor, discount: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Return the sum over each target and those after it in its response, each discounted by its distance.

        A tensor has a discount for each response, [S].
        """
        if isinstance(discount, torch.Tensor):
            discount = discount[:, None, None]
        spread_SL = self._spread(values_N)
        # cumsum has no fixed order on some devices.
        missing = -spread_SL.shape[1] % _BLOCK
        spread_SBT = torch.nn.functional.pad(spread_SL, (0, missing)).unflatten(1, (-1, _BLOCK))
        powers_T = discount ** torch.arange(_BLOCK + 1, dtype=values_N.dtype, device=values_N.device)
        within_SBT = spread_SBT @ _lower_triangle(_BLOCK, values_N, discount)
        # The sums of later blocks, as the block after this one counts them.
        of_blocks_SB = (spread_SBT * powers_T[..., :-1]).sum(2)
        after = _lower_triangle(spread_SBT.shape[1], values_N, discount**_BLOCK, first=1)
        after_SB = of_blocks_SB @ after if after.dim() == 2 else (of_blocks_SB[:, None] @ after)[:, 0]
        summed_SL = (within_SBT + after_SB[:, :, None] * powers_T[..., 1:].flip(-1)).flatten(1)
        return summed_SL.flatten().index_select(0, self._places(summed_SL.shape[1]))

    def _spread(self, values_N: torch.Tensor) -> torch.Tensor:
        """Give each response a row of its own, with zeros after it."""
        spread = values_N.new_zeros(len(self.lengths_S) * self.max_tokens)
        return spread.index_copy(0, self._places(self.max_tokens), values_N).unflatten(0, (-1, self.max_tokens))

    def _places(self, width: int) -> torch.Tensor:
        numbers_S = torch.arange(len(self.lengths_S), device=self.lengths_S.device)
        starts_S = torch.searchsorted(self.sequences_N, numbers_S)
        positions_N = torch.arange(len(self.sequences_N), device=self.sequences_N.device)
        return positions_N + (numbers_S * width - starts_S).index_select(0, self.sequences_N)


def _lower_triangle(size: int, like: torch.Tensor, base: float | torch.Tensor, first: int = 0) -> torch.Tensor:
    """Make a triangle of powers, which begin `first` places below the diagonal, with the power of 0."""
    places = torch.arange(size, device=like.device)
    exponents = places[:, None] - places - first
    powers = base ** exponents.clamp(min=0).to(like.dtype)
    return powers.masked_fill(exponents < 0, 0.0)
