"""The trial of a backend on small numbers before training: log-probs, entropies and gradients beside float64's."""

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.log_probs import BACKENDS, VocabularyShard, output_log_probs

# A kernel sums in another order. So its distance from the truth may be this factor times the distance of torch's
# operations in the same precision, plus these units in the last place. Distances are parts of the largest log-prob or
# entropy, or of a gradient's largest number in the same row: a column of small probability counts like any other.
_FACTOR, _UNITS = 3, 2
# Rows that are divided over programs, columns that end within a step of a program, blocks of two sizes, and padding.
_NUM_ROWS, _HIDDEN_SIZE, _VOCAB_SIZE, _NUM_COLUMNS, _BLOCK_COLUMNS = 33, 64, 9_000, 9_024, 5_120
_TEMPERATURE = 0.7
_WHAT = ("log-probs", "entropies", "the gradient of hidden states", "the gradient of the weight")


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a PlatformError if the backend does not compute the output layer on this device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((_NUM_ROWS, _HIDDEN_SIZE), (_NUM_COLUMNS, _HIDDEN_SIZE), (_NUM_ROWS, 2))
    hidden_NE, weight_VE, grad_N2 = (torch.randn(shape, generator=generator) for shape in shapes)
    targets_N = torch.randint(_VOCAB_SIZE, (_NUM_ROWS,), generator=generator)
    given = (hidden_NE.to(dtype), weight_VE.div(_HIDDEN_SIZE**0.5).to(dtype), targets_N, grad_N2)
    host = torch.device("cpu")
    truth = _compute("torch", *given, host, torch.float64)
    plain = _compute("torch", *given, host, dtype)
    # The second time, kernels are launched as in every later step (`ops.kept_launches`).
    _, found = (_compute(name, *given, device, dtype) for _ in range(2))
    for what, of_truth, of_plain, of_backend in zip(_WHAT, truth, plain, found, strict=True):
        bound = _FACTOR * _measure(of_plain, of_truth) + _UNITS * torch.finfo(dtype).eps
        distance = _measure(of_backend, of_truth)
        # Written so that NaN raises too.
        if not distance <= bound:
            others = ", ".join(other for other in BACKENDS if other != name)
            raise PlatformError(
                f"--output-layer-backend {name} does not compute log-probs on {device.type}: {what} is off by "
                f"{distance:g} of the largest, and rounding explains {bound:g} ({dtype}). Write {others} instead, and "
                "please report this with the output of megatron-rl doctor"
            )


def _compute(
    name: str,
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_N: torch.Tensor,
    grad_N2: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return log-probs, entropies and gradients, in float64 on the host."""
    hidden_NE, weight_VE = (tensor.to(device, dtype).requires_grad_() for tensor in (hidden_NE, weight_VE))
    shard = VocabularyShard(0, _VOCAB_SIZE)
    out_N2 = output_log_probs(
        hidden_NE,
        weight_VE,
        targets_N.to(device),
        shard,
        _TEMPERATURE,
        _BLOCK_COLUMNS,
        with_entropies=True,
        backend=name,
    )
    gradients = torch.autograd.grad(out_N2, (hidden_NE, weight_VE), grad_N2.to(device, out_N2.dtype))
    return [tensor.detach().to("cpu", torch.float64) for tensor in (*out_N2.unbind(1), *gradients)]


def _measure(found: torch.Tensor, truth: torch.Tensor) -> float:
    # Rows of zeros, which are padding's, must be found as zeros.
    largest = truth.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(truth.dtype).tiny)
    return ((found - truth) / largest).abs().max().item()
