"""Check kernels on a device against their twins in float64 there."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.kernels.computation import Computation, differentiate, run
from benchmarks.kernels.registry import DTYPES, find_refusal, list_computations

# Draws of operands: an error is the root mean square over all of them, so neither side has it by luck.
_DRAWS = 2
# A row's error may be this factor times that of the twin in the same precision, plus these units in the last place.
# The number whose last place that is has the mean squares of the row and of all rows as its square.
_FACTOR, _UNITS = 2, 1


def check(name: str, device: str) -> Iterator[str]:
    """Yield what is wrong with a kernel; print each result's error as a part of its bound."""
    if reason := find_refusal(name, device):
        print(f"{name}: {reason}", flush=True)
        return
    for computation in list_computations(name, device):
        for dtype_name in computation.dtypes:
            label = f"{name}, {dtype_name} {computation.name}"
            try:
                ratios = compare(computation, DTYPES[dtype_name], torch.device(device))
            except Exception as error:
                yield f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            print(f"{label}: {', '.join(f'{what} {ratio:.2f}' for what, ratio in ratios.items())}", flush=True)
            # Written so that a value that is not a number fails.
            yield from (f"{label}: {what} {ratio:.2f}" for what, ratio in ratios.items() if not ratio <= 1)


def compare(computation: Computation, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Return the error of each result, as a part of its bound.

    Each row has an error, so one wrong row is found among many. Whole numbers must be equal.
    """
    compute = differentiate if computation.has_gradients else run
    sums: dict[str, list[Any]] = {}
    units: dict[str, float] = {}
    for seed in range(_DRAWS):
        given = computation.draw_operands(dtype, device, seed)
        theirs = compute(computation.twin, given)
        # The second time, kernels are launched as in every later step (`ops.triton_support`).
        for found in [compute(computation.ours, given) for _ in range(2)]:
            if computation.is_exact:
                truth: Sequence[torch.Tensor] = theirs
            else:
                exact = [one.double() if one.is_floating_point() else one for one in given]
                truth = compute(computation.twin, exact)
            for what, terms, unit in _list_errors(computation, found, theirs, truth):
                units[what] = unit
                sums[what] = [total + term for total, term in zip(sums.get(what, [0.0] * 3), terms, strict=True)]
    return {
        what: float((error.sqrt() / (_FACTOR * other.sqrt() + units[what] * (truth + truth.mean()).sqrt())).max())
        for what, (error, other, truth) in sums.items()
    }


def _list_errors(
    computation: Computation,
    found: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    truth: Sequence[torch.Tensor],
) -> Iterator[tuple[str, tuple[torch.Tensor, ...], float]]:
    """Yield for each result both sides' mean square errors by row, the truth's mean square, and what it may be off."""
    for what, one, other, exact in zip(computation.results, found, theirs, truth, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            raise TypeError(f"{what} is {one.dtype} {tuple(one.shape)}, and must be {other.dtype} {tuple(other.shape)}")
        if not one.is_floating_point():
            difference = torch.full((1,), float(not torch.equal(one, exact)), dtype=torch.float64)
            yield what, (difference, torch.zeros(1), torch.ones(1)), 0.25
            continue
        terms = (one.double() - exact, other.double() - exact, exact)
        yield what, tuple(map(_mean_squares, terms)), _UNITS * torch.finfo(one.dtype).eps


def _mean_squares(numbers: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each row; that of all numbers if they are one row."""
    rows = numbers.flatten(1) if numbers.dim() > 1 else numbers[None]
    return rows.square().mean(dim=1)
