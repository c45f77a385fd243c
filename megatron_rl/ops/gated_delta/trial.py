"""The trial of a backend on a small pack before training: output and gradients against the recurrence in float64."""

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.gated_delta import gated_delta_rule
from megatron_rl.ops.shared_prompt.layout import Layout

# A kernel sums in another order. So its distance from the truth may be this factor times the distance of the definition
# in the same precision, plus these units in the last place of the largest value.
_FACTOR, _UNITS = 3, 2
# Prompts and responses that end within chunks of 64 rows, and on their edges.
_LAYOUT = Layout.of_groups(((70, (9, 64, 1)), (3, (5, 0)), (64, (65,))))
_WHAT = (
    "its output", "the gradient of queries", "the gradient of keys", "the gradient of values",
    "the gradient of decays", "the gradient of betas",
)  # fmt: skip


def check_backend(
    name: str, device: torch.device, dtype: torch.dtype, copies: int, key_dim: int, value_dim: int
) -> None:
    """Raise a PlatformError if the backend does not compute the rule with heads of this size on this device.

    `copies` is the number of value heads of a key head.
    """
    inputs, grad = _draw(dtype, copies, key_dim, value_dim)
    host = torch.device("cpu")
    truth = _compute("naive", inputs, grad, host, torch.float64)
    plain = _compute("naive", inputs, grad, host, dtype)
    try:
        found = _compute(name, inputs, grad, device, dtype)
    except RuntimeError as error:
        reason = f"it fails with {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise _refuse(name, device, dtype, key_dim, reason) from error
    for what, of_truth, of_plain, of_backend in zip(_WHAT, truth, plain, found, strict=True):
        largest = of_truth.abs().max().item()
        bound = _FACTOR * _distance(of_plain, of_truth) + _UNITS * torch.finfo(dtype).eps * largest
        distance = _distance(of_backend, of_truth)
        # Written so that NaN raises too.
        if not distance <= bound:
            reason = f"{what} is off by {distance:g}, and rounding explains {bound:g}"
            raise _refuse(name, device, dtype, key_dim, reason)


def _refuse(name: str, device: torch.device, dtype: torch.dtype, key_dim: int, reason: str) -> PlatformError:
    instead = "" if name == "torch" else "Write torch instead, and please"
    return PlatformError(
        f"--linear-attention-backend {name} does not compute linear layers on {device.type}: {reason} (heads of "
        f"{key_dim}, {dtype}). {instead or 'Please'} report this with the output of megatron-rl doctor"
    )


def _draw(dtype: torch.dtype, copies: int, key_dim: int, value_dim: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw the inputs of one key head, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, key_dim), (1, key_dim), (copies, value_dim), (copies, value_dim), (copies,), (copies,))
    q, k, v, grad, decays, betas = (torch.randn(_LAYOUT.num_tokens, *shape, generator=generator) for shape in shapes)
    log_decays = -torch.nn.functional.softplus(2 * decays - 2)
    return [q.to(dtype), k.to(dtype), v.to(dtype), log_decays, betas.sigmoid()], grad.to(dtype)


def _compute(
    name: str, inputs: list[torch.Tensor], grad: torch.Tensor, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return output and gradients, in float64 on the host."""
    # The definition in half precision has no number in fp32.
    wide = dtype if name == "naive" else torch.promote_types(dtype, torch.float32)
    dtypes = [dtype] * 3 + [wide] * 2
    given = [one.to(device, kind).requires_grad_() for one, kind in zip(inputs, dtypes, strict=True)]
    q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH = given
    out_THV = gated_delta_rule(q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH, _LAYOUT, name)
    gradients = torch.autograd.grad(out_THV, given, grad.to(device, out_THV.dtype))
    return [tensor.detach().to("cpu", torch.float64) for tensor in (out_THV, *gradients)]


def _distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    return (found - truth).abs().max().item()
