"""Matrix products that are added to a sum in the product itself, and not rounded before, where torch can do that."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)


def add_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    """Add a @ b to the sum, without rounding the product if torch has an operation for that here."""
    _find_addition(sum_NM.device, a_NK.dtype, sum_NM.dtype)(sum_NM, a_NK, b_KM)


def _add_at_once(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    wider: dict[str, Any] = {} if a_NK.dtype == sum_NM.dtype else {"out_dtype": sum_NM.dtype}
    torch.addmm(sum_NM, a_NK, b_KM, out=sum_NM, **wider)


def _add_wide_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    sum_NM += torch.mm(a_NK, b_KM, out_dtype=sum_NM.dtype)


def _add_rounded_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    sum_NM += a_NK @ b_KM


@functools.cache
def _find_addition(device: torch.device, dtype: torch.dtype, sum_dtype: torch.dtype) -> Callable[..., None]:
    """Return the fastest of these operations that this torch has for the device, tried on a small product."""
    a_88, b_88 = (torch.ones(8, 8, device=device, dtype=dtype) for _ in range(2))
    for add, what in ((_add_at_once, "torch.addmm"), (_add_wide_product, "torch.mm")):
        try:
            # A weight's gradient multiplies by a transposed matrix.
            add(torch.ones(8, 8, device=device, dtype=sum_dtype), a_88.t(), b_88)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            reason = str(error).split("\n")[0]
            _log.info("%s does not sum products of %s in %s on %s: %s", what, dtype, sum_dtype, device.type, reason)
        else:
            return add
    return _add_rounded_product
