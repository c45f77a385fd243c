"""vLLM's GPT-OSS, taught to load the tensors of each expert, and its sinks, in a model that computes already.

Its files store the experts of a layer in one tensor (`shared/weights/stored_forms.py`). A trainer publishes the tensors
of each expert. vLLM 0.32 can load one expert at a time, under names of its own: gates and ups in one tensor, and the
down projection, both transposed. These are made here, so that no more than an expert is copied.

When vLLM loads sinks at its start, it copies them into the parameter. In a later update the parameter is a placeholder
without memory, so that the copy has no effect and the old sinks stay, without an error. Here its loader is called, as
for any other parameter.

Letters: R rows of an expert's projection, C its columns.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron_rl.shared.weights.stored_forms import parse_part
from megatron_rl.sidecar.vllm.patches import NOT_APPLIED

_MARK = "megatron_rl_stacked_patch"
_WAITING = "megatron_rl_waiting"
_SINKS = ".self_attn.sinks"

Weights = Iterable[tuple[str, torch.Tensor]]
LoadWeights = Callable[[Any, Weights], set[str]]
Waiting = dict[str, dict[str, torch.Tensor]]
"""Under vLLM's name for a gate and an up projection together: the one of them that has come."""


def patch_stacked_experts(model: Any, tensor_rank: int) -> str:
    """Patch the model's class if it needs it; return a report of the patch.

    `tensor_rank` is this worker's rank among those that divide heads.
    """
    inner = getattr(model, "model", None)
    if not hasattr(inner, "_load_weights_other"):
        return "not needed: its files store each expert"
    if not hasattr(inner, "_try_load_streamed_expert"):
        return f"{NOT_APPLIED}: this vLLM cannot load one expert at a time"
    kind = type(model)
    if getattr(kind, _MARK, False):
        return "applied before"
    original = kind.load_weights
    if tuple(inspect.signature(original).parameters) != ("self", "weights"):
        return f"{NOT_APPLIED}: this vLLM loads weights in another way"
    kind.load_weights = _make_load_weights(original, tensor_rank)
    setattr(kind, _MARK, True)
    return "applied"


def _make_load_weights(original: LoadWeights, tensor_rank: int) -> LoadWeights:
    def load_weights(self: Any, weights: Weights) -> set[str]:
        waiting: Waiting = self.__dict__.setdefault(_WAITING, {})
        loaded: set[str] = set()
        return original(self, _without_sinks(self, join_projections(weights, waiting), loaded, tensor_rank)) | loaded

    return load_weights


def _without_sinks(
    model: Any, weights: Weights, loaded: set[str], tensor_rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the sinks of the model's own heads, and yield all other weights."""
    for name, tensor in weights:
        if not name.endswith(_SINKS):
            yield name, tensor
            continue
        own_name = name.replace(".self_attn.", ".attn.")
        try:
            parameter = model.get_parameter(own_name)
        except AttributeError:
            # Another pipeline stage has the layer.
            continue
        num_heads = len(parameter)
        own = tensor.narrow(0, tensor_rank * num_heads, num_heads)
        getattr(parameter, "weight_loader", _copy)(parameter, own)
        loaded.add(own_name)


def _copy(parameter: torch.Tensor, given: torch.Tensor) -> None:
    parameter.data.copy_(given)


def join_projections(weights: Weights, waiting: Waiting) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield an expert's tensors under vLLM's names for them, and all others as they are.

    The gate or the up projection that comes first waits for the other one, which may come in a later call.
    """
    for name, tensor in weights:
        part = parse_part(name)
        if part is None:
            yield name, tensor
            continue
        stem = f"{part.block}.{part.expert}"
        if part.projection == "down":
            yield f"{stem}.w2_{part.kind}", tensor.T if tensor.dim() > 1 else tensor
            continue
        name = f"{stem}.w13_{part.kind}"
        parts = waiting.setdefault(name, {})
        parts[part.projection] = tensor
        if len(parts) == 2:
            del waiting[name]
            # In turn: gate, up, gate, up.
            joined_RC = torch.stack((parts["gate"], parts["up"]), dim=1).flatten(0, 1)
            yield name, joined_RC.T if joined_RC.dim() > 1 else joined_RC
    for parts in waiting.values():
        # The memory of a tensor that came in a stream is used again.
        parts |= {projection: tensor.clone() for projection, tensor in parts.items()}
