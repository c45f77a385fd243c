"""A stand-in for TransformerEngine: what megatron-core takes from it, with the released signatures, in plain torch.

TransformerEngine runs on CUDA only. `install` puts this module's names where megatron-core imports them. Then its own
classes (`megatron.core.extensions.transformer_engine`) are built and run on a CPU: layers, tensor and sequence
parallelism, gradients in `main_grad`, states of checkpoints. What has no part in that raises NotImplementedError.

`tests/unit/test_transformer_engine.py` compares the signatures with the released sources, if it finds them.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

VERSION = "2.11.0"
_FP8_OFF = {"fp8_checkpoint": False}


def install() -> None:
    """Make `import transformer_engine` find this stand-in, in this process."""
    here = {
        "": {"__version__": VERSION},
        "common": {},
        "common.recipe": {"DelayedScaling": DelayedScaling},
        "pytorch": {
            "DotProductAttention": DotProductAttention, "GroupedLinear": GroupedLinear, "LayerNorm": LayerNorm,
            "LayerNormLinear": LayerNormLinear, "Linear": Linear, "RMSNorm": RMSNorm, "fp8_model_init": fp8_model_init,
        },
        "pytorch.attention": {},
        "pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        "pytorch.distributed": {
            "CudaRNGStatesTracker": CudaRNGStatesTracker,
            "activation_recompute_forward": contextlib.nullcontext,
        },
        "pytorch.fp8": {
            "FP8GlobalStateManager": FP8GlobalStateManager, "fp8_autocast": fp8_autocast,
            "fp8_model_init": fp8_model_init,
        },
        "pytorch.module": {},
        "pytorch.module.base": {"TransformerEngineBaseModule": _Module, "get_dummy_wgrad": get_dummy_wgrad},
        "pytorch.ops": {"FusibleOperation": _Operation, "Sequential": torch.nn.Sequential, "SwiGLU": SwiGLU},
        "pytorch.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD},
        "pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"), _refuse
        ),
        "pytorch.tensor": {"QuantizedTensor": QuantizedTensor},
    }  # fmt: skip
    for path, names in here.items():
        name = ".".join(part for part in ("transformer_engine", path) if part)
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        # Importers take a module with a path for a package.
        module.__path__ = []
        vars(module).update(names)
        for kind in names.values():
            if isinstance(kind, type) and kind.__module__ == __name__:
                kind.__module__ = name
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for TransformerEngine does not compute this")


def _check_off(**options: Any) -> None:
    if asked := [name for name, value in options.items() if value]:
        raise NotImplementedError(f"the stand-in for TransformerEngine has no {', '.join(asked)}")


class DelayedScaling:
    pass


class QuantizedTensor:
    pass


class CudaRNGStatesTracker:
    pass


class FP8GlobalStateManager:
    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> Iterator[None]:
    _check_off(enabled=enabled, calibrating=calibrating)
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    _check_off(enabled=enabled)
    yield


def get_dummy_wgrad(shape: list, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return what stands for a gradient that is in main_grad already: memory that has not been written."""
    return torch.full(shape, 0.0 if zero else torch.nan, dtype=dtype)


class _Stateful(torch.nn.Module):
    """A module with the state that goes into checkpoints: an empty tensor unless fp8 has scales."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state is None:
            return
        if not isinstance(state, torch.Tensor):
            raise RuntimeError("Unsupported checkpoint format.")
        if state.numel():
            _refuse()


class _Module(_Stateful):
    """A module with weights, which a group of tensor-parallel ranks may divide."""

    fp8 = False
    fp8_calibration = False

    def _divide(
        self, tp_group: dist.ProcessGroup | None, tp_size: int, parallel_mode: str | None, sequence_parallel: bool
    ) -> None:
        assert parallel_mode in ("row", "column", None)
        self.fp8_meta = dict(_FP8_OFF)
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else tp_group.size()
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        sizes = {"column": self.out_features, "row": self.in_features}
        if parallel_mode is not None:
            assert sizes[parallel_mode] % self.tp_size == 0
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size

    def _add_weight(self, index: str, init_method: Callable | None, dtype: torch.dtype | None, device: Any) -> None:
        """Add a weight, and a bias if the module has them, with the marks of Megatron's tensor parallelism."""
        dtype = torch.get_default_dtype() if dtype is None else dtype
        weight = torch.nn.Parameter(
            torch.full((self.out_features, self.in_features), torch.nan, dtype=dtype, device=device)
        )
        if init_method is not None:
            init_method(weight)
        _mark(weight, 1 if self.parallel_mode == "row" else 0)
        self.register_parameter(f"weight{index}", weight)
        if not self.use_bias:
            setattr(self, f"bias{index}", torch.empty(0, dtype=dtype, device=device))
            return
        bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device))
        if self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif self.parallel_mode == "column":
            _mark(bias, 0)
        self.register_parameter(f"bias{index}", bias)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: fp8 is off."""

    def _check_input(self, inp: torch.Tensor) -> None:
        for name, parameter in self.named_parameters():
            assert inp.dtype == parameter.dtype, (
                "Data types for parameters must match when outside of autocasted region. "
                f" Found input dtype: {inp.dtype} and {name!r} dtype: {parameter.dtype}"
            )


def _mark(parameter: torch.Tensor, dim: int) -> None:
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        assert not hasattr(parameter, name)
        setattr(parameter, name, value)


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _check_off(
            parameters_split=parameters_split,
            userbuffers=ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad or ub_bulk_dgrad or ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.save_original_input = save_original_input
        self._divide(tp_group, tp_size, parallel_mode, sequence_parallel)
        self._add_weight("", init_method, params_dtype, device)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self._check_input(inp)
        out: torch.Tensor = _Product.apply(inp, self.weight, self, is_first_microbatch)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _check_off(
            layer_norm=normalization != "RMSNorm",
            return_layernorm_output=return_layernorm_output or return_layernorm_output_gathered,
            parameters_split=parameters_split,
            zero_centered_gamma=zero_centered_gamma,
            userbuffers=ub_overlap_ag or ub_overlap_rs or ub_overlap_rs_dgrad or ub_bulk_dgrad or ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self._divide(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(self.in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None
        self._add_weight("", init_method, params_dtype, device)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self._check_input(inp)
        normed = F.rms_norm(inp, (self.in_features,), self.layer_norm_weight, self.eps)
        out: torch.Tensor = _Product.apply(normed, self.weight, self, is_first_microbatch)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _check_off(
            bias=bias, userbuffers=ub_overlap_rs or ub_overlap_ag, delay_wgrad_compute=delay_wgrad_compute
        )  # fmt: skip
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self._divide(tp_group, tp_size, parallel_mode, sequence_parallel)
        for index in range(num_gemms):
            self._add_weight(str(index), init_method, params_dtype, device)

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        self._check_input(inp)
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        # Other modules communicate for experts.
        alone = _Alone(self.fuse_wgrad_accumulation)
        return torch.cat(
            [
                _Product.apply(part, getattr(self, f"weight{index}"), alone, is_first_microbatch)
                for index, part in enumerate(inp.reshape(-1, self.in_features).split(m_splits))
            ]
        )


class _Alone:
    """The place of a module whose products need no other ranks."""

    parallel_mode, tp_size, tp_group, sequence_parallel = None, 1, None, False

    def __init__(self, fuse_wgrad_accumulation: bool) -> None:
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation


class _Product(torch.autograd.Function):
    """The product with a weight, with the communication of the module's parallel mode."""

    @staticmethod
    def forward(ctx: Any, inp: torch.Tensor, weight: torch.Tensor, module: Any, is_first: bool | None) -> torch.Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.module, ctx.is_first = module, is_first
        rows = inp.reshape(-1, inp.shape[-1])
        if module.parallel_mode == "column" and module.sequence_parallel:
            rows = _gather(rows, module.tp_group)
        out = rows @ weight.t()
        if module.parallel_mode == "row" and module.tp_size > 1:
            out = _reduce(out, module)
        return out.view(-1, *inp.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        inp, weight = ctx.saved_tensors
        module = ctx.module
        grad, rows = grad_output.reshape(-1, grad_output.shape[-1]), inp.reshape(-1, inp.shape[-1])
        if module.sequence_parallel and module.parallel_mode == "row":
            grad = _gather(grad, module.tp_group)
        if module.sequence_parallel and module.parallel_mode == "column":
            rows = _gather(rows, module.tp_group)
        grad_input = grad @ weight
        if module.parallel_mode == "column" and module.tp_size > 1:
            grad_input = _reduce(grad_input, module)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _hand_over(weight, grad.t() @ rows, module.fuse_wgrad_accumulation, ctx.is_first)
        return grad_input.view(inp.shape), grad_weight, None, None


def _gather(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = rows.new_empty(group.size() * len(rows), rows.shape[1])
    dist.all_gather_into_tensor(whole, rows.contiguous(), group=group)
    return whole


def _reduce(parts: torch.Tensor, module: Any) -> torch.Tensor:
    """Return the sum over ranks: with sequence parallelism this rank's rows of it."""
    if not module.sequence_parallel:
        dist.all_reduce(parts, group=module.tp_group)
        return parts
    own = parts.new_empty(len(parts) // module.tp_size, parts.shape[1])
    dist.reduce_scatter_tensor(own, parts.contiguous(), group=module.tp_group)
    return own


def _hand_over(
    weight: torch.Tensor, grad: torch.Tensor, fuses_accumulation: bool, is_first: bool | None
) -> torch.Tensor | None:
    """Return a weight's gradient, or put it into main_grad: over earlier values if this is the first micro-batch."""
    if not fuses_accumulation:
        return grad
    main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
    if is_first:
        main_grad.copy_(grad)
    else:
        main_grad.add_(grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return get_dummy_wgrad(list(weight.shape), weight.dtype, zero=getattr(weight, "zero_out_wgrad", False))


class _Operation(_Stateful):
    """An operation that TransformerEngine could fuse with its neighbours."""


class SwiGLU(_Operation):
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        _check_off(cache_quantized_input=cache_quantized_input)

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        gate, up = input.chunk(2, dim=-1)
        return F.silu(gate) * up


class _RMSNormOperation(_Operation):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int = 0,
    ) -> None:
        super().__init__()
        _check_off(zero_centered_gamma=zero_centered_gamma)
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, device=device, dtype=dtype))


class RMSNorm(_RMSNormOperation):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        assert (normalized_shape is None) != (hidden_size is None)
        if params_dtype is not None:
            kwargs["dtype"] = params_dtype
        super().__init__(
            hidden_size if normalized_shape is None else normalized_shape,  # type: ignore[arg-type]
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            **kwargs,
        )
        self.sequence_parallel = sequence_parallel
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return F.rms_norm(input, self.weight.shape, self.weight, self.eps)


class LayerNorm(_Operation):
    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse()


class DotProductAttention(torch.nn.Module):
    """Attention that does not know shared prompts: no layer of this package may build it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse()


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate `t` [S, B, H, D] by the angles `freqs` [at least S, 1, 1, at most D], in float32 as the kernel does."""
    _check_off(thd=tensor_format != "sbhd", start_positions=start_positions is not None, interleaved=interleaved)
    assert fused
    assert freqs.dtype == torch.float32
    assert freqs.shape[1:3] == (1, 1)
    assert len(freqs) >= len(t)
    angles = freqs[: len(t)]
    rotated, rest = t.float().split([angles.shape[-1], t.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((rotated, rest), dim=-1).to(t.dtype)


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        _check_off(
            amsgrad=amsgrad, l2_mode=not adam_w_mode, capturable=capturable, master_weights=master_weights,
            use_decoupled_grad=use_decoupled_grad, store_param_remainders=store_param_remainders,
        )  # fmt: skip
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:  # type: ignore[override]
        """Step as AdamW. The count of steps belongs to the group, and a parameter without a gradient is left out."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), number = group["betas"], group["step"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                corrections = (1 - beta1**number, 1 - beta2**number) if group["bias_correction"] else (1.0, 1.0)
                scale = (state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / corrections[0])
