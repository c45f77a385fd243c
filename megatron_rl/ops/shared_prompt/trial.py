"""The trial of a backend on a small pack before training: output and gradients against the definition in float64."""

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.shared_prompt import BACKENDS, find_backend
from megatron_rl.ops.shared_prompt.layout import Layout

# A kernel sums in another order. So its distance from the truth may be this factor times the distance of the definition
# in the same precision, plus these units in the last place of the largest value.
_FACTOR, _UNITS = 3, 2
# Prompts and responses that end within blocks, and on their edges; and groups of equal lengths, which `cudnn` batches.
_PACKS = (((70, (9, 128, 1)), (3, (5,)), (64, (64, 200))), ((70, (65, 65, 65)), (70, (65, 65, 65))))
_WINDOW = 48
_RESULTS = (
    "its output", "the gradient of queries", "the gradient of keys", "the gradient of values", "the gradient of sinks",
)  # fmt: skip


def check_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    window: int | None = None,
    value_dim: int | None = None,
    has_sinks: bool = False,
) -> None:
    """Raise a PlatformError if the backend does not compute attention on this device."""
    if window is not None:
        # Small enough to hide keys of these packs.
        window = min(window, _WINDOW)
    for groups in _PACKS:
        layout = Layout.of_groups(groups)
        _check_pack(
            layout, name, device, dtype, num_heads, num_groups, head_dim, window, value_dim or head_dim, has_sinks
        )


def _check_pack(
    layout: Layout,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    window: int | None,
    value_dim: int,
    has_sinks: bool,
) -> None:
    generator = torch.Generator().manual_seed(0)
    num_tokens = layout.num_tokens
    # One head of keys and values with its queries, since kernels compute such heads one by one.
    queries = num_heads // num_groups
    shapes = ((queries, head_dim), (1, head_dim), (1, value_dim), (queries, value_dim))
    *inputs, weights = (torch.randn(num_tokens, *shape, generator=generator).to(dtype) for shape in shapes)
    if has_sinks:
        inputs.append(torch.linspace(-1, 2, queries).to(dtype))
    host = torch.device("cpu")
    truth = _compute(layout, "naive", inputs, weights, host, torch.float64, window)
    plain = _compute(layout, "naive", inputs, weights, host, dtype, window)
    # The second time, kernels are launched as in every later step (`ops.kept_launches`).
    try:
        _, found = (_compute(layout, name, inputs, weights, device, dtype, window) for _ in range(2))
    except RuntimeError as error:
        reason = f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise _refuse(name, device, dtype, head_dim, reason) from error
    for what, of_truth, of_plain, of_backend in zip(
        _RESULTS[: len(truth)],
        truth,
        plain,
        found,
        strict=True,
    ):
        largest = of_truth.abs().max().item()
        bound = _FACTOR * _distance(of_plain, of_truth) + _UNITS * torch.finfo(dtype).eps * largest
        distance = _distance(of_backend, of_truth)
        # Written so that NaN raises too.
        if not distance <= bound:
            reason = f"{what} is off by {distance:g}, and rounding explains {bound:g}"
            raise _refuse(name, device, dtype, head_dim, reason)


def _refuse(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, reason: str) -> PlatformError:
    others = ", ".join(other for other in BACKENDS if other != name)
    return PlatformError(
        f"--shared-prompt-backend {name} does not compute attention on {device.type}: {reason} (heads of {head_dim}, "
        f"{dtype}). Write one of {others} instead, and please report this with the output of megatron-rl doctor"
    )


def _compute(
    layout: Layout,
    name: str,
    inputs: list[torch.Tensor],
    weights: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
) -> list[torch.Tensor]:
    """Return output and gradients, in float64 on the host."""
    given = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
    q_THD, k_TGD, v_TGD, *sinks = given
    out_THD = find_backend(name).attention(q_THD, k_TGD, v_TGD, layout, q_THD.shape[-1] ** -0.5, window, *sinks)
    gradients = torch.autograd.grad(out_THD, given, weights.to(device, dtype))
    return [tensor.detach().to("cpu", torch.float64) for tensor in (out_THD, *gradients)]


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return (found - truth).abs().max().item()
