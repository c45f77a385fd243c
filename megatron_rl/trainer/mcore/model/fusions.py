"""The element-wise work of layers in kernels of ours, in place of megatron's functions.

A layer adds what attention or the MLP has computed to the residual, and the next norm normalizes the sum. One kernel
does both. It runs where megatron adds, and the sum carries its norm to the norm's own call. Invariants:

- a norm takes only what was computed with its own weight from the very tensor that it is called with;
- it takes nothing that was computed without gradients where it must have them, as in a part that is recomputed.

Letters: R rows, E hidden size.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.ops.elementwise import triton_fused
from megatron_rl.trainer.mcore.model.linear import replace_linear_layers

_log = logging.getLogger(__name__)

_CARRIED = "_carried_norm"


class RMSNorm(torch.nn.Module):
    """torch's RMSNorm with the mark that makes Megatron sum its gradient over the ranks that share a sequence.

    Megatron's own wrapper around torch's norm refuses sequence parallelism, and its fused norm needs apex.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize the last dimension; with a residual, return the sum of both, which carries its norm to a next call.

        Both are calls of the module, because Megatron's hooks before a call complete its parameters.
        """
        if residual is not None:
            total, normed = triton_fused.add_and_normalize(hidden, residual, self.weight, self.eps)
            setattr(total, _CARRIED, (self, normed))
            return total
        norm, normed = getattr(hidden, _CARRIED, (None, hidden))
        if norm is self:
            delattr(hidden, _CARRIED)
            # A part that is recomputed first runs without gradients, and its result gets them afterwards.
            if normed.requires_grad == hidden.requires_grad or not torch.is_grad_enabled():
                return normed
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


@dataclasses.dataclass(frozen=True)
class AddAndNormalize:
    """The function by which a layer adds to the residual, together with the norm that comes next."""

    plain: Callable[[bool, bool], Callable[..., torch.Tensor]]
    """Megatron's function, for what the kernel does not do."""
    norm: RMSNorm

    def __call__(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return a function of an output with its bias, the residual, and the probability of dropout."""

        def add(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            # The weights of a frozen layer may be in the host's memory until the layer begins.
            is_here = self.norm.weight.device == output.device
            if bias is None and is_here and output.dtype == residual.dtype and not (training and prob):
                total: torch.Tensor = self.norm(output, residual)
                return total
            return self.plain(training, fused)(output_with_bias, residual, prob)

        return add


class SwigluMLP(MLP):
    """Megatron's MLP with SwiGLU in a kernel of ours."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and its bias, which the caller adds."""
        if per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)  # type: ignore[no-any-return]
        gate_up_R2F, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(triton_fused.swiglu(gate_up_R2F))  # type: ignore[no-any-return]


def fuse_layers(chunk: Any, backend: str) -> None:
    """Have the chunk's layers do their element-wise work in the backend's kernels, where these compute the same.

    Linear layers then use our operation.
    """
    if backend != "triton":
        return
    for layer in chunk.decoder.layers:
        replace_linear_layers(layer)
    layers = [layer for layer in chunk.decoder.layers if _is_of_megatron(layer)]
    for layer in layers:
        if type(layer.mlp) is MLP and _is_swiglu(layer.mlp.config):
            layer.mlp.__class__ = SwigluMLP
        if isinstance(layer.cross_attention, IdentityOp):
            _fuse_addition(layer, "self_attn_bda", layer.pre_mlp_layernorm)
    # A recomputed layer gives its successor a sum without a norm.
    if chunk.config.recompute_granularity == "full" or len(layers) < len(chunk.decoder.layers):
        return
    norms = [layer.input_layernorm for layer in layers[1:]]
    for layer, norm in zip(layers, [*norms, getattr(chunk.decoder, "final_layernorm", None)], strict=True):
        _fuse_addition(layer, "mlp_bda", norm)


def _is_of_megatron(layer: torch.nn.Module) -> bool:
    """Check that a layer adds and normalizes as megatron's does."""
    return isinstance(layer, TransformerLayer) and type(layer).__module__.startswith("megatron.core.")


def _is_swiglu(config: TransformerConfig) -> bool:
    """Check that an MLP computes silu(gate) * up, and nothing besides."""
    return (
        config.gated_linear_unit
        and config.activation_func is torch.nn.functional.silu
        and not config.add_bias_linear
        # Fields that not every version has.
        and getattr(config, "activation_func_clamp_value", None) is None
        and not getattr(config, "glu_linear_offset", 0)
        and not getattr(config, "activation_func_fp8_input_store", False)
        and not getattr(config, "use_te_activation_func", False)
        and not getattr(config, "cpu_offloading", False)
    )


def _fuse_addition(layer: Any, name: str, norm: Any) -> None:
    if norm is None:
        return
    if type(norm) is not RMSNorm:
        kind = type(norm)
        is_elsewhere = isinstance(norm, IdentityOp)
        _say_once("a linear layer normalizes" if is_elsewhere else f"the norm is {kind.__name__} of {kind.__module__}")
    elif isinstance(getattr(layer, name), torch.nn.Module):
        _say_once("a layer normalizes what it adds")
    elif not layer.config.fp32_residual_connection:
        setattr(layer, name, AddAndNormalize(getattr(layer, name), norm))


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("--elementwise-backend triton leaves additions to Megatron's own function: %s", reason)
