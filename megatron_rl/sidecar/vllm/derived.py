"""Parameters that layers make from the tensors that they get: the numbers that they must hold by definition.

vLLM quantizes weights in 16 bits while it loads them: each layer gets its tensors, and then replaces them by narrower
numbers and their scales. From the tensors the same is computed here, by the formula of the method, without vLLM's
functions for it. `held.py` compares both, bit for bit. A layer whose method is not in `_DEFINITIONS`, or whose kernel
keeps weights in another layout, cannot be proved to hold what it was given.

vLLM's multi-latent attention multiplies queries and outputs by parts of `kv_b_proj`, kept in an order of its own. No
tensor is loaded into these parts, so they are compared with the tensor that they must follow from.

Letters: N rows (outputs) and K columns (inputs) of a layer's weight. In multi-latent attention: N heads of this rank,
P plain columns of a head's key, V columns of its value, L columns of a narrow row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

# The packages whose methods are known, and a part of the names of those that keep numbers as they are.
_KNOWN, _PLAIN = ("vllm", "vllm_ascend"), "Unquantized"
_PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")
_BLOCK = 128
_CHUNK_ELEMENTS = 1 << 24
# The least largest number of a block, by which no scale is zero.
_LEAST_OF_BLOCK = 1e-4
# The least scale of a row is this share of the one that turns 1 into the largest number.
_LEAST_OF_ROW = 1 / 512

Held = Mapping[str, torch.Tensor]
"""The parameters of a layer, by their names in it."""


def find_quantizing(model: torch.nn.Module) -> set[str]:
    """Return the names of the layers whose method may quantize: all but vLLM's that keep numbers as they are."""
    methods = {name: getattr(layer, "quant_method", None) for name, layer in model.named_modules()}
    return {name for name, method in methods.items() if method is not None and not _is_plain(method)}


def _is_plain(method: Any) -> bool:
    """Check whether a method is one of vLLM's for weights that are not quantized."""
    # A method may only choose a kernel for another one.
    kind = type(getattr(method, "old_quant_method", method))
    return kind.__module__.partition(".")[0] in _KNOWN and any(_PLAIN in base.__name__ for base in kind.__mro__)


def describe_quantization(vllm_config: Any) -> str:
    """Name what an engine quantizes, and how; empty if it computes with the numbers that it is given."""
    method, cache = vllm_config.model_config.quantization, str(vllm_config.cache_config.cache_dtype)
    of_cache = "" if cache in _PLAIN_CACHES else f"keys and values in {cache}"
    return ", ".join(filter(None, [str(method or ""), of_cache]))


def define(layer: torch.nn.Module, method: Any) -> Held:
    """Compute what a layer must hold once its method has quantized its weights; nothing if that is not defined."""
    definition = _DEFINITIONS.get(type(method).__name__)
    weight_NK = layer._parameters.get("weight")
    if definition is None or weight_NK is None or weight_NK.dim() != 2:
        return {}
    return definition(layer, weight_NK.detach())


def quantize_rows(weight_NK: torch.Tensor, largest_N1: torch.Tensor, dtype: torch.dtype) -> Held:
    """Quantize to 8-bit floats with a scale for each row, from the largest numbers of the rows."""
    most = _find_most(dtype, weight_NK.device)
    scale_N1 = (largest_N1.float() / most).clamp_min(_LEAST_OF_ROW / most.item())
    values_NK = _round(weight_NK, dtype, lambda rows, some_RK: some_RK / scale_N1[rows])
    return {"weight": values_NK.t(), "weight_scale": scale_N1}


def quantize_whole(weight_NK: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> Held:
    """Quantize to 8-bit floats with one scale, from the largest number."""
    scale = (largest.float() / _find_most(dtype, weight_NK.device)).reshape(1)
    # Its kernel multiplies by the inverse.
    values_NK = _round(weight_NK, dtype, lambda rows, some_RK: some_RK * (1 / scale))
    return {"weight": values_NK.t(), "weight_scale": scale}


def quantize_blocks(weight_NK: torch.Tensor, dtype: torch.dtype) -> Held:
    """Quantize to 8-bit floats with a scale for each block of 128 rows and columns."""
    largest = torch.nn.functional.max_pool2d(weight_NK.abs()[None], _BLOCK, ceil_mode=True)[0]
    scales = largest.float().clamp(_LEAST_OF_BLOCK) / _find_most(dtype, weight_NK.device)
    blocks_N, num_columns = torch.arange(len(weight_NK), device=weight_NK.device) // _BLOCK, weight_NK.shape[1]

    def scale(rows: slice, some_RK: torch.Tensor) -> torch.Tensor:
        return some_RK * (1 / scales[blocks_N[rows]]).repeat_interleave(_BLOCK, dim=1)[:, :num_columns]

    return {"weight": _round(weight_NK, dtype, scale), "weight_scale_inv": scales}


def _find_most(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the largest number that is used, as a tensor: a quotient by a plain number may be a product."""
    most = 224.0 if dtype is torch.float8_e4m3fnuz else torch.finfo(dtype).max
    return torch.tensor(most, device=device)


def _round(
    weight_NK: torch.Tensor, dtype: torch.dtype, scale: Callable[[slice, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Round the scaled numbers, some rows at a time: little memory is free beside a model."""
    most = _find_most(dtype, weight_NK.device).item()
    values_NK = torch.empty_like(weight_NK, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // weight_NK.shape[1])
    for start in range(0, len(weight_NK), step):
        rows = slice(start, start + step)
        values_NK[rows] = scale(rows, weight_NK[rows].float()).clamp(-most, most).to(dtype)
    return values_NK


def _find_largest(weight_NK: torch.Tensor, **over: Any) -> torch.Tensor:
    least, most = weight_NK.aminmax(**over)
    return torch.maximum(-least, most)


def _define_rows(layer: Any, weight_NK: torch.Tensor) -> Held:
    # Columns are divided over workers: a row's largest number may be another worker's.
    largest_N1 = _find_of_all(_find_largest(weight_NK, dim=1, keepdim=True), _divides_columns(layer))
    return quantize_rows(weight_NK, largest_N1, _find_dtype())


def _define_whole(layer: Any, weight_NK: torch.Tensor) -> Held:
    is_divided = _divides_columns(layer) or layer.output_size != layer.output_size_per_partition
    return quantize_whole(weight_NK, _find_of_all(_find_largest(weight_NK).reshape(1), is_divided), _find_dtype())


def _divides_columns(layer: Any) -> bool:
    return bool(layer.input_size != layer.input_size_per_partition)


def _find_of_all(largest: torch.Tensor, is_divided: bool) -> torch.Tensor:
    """Return the largest numbers over the workers of an engine, if these divide a weight."""
    if is_divided:
        from vllm.distributed.parallel_state import get_tp_group

        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=get_tp_group().device_group)
    return largest


def _find_dtype() -> torch.dtype:
    from vllm.platforms import current_platform

    dtype: torch.dtype = current_platform.fp8_dtype()
    return dtype


_DEFINITIONS: dict[str, Callable[[Any, torch.Tensor], Held]] = {
    "Fp8PtpcOnlineLinearMethod": _define_rows,
    "Fp8PerTensorOnlineLinearMethod": _define_whole,
    "Fp8PerBlockOnlineLinearMethod": lambda _, weight_NK: quantize_blocks(weight_NK, _find_dtype()),
}
"""The definitions of vLLM's methods, by the names of their classes."""


SOURCE = ".kv_b_proj.weight"
_KEYS, _VALUES = "W_UK_T", "W_UV"


def list_derived(model: torch.nn.Module) -> set[str]:
    """List the names of such parameters."""
    return {f"{name}.{kind}" for name, _ in _list_layers(model) for kind in (_KEYS, _VALUES)}


class Sources:
    """Copies of the tensors that a model's derived parameters must follow from, kept during a load."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.derived = list_derived(model)
        self.kept: dict[str, torch.Tensor] = {}

    def keep(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, and keep a copy of the sources among them."""
        for name, tensor in weights:
            if self.derived and name.endswith(SOURCE):
                self.kept[name] = tensor.clone()
            yield name, tensor


def find_stale(model: torch.nn.Module, given: Mapping[str, torch.Tensor], rank: int) -> list[str]:
    """Find the derived parameters that do not follow from the given tensors, whole and under their names."""
    stale = []
    for name, layer in _list_layers(model):
        source = name.partition(".self_attn.")[0] + ".self_attn" + SOURCE
        if source not in given:
            stale.append(f"{name} without {source}")
            continue
        keys_NPL, values_NLV = getattr(layer, _KEYS), getattr(layer, _VALUES)
        num_heads, plain, narrow = keys_NPL.shape
        whole = given[source].view(-1, plain + values_NLV.shape[2], narrow)
        own = whole[rank * num_heads : (rank + 1) * num_heads].to(keys_NPL)
        wanted = {_KEYS: own[:, :plain], _VALUES: own[:, plain:].transpose(1, 2)}
        stale += [f"{name}.{kind}" for kind, part in wanted.items() if not torch.equal(getattr(layer, kind), part)]
    return stale


def _list_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules():
        if {_KEYS, _VALUES} <= layer._parameters.keys():
            yield name, layer
