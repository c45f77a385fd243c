"""Bound how far a floating-point result may be from another program's: both are held against float64's, the truth.

Another processor has other kernels, which round and add up in another order: a fixed bound holds on the machine where
it was found. So both programs are held against the same computed in float64:

    |ours - truth|  <=  2 |theirs - truth|  +  4 units in the last place of the truth's largest value

A distance is the largest of all elements that are given at once; `theirs` computes in the precision of `ours`. Few
elements alone may lie next to the truth by chance, so all of a model's gradients, or weights, are given at once.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

FACTOR = 2
FLOOR_UNITS = 4

Named = Mapping[str, torch.Tensor]


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest difference of an element; not a number if an element is not a number."""
    assert truth.dtype == torch.float64
    assert found.shape == truth.shape
    return (found - truth).abs().max().item() if truth.numel() else 0.0


def error_over_bound(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor) -> float:
    """Return at most 1 if ours is near enough; infinity if one of ours is not a number."""
    assert ours.dtype == theirs.dtype
    return _over_bound(distance(ours, truth), distance(theirs, truth), _largest(truth), theirs.dtype)


def assert_near(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> None:
    """Check the results of kernels; in half precision they may be at most twice as far off, since they round once."""
    for place, (one, other, exact) in enumerate(zip(ours, theirs, truth, strict=True)):
        if one.dtype is torch.float32:
            assert error_over_bound(one, other, exact) <= 1, place
        else:
            assert one.dtype == other.dtype
            assert distance(one, exact) <= FACTOR * distance(other, exact), place


def mean_over_bound(ours: float, theirs: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the same for a mean, which may be as far off as a term of it; `theirs` and `truth` are the terms."""
    return weighted_over_bound(ours, truth.mean().item(), theirs, truth)


def weighted_over_bound(ours: float, expected: float, theirs: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the same for a sum of `truth` with weights that add up to 1 at most."""
    return _over_bound(abs(ours - expected), distance(theirs, truth), _largest(truth), theirs.dtype)


def worst_of(ours: Named, theirs: Named, truth: Named) -> tuple[float, str]:
    """Return the same for a model's tensors together, and the worst one.

    Errors are parts of their tensor's largest value.
    """
    assert ours.keys() == theirs.keys() == truth.keys()
    errors, others = (
        {name: distance(one[name], truth[name]) / _largest(truth[name]) for name in truth} for one in (ours, theirs)
    )
    # A maximum of numbers may overlook one that is not a number.
    worst = next((name for name, error in errors.items() if math.isnan(error)), max(errors, key=errors.__getitem__))
    return _over_bound(errors[worst], max(others.values()), 1.0, theirs[worst].dtype), worst


def _over_bound(error: float, other: float, largest: float, dtype: torch.dtype) -> float:
    assert math.isfinite(other)
    bound = FACTOR * other + FLOOR_UNITS * _unit(largest, dtype)
    if math.isnan(error) or not bound:
        return math.inf if error else 0.0
    return error / bound


def _largest(truth: torch.Tensor) -> float:
    return truth.abs().max().item() if truth.numel() else 0.0


def _unit(value: float, dtype: torch.dtype) -> float:
    """Return the unit in the last place of a value."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value)) if value else 0.0


@contextlib.contextmanager
def everything_in(dtype: torch.dtype):
    """Compute in float64 where code asks for float32: models have their norms, softmaxes and angles in float32."""
    with _Float64InPlaceOfFloat32() if dtype == torch.float64 else contextlib.nullcontext():
        yield


class _Float64InPlaceOfFloat32(TorchFunctionMode):
    def __torch_function__(self, function: Callable, types: Any, args: Sequence = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return function(*args, **kwargs)
