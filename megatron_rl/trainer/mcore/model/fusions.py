"""The element-wise work of layers in kernels of ours, and their linear layers, in place of megatron's functions.

A layer adds what attention or the MLP has computed to the residual, and the next norm normalizes the sum. One kernel
does both. It runs where megatron adds, and the sum carries its norm to the norm's own call. Invariants:

- a norm takes only what was computed with its own weight from the very tensor that it is called with;
- it takes nothing that was computed without gradients where it must have them, as in a part that is recomputed.

Linear layers have our operation (`ops.linear`) where it computes the same as Megatron's. These are left to Megatron:
frozen weights, weights that FSDP or another sharding divides, and weights whose gradient is computed later.

Letters: R rows, E hidden size.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.ops.elementwise import BACKENDS, ElementwiseBackend
from megatron_rl.ops.linear import linear

_log = logging.getLogger(__name__)

_CARRIED = "_carried_norm"


@functools.cache
def _find_kernels() -> ElementwiseBackend:
    return BACKENDS.find("triton")


class RMSNorm(torch.nn.Module):
    """torch's RMSNorm with the mark that makes Megatron sum its gradient over the ranks that share a sequence.

    Megatron's own wrapper around torch's norm refuses sequence parallelism, and its fused norm needs apex.
    """

    is_zero_centered = False

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        assert config.normalization == "RMSNorm" and config.layernorm_zero_centered_gamma is self.is_zero_centered
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize the last dimension; with a residual, return the sum of both, which carries its norm to a next call.

        Both are calls of the module, because Megatron's hooks before a call complete its parameters.
        """
        if residual is not None:
            total, normed = _find_kernels().add_and_normalize(hidden, residual, self.weight, self.eps)
            setattr(total, _CARRIED, (self, normed))
            return total
        norm, normed = getattr(hidden, _CARRIED, (None, hidden))
        if norm is self:
            delattr(hidden, _CARRIED)
            # A part that is recomputed first runs without gradients, and its result gets them afterwards.
            if normed.requires_grad == hidden.requires_grad or not torch.is_grad_enabled():
                return normed
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """The norm that multiplies by 1 plus its weight, in fp32 at least: in half precision the sum would lose the weight.

    Kernels of ours do not have it.
    """

    is_zero_centered = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: object):
        super().__init__(config, hidden_size, eps, **others)
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize the last dimension."""
        assert residual is None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = 1 + self.weight.to(wide)
        return torch.nn.functional.rms_norm(hidden.to(wide), (hidden.shape[-1],), weight, self.eps).to(hidden.dtype)


def find_norm(config: TransformerConfig) -> type[RMSNorm]:
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


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
                return self.norm(output, residual)
            return self.plain(training, fused)(output_with_bias, residual, prob)

        return add


class SwigluMLP(MLP):
    """Megatron's MLP with SwiGLU in a kernel of ours."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and its bias, which the caller adds."""
        gate_up_R2F, _ = self.linear_fc1(hidden_states)
        if per_token_scale is None:
            out_RF = _find_kernels().swiglu(gate_up_R2F)
        else:
            out_RF = _find_kernels().weighted_swiglu(gate_up_R2F, per_token_scale)
        return self.linear_fc2(out_RF)  # type: ignore[no-any-return]


class SwigluExperts(SequentialMLP):
    """Megatron's experts with one SwiGLU of all rows, between products of one expert after the other."""

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, whose rows have the order of the inputs, expert by expert, and None in place of a bias."""
        config = self.config
        if config.fp8 or getattr(config, "fp4", None) or config.moe_apply_probs_on_input:
            # Rows are padded, or weighed before. Each expert has the kernel then.
            return super().forward(  # type: ignore[no-any-return]
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
        counts = tokens_per_expert.tolist()
        rows = zip(self.local_experts, permuted_local_hidden_states.split(counts), strict=True)
        gate_up_R2F = torch.cat([expert.linear_fc1(of_expert)[0] for expert, of_expert in rows])
        out_RF = _find_kernels().weighted_swiglu(gate_up_R2F, permuted_probs)
        parts = zip(self.local_experts, out_RF.split(counts), strict=True)
        return torch.cat([expert.linear_fc2(of_expert)[0] for expert, of_expert in parts]), None


class SwigluSharedExperts(SharedExpertMLP, SwigluMLP):
    """Megatron's shared experts on the same kernel, unless they overlap the exchange of tokens."""


_OURS = {MLP: SwigluMLP, SequentialMLP: SwigluExperts, SharedExpertMLP: SwigluSharedExperts}


def fuse_layers(chunk: Any, backend: str) -> None:
    """Have the chunk's layers do their element-wise work in the backend's kernels, where these compute the same.

    Linear layers then use our operation.
    """
    if backend != "triton":
        return
    for layer in chunk.decoder.layers:
        replace_linear_layers(layer)
    # Other layers may add and normalize in another way.
    layers = [
        layer
        for layer in chunk.decoder.layers
        if isinstance(layer, TransformerLayer) and type(layer).__module__.startswith("megatron.core.")
    ]
    for layer in layers:
        for module in layer.mlp.modules():
            ours: Any = _OURS.get(type(module))
            if ours is not None and _is_swiglu(module.config):
                module.__class__ = ours
        if isinstance(layer.cross_attention, IdentityOp):
            _fuse_addition(layer, "self_attn_bda", layer.pre_mlp_layernorm)
    # A recomputed layer gives its successor a sum without a norm.
    if chunk.config.recompute_granularity == "full" or len(layers) < len(chunk.decoder.layers):
        return
    norms = [layer.input_layernorm for layer in layers[1:]]
    for layer, norm in zip(layers, [*norms, getattr(chunk.decoder, "final_layernorm", None)], strict=True):
        _fuse_addition(layer, "mlp_bda", norm)


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


# The other arguments of Megatron's functions, with the values for which they change nothing.
_WITHOUT_EFFECT = {"grad_output_buffer": None, "wgrad_deferral_limit": None, "gtp_remat_size": 1}


class _OurOperation:
    """The method of Megatron's layers that multiplies by the weight."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = _multiply(input, weight, *args, **kwargs)
        if found is None:
            found = super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        return found


class ColumnLinear(_OurOperation, ColumnParallelLinear):
    """Megatron's layer whose ranks have rows of the weight."""


class RowLinear(_OurOperation, RowParallelLinear):
    """Megatron's layer whose ranks have columns of the weight."""


_OUR_LINEAR = {ColumnParallelLinear: ColumnLinear, RowParallelLinear: RowLinear}


def replace_linear_layers(module: torch.nn.Module) -> None:
    """Have all of the module's linear layers that are exactly Megatron's use our operation."""
    for layer in module.modules():
        ours: Any = _OUR_LINEAR.get(type(layer))
        if ours is not None:
            layer.__class__ = ours


def _multiply(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """Return the product, from the arguments that Megatron's layers give; None if it is left to Megatron."""
    # Arguments have no effect only with the values that are known to change nothing.
    has_effect = any(name not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[name] for name, value in others.items())
    if has_effect or not weight.requires_grad or hasattr(weight, "__fsdp_param__"):
        return None
    return linear(input, weight, bias, gradient_accumulation_fusion, tp_group, sequence_parallel, allreduce_dgrad)
