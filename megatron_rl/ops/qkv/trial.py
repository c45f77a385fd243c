"""The trial of a backend on a few rows before training: heads and gradients against the definition in float64."""

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.qkv import HeadNorms, make_rotation, split_heads

# A kernel sums in another order. So its distance from the truth may be this factor times the distance of the definition
# in the same precision, plus these units in the last place of the largest value.
_FACTOR, _UNITS = 3, 2
# Groups whose last program has rows left over in the forward and in the backward pass.
_NUM_ROWS, _NUM_GROUPS, _EPSILON = 150, 2, 1e-6
_WHAT = (
    "queries", "keys", "values", "the gradient of their product", "the gradient of the norm of queries",
    "the gradient of the norm of keys",
)  # fmt: skip


def check_backend(name: str, device: torch.device, dtype: torch.dtype, queries: int, head_dim: int) -> None:
    """Raise a PlatformError if the backend does not compute heads of this size, with norms or without, on this device.

    `queries` is the number of query heads of a group.
    """
    host = torch.device("cpu")
    for with_norms in (True, False):
        inputs = _draw(dtype, queries, head_dim)
        truth = _compute("naive", inputs, with_norms, host, torch.float64)
        plain = _compute("naive", inputs, with_norms, host, dtype)
        # The second time, kernels are launched as in every later step (`ops.kept_launches`).
        _, found = (_compute(name, inputs, with_norms, device, dtype) for _ in range(2))
        for what, of_truth, of_plain, of_backend in zip(_WHAT, truth, plain, found, strict=False):
            largest = of_truth.abs().max().item()
            bound = _FACTOR * _distance(of_plain, of_truth) + _UNITS * torch.finfo(dtype).eps * largest
            distance = _distance(of_backend, of_truth)
            # Written so that NaN raises too.
            if not distance <= bound:
                raise PlatformError(
                    f"--qkv-backend {name} does not compute heads on {device.type}: {what} is off by {distance:g}, and "
                    f"rounding explains {bound:g} (heads of {head_dim}, {dtype}). Write torch instead, and please "
                    "report this with the output of megatron-rl doctor"
                )


def _draw(dtype: torch.dtype, queries: int, head_dim: int) -> list[torch.Tensor]:
    """Draw the product, both weights, the gradients of queries, keys and values, and angles."""
    generator = torch.Generator().manual_seed(0)
    heads = ((_NUM_ROWS, of * _NUM_GROUPS, head_dim) for of in (queries, 1, 1))
    shapes = ((_NUM_ROWS, _NUM_GROUPS * (queries + 2) * head_dim), (head_dim,), (head_dim,), *heads)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [*drawn, 9 * torch.randn(_NUM_ROWS, head_dim // 2, generator=generator)]


def _compute(
    name: str, inputs: list[torch.Tensor], with_norms: bool, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return heads and gradients, in float64 on the host."""
    given = [tensor.to(device, dtype).requires_grad_() for tensor in inputs[:3]]
    grads = [tensor.to(device, dtype) for tensor in inputs[3:6]]
    angles_TF = inputs[6].to(device, torch.promote_types(dtype, torch.float32))
    norms = HeadNorms(given[1], given[2], _EPSILON) if with_norms else None
    heads = split_heads(given[0], _NUM_GROUPS, grads[0].shape[-1], make_rotation(angles_TF), norms, name)
    found = torch.autograd.grad(heads, given if with_norms else given[:1], grads)
    return [tensor.detach().to("cpu", torch.float64) for tensor in (*heads, *found)]


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return (found - truth).abs().max().item()
