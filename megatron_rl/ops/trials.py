"""The trial of an operation on a device before training: results and gradients beside those of its definition.

The rule: each result's distance from the definition in float64 is at most a few times the distance of the definition in
the same precision, plus units in the last place of the largest number.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_rl.errors import PlatformError

# A kernel rounds and sums in another order, and the largest error of one draw moves by a factor of two between draws.
FACTOR, UNITS = 3, 2

Compute = Callable[[torch.device, torch.dtype], Sequence[torch.Tensor]]


class TrialError(Exception):
    """A fault of the results, in words."""


def check(
    claim: str, names: Sequence[str], compute: Compute, define: Compute, device: torch.device, dtype: torch.dtype,
    advise: Callable[[], str], sizes: str = "", by_row: bool = False,
) -> None:  # fmt: skip
    """Compare as `compare` does; raise a PlatformError that denies the claim and advises what to write instead."""
    try:
        compare(names, compute, define, device, dtype, by_row)
    except TrialError as fault:
        instead = advise()
        advice = f"Write {instead}, and please" if instead else "Please"
        raise PlatformError(
            f"{claim} on {device.type}: {fault} ({sizes}{dtype}). {advice} report this with the output of "
            "megatron-rl doctor"
        ) from fault


def compare(
    names: Sequence[str],
    compute: Compute,
    define: Compute,
    device: torch.device,
    dtype: torch.dtype,
    by_row: bool = False,
) -> None:
    """Raise a TrialError unless the device's results are as near to the definition in float64 as the rule demands.

    Both functions get a device and a dtype, and return results in the order of their names. With `by_row` distances are
    parts of the largest number in the same row: a row of small numbers counts like any other.
    """
    host = torch.device("cpu")
    exact, rounded = (define(host, kind) for kind in (torch.float64, dtype))
    try:
        # The second time, kernels are launched as in every later step (`ops.triton_support`).
        _, results = (compute(device, dtype) for _ in range(2))
    except Exception as error:
        # A compiler may fail in many ways.
        raise TrialError(f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    for name, truth, plain, result in zip(names, exact, rounded, results, strict=True):
        bound = FACTOR * _measure(plain, truth, by_row) + UNITS * torch.finfo(dtype).eps
        distance = _measure(result, truth, by_row)
        # Written so that NaN raises too.
        if not distance <= bound:
            raise TrialError(f"{name} is off by {distance:g} of the largest, and rounding explains {bound:g}")


def _measure(result: torch.Tensor, truth: torch.Tensor, by_row: bool) -> float:
    """Return the largest distance as a part of the largest number."""
    result, truth = (tensor.detach().to("cpu", torch.float64) for tensor in (result, truth))
    largest = truth.abs().amax(dim=-1, keepdim=True) if by_row else truth.abs().max()
    # Where the truth is 0 alone, as in the gradient of padding, the result must be 0 too.
    return ((result - truth) / largest.clamp_min(torch.finfo(truth.dtype).tiny)).abs().max().item()
