"""A worker extension of vLLM that compares what its model holds with a folder, bit for bit, and changes nothing.

vLLM loads the folder as it does when it is told to replace its weights: it divides, stacks, quantizes and packs them,
layer by layer. Only its last step is another: where it copies a layer's new tensors over those that are in use, the two
are compared here, and the new ones are let go. So whatever vLLM can load into a running engine can be compared, in the
memory of one more layer.

Invariants:

- after a comparison, with whatever end, the model holds the tensors that it held before, with the same bits;
- a tensor counts as equal only if its bits were compared; all others are listed with the reason, but for scales of the
  cache, which are single numbers.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import InputError
from megatron_rl.sidecar.vllm import patches
from megatron_rl.verify.folders import read_folder

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_ADAPTER = (1 << 31) - 1
"""A number that no adapter of a server's has."""
_PACKED = "cpu_linear"
"""The attribute of a layer whose weights vLLM has packed for a CPU: the function that multiplies by them."""
_ROWS_AT_ONCE, _NUMBERS_AT_ONCE = 512, 1 << 24
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_PATCHED: dict[Any, Callable[..., None]] = {}
"""The method of vLLM's that packs experts each time."""


class Verifier:
    """Mixed into vLLM's worker, by `--worker-extension-cls megatron_rl.verify.worker.Verifier`."""

    rank: int
    model_runner: Any
    vllm_config: Any

    def megatron_rl_verify(self, folder: str, adapter: str | None = None) -> dict[str, Any]:
        """Compare the model, and a slot of adapters, with the safetensors of folders on this host; answer plain data.

        If a folder cannot be loaded, the answer is the error.
        """
        try:
            answer = compare_weights(self, read_folder(Path(folder)))
            if adapter is not None:
                answer["adapter"] = compare_adapter(self, adapter)
        except InputError as error:
            answer = {"error": str(error)}
        except Exception as error:
            folders = " and ".join(filter(None, (folder, adapter)))
            answer = {"error": f"vLLM cannot load {folders} into this model: {error!r}"}
        return {"rank": self.rank, **answer}


def compare_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Compare a worker's model with the tensors of a checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    model = worker.model_runner.get_model()
    comparison = TensorComparison(model)
    contexts = (_packing(model), _replaced(comparison, model), _comparing(comparison))
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        reload_weights(worker.vllm_config, model, weights, None, is_checkpoint_format=True)
        comparison.compare_tied()
        comparison.compare_rotations()
    return comparison.describe()


def compare_adapter(worker: Any, folder: str) -> dict[str, Any]:
    """Compare the slots of adapters with a folder of PEFT's; return the comparison with the slot that is nearest.

    vLLM writes the folder's factors into each slot by turns, and what the slot held is put back.
    """
    from vllm.lora.request import LoRARequest

    loading = getattr(worker.model_runner, "lora_manager", None)
    if loading is None:
        raise InputError("the engine has no slots for adapters: start it with --enable-lora")
    manager = loading._adapter_manager
    adapter = loading._load_adapter(LoRARequest(folder, _NO_ADAPTER, folder))
    manager._create_merged_loras_inplace(adapter)
    answers = []
    for slot, number in enumerate(manager.lora_index_to_id):
        if number is not None:
            comparison = TensorComparison(manager.model)
            for name, layer in manager.modules.items():
                _compare_slot(comparison, layer, slot, manager._get_lora_layer_weights(adapter, name))
            answers.append({**comparison.describe_compared(), "number": number})
    if not answers:
        raise InputError("the engine holds no adapter: a slot is filled by the first request that names one")
    return min(answers, key=lambda answer: len(answer["different"]))


def _compare_slot(comparison: "TensorComparison", layer: Any, slot: int, wanted: Any) -> None:
    stacks = {name: some for name, some in vars(layer).items() if name.endswith("_stacked")}
    if hasattr(layer, "adapter_enabled"):
        for name in stacks:
            comparison.note_unknown(layer, name, "adapters of experts are not compared")
        return
    tensors = {
        f"{name}.{index}": stack[slot : slot + 1]
        for name, some in stacks.items()
        for index, stack in enumerate([some] if isinstance(some, torch.Tensor) else some)
    }
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        if wanted is None:
            layer.reset_lora(slot)
        else:
            layer.set_lora(slot, wanted.lora_a, wanted.lora_b)
        for name, tensor in tensors.items():
            comparison.compare(layer, name, held[name], tensor)
    finally:
        for name, tensor in tensors.items():
            tensor.copy_(held[name])


@contextlib.contextmanager
def _packing(model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM 0.32 pack experts on a CPU whenever it loads them, in this context."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() and patches.has_experts(model)):
        yield
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    held = Method.process_weights_after_loading
    patches.patch_experts()
    patched = _PATCHED.setdefault(Method, Method.process_weights_after_loading)
    try:
        Method.process_weights_after_loading = patched
        yield
    finally:
        Method.process_weights_after_loading = held


class TensorComparison:
    """The tensors of a model that were compared, and the differences."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._names = {layer: name for name, layer in model.named_modules()}
        self._compared: set[str] = set()
        self._differences: dict[str, dict[str, Any]] = {}
        self._unknown: dict[str, str] = {}

    def compare(self, layer: torch.nn.Module, name: str, held: torch.Tensor, wanted: torch.Tensor) -> None:
        whole = self.name(layer, name)
        self._compared.add(whole)
        if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            kinds = [f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in (held, wanted)]
            self._differences[whole] = {"held": kinds[0], "wanted": kinds[1]}
            return
        first, count, largest = -1, 0, 0.0
        flat = [one.detach().contiguous().flatten() for one in (held, wanted.to(held.device))]
        kind = _INTEGERS[held.element_size()]
        # In parts: little memory is free beside a model.
        for number, (ours, theirs) in enumerate(zip(*(one.split(_NUMBERS_AT_ONCE) for one in flat), strict=True)):
            places = (ours.view(kind) != theirs.view(kind)).nonzero().flatten()
            if len(places):
                first = number * _NUMBERS_AT_ONCE + int(places[0]) if first < 0 else first
                away = (ours[places].double() - theirs[places].double()).abs().max()
                count, largest = count + len(places), max(largest, float(away.nan_to_num(nan=math.inf)))
        if count:
            # As text, because JSON has no numbers that are not finite.
            self._differences[whole] = {
                "numbers": count,
                "of": held.numel(),
                "first": [int(place) for place in torch.unravel_index(torch.tensor(first), held.shape)],
                "held": f"{float(flat[0][first]):.9g}",
                "wanted": f"{float(flat[1][first]):.9g}",
                "largest": f"{largest:.3g}",
            }

    def name(self, layer: torch.nn.Module, name: str) -> str:
        return f"{self._names[layer]}.{name}".removeprefix(".")

    def note_unknown(self, layer: torch.nn.Module, name: str, reason: str) -> None:
        self._unknown[self.name(layer, name)] = reason

    def compare_tied(self) -> None:
        """Compare the packed copies of weights that another layer holds: vLLM loads only that layer."""
        for layer in self._names:
            multiply, weight = layer.__dict__.get(_PACKED), layer._parameters.get("weight")
            if _holds_weights(multiply) and weight is not None and weight.dim() == 2:
                self.compare(layer, "weight (packed)", _unpack(layer, multiply, weight), weight)

    def compare_rotations(self) -> None:
        """Compare the tables of rotations with those that vLLM computes again."""
        for layer in self._names:
            held, compute = layer._buffers.get("cos_sin_cache"), getattr(layer, "_compute_cos_sin_cache", None)
            if held is not None and compute is not None:
                with held.device:
                    self.compare(layer, "cos_sin_cache", held, compute().to(held.dtype))

    def describe(self) -> dict[str, Any]:
        tensors = dict(self._model.named_parameters(remove_duplicate=False))
        others = {name for name, tensor in tensors.items() if tensor.numel()} - self._compared - self._unknown.keys()
        same = {tensors[name].data_ptr() for name in self._compared & tensors.keys()}
        self._unknown |= {
            name: "no weights are given for it" for name in others if tensors[name].data_ptr() not in same
        }
        # Tables that vLLM makes of the configuration; single numbers are scales of the cache.
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point() and buffer.numel() > 1 and name not in self._compared:
                self._unknown.setdefault(name, "vLLM made it of the configuration")
        return self.describe_compared()

    def describe_compared(self) -> dict[str, Any]:
        """Describe what was compared, whether or not it was all."""
        return {
            "compared": len(self._compared),
            "different": dict(sorted(self._differences.items())),
            "unknown": dict(sorted(self._unknown.items())),
        }


def _holds_weights(multiply: Callable[..., torch.Tensor] | None) -> bool:
    """Check whether a layer's function holds the weights that it multiplies by, in place of the layer's parameter."""
    return getattr(multiply, "__closure__", None) is not None


def _unpack(layer: Any, multiply: Callable[..., torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Return the weights of a packed layer: its products with unit vectors, which no rounding changes."""
    eye = torch.eye(weight.shape[1], dtype=weight.dtype)
    return torch.cat([multiply(rows, layer.weight, None) for rows in eye.split(_ROWS_AT_ONCE)]).t()


@contextlib.contextmanager
def _replaced(comparison: TensorComparison, model: torch.nn.Module) -> Iterator[None]:
    """Have vLLM load into copies, in this context, what it loads where it is; then compare what was loaded."""
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    loaded: set[tuple[torch.nn.Module, str]] = set()

    def note(place: tuple[torch.nn.Module, str], load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def call(*args: Any, **kwargs: Any) -> Any:
            loaded.add(place)
            return load(*args, **kwargs)

        return call

    kept = []
    for layer in model.modules():
        places: list[dict[str, Any]] = [layer._parameters, layer._buffers]
        for tensors in places:
            for name in tensors.keys() & SKIP_TENSORS:
                if (held := tensors[name]) is not None:
                    copy: Any = held.detach().clone()
                    copy.__class__, copy.__dict__ = held.__class__, {**vars(held)}
                    if held.is_floating_point():
                        copy.data.fill_(math.nan)
                    copy.weight_loader = note((layer, name), getattr(held, "weight_loader", default_weight_loader))
                    kept.append((layer, name, tensors, held))
                    tensors[name] = copy
    try:
        yield
        for layer, name, _, held in kept:
            if (layer, name) in loaded:
                new = getattr(layer, name)
                comparison.compare(layer, name, held, new)
                if missing := int((new.isnan() & ~held.isnan()).sum()):
                    comparison.note_unknown(layer, name, f"{missing} of its {held.numel()} numbers are not given")
    finally:
        for _, name, tensors, held in kept:
            tensors[name] = held


@contextlib.contextmanager
def _comparing(comparison: TensorComparison) -> Iterator[None]:
    """Have vLLM compare in place of its copies, in this context; then put back all that it moved."""
    from vllm.model_executor.model_loader.reload.layerwise import _copy_and_restore_kernel_tensors as copy
    from vllm.model_executor.model_loader.reload.layerwise import _finalize_attention_layer as attend
    from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process as process
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors as place
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import materialize_layer as materialize

    layerwise = sys.modules[get_layerwise_info.__module__]

    def materialize_unlike(layer: torch.nn.Module, info: Any) -> None:
        """Fill what vLLM leaves as memory is: it may be an earlier comparison's, with the same numbers."""
        places: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        names = [(some, name) for some in places for name, one in some.items() if one is not None and one.is_meta]
        materialize(layer, info)
        for some, name in names:
            # Each number of any dtype is then none, or the largest or the least.
            some[name].data.flatten().view(torch.uint8).fill_(255)

    def compare_tensors(layer: torch.nn.Module, info: Any) -> None:
        parameters, buffers = info.kernel_tensors
        loaded = {name for name, _ in info.loaded_weights}
        fixed = info.kernel_non_persistent_buffers - loaded
        for name, held in {**parameters, **{name: one for name, one in buffers.items() if name not in fixed}}.items():
            new = getattr(layer, name, held)
            if held.numel() and new is not held:
                comparison.compare(layer, name, held, new)
        place(layer, info)

    def compare_layer(layer: Any, info: Any) -> None:
        meta = layer._parameters.get("weight")
        with _kept(comparison, layer, meta):
            process(layer, info)

    def compare_attention(layer: Any, info: Any, config: Any) -> None:
        # It derives tensors from another layer's, and writes them where they are.
        parameters, _ = info.kernel_tensors or ({}, {})
        kept = {name: one.detach().clone() for name, one in parameters.items()}
        with _kept(comparison, layer, None):
            attend(layer, info, config)
        for name, held in kept.items():
            derived = getattr(layer, name)
            comparison.compare(layer, name, held, derived)
            derived.data = held if derived.shape != held.shape else derived.data.copy_(held)

    names = (
        "_layerwise_process", "_finalize_attention_layer", "_copy_and_restore_kernel_tensors", "materialize_layer",
    )  # fmt: skip
    ours = (compare_layer, compare_attention, compare_tensors, materialize_unlike)
    for name, function in zip(names, ours, strict=True):
        setattr(layerwise, name, function)
    try:
        yield
    finally:
        for name, function in zip(names, (process, attend, copy, materialize), strict=True):
            setattr(layerwise, name, function)
        for layer in comparison._names:
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                place(layer, info)
                info.reset()


@contextlib.contextmanager
def _kept(comparison: TensorComparison, layer: Any, weight: torch.Tensor | None) -> Iterator[None]:
    """Put back the attributes of a layer, and of what quantizes it, that change in this context; compare the tensors.

    `weight` has the shape of the layer's weight before it is packed.
    """
    owners = [layer, *filter(None, [getattr(layer, "quant_method", None)])]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
        for owner, kept in zip(owners, before, strict=True):
            for name, new in vars(owner).items():
                held = kept.get(name)
                if new is held or name in ("_parameters", "_buffers"):
                    continue
                if name == _PACKED and not _holds_weights(new) and not _holds_weights(held):
                    continue
                if name == _PACKED and weight is not None and held is not None:
                    comparison.compare(layer, "weight", _unpack(layer, held, weight), _unpack(layer, new, weight))
                elif isinstance(new, torch.Tensor) and isinstance(held, torch.Tensor):
                    comparison.compare(layer, name, held, new)
                elif not isinstance(new, _PLAIN):
                    # It may hold weights in a form that is not known here.
                    comparison.note_unknown(layer, name, f"a {type(new).__name__} that vLLM made as it loaded")
    finally:
        for owner, kept in zip(owners, before, strict=True):
            vars(owner).clear()
            vars(owner).update(kept)
