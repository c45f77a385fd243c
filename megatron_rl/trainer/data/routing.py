"""Experts that were chosen for the tokens of a micro-batch, and the layout of engines' choice as its pack.

An engine chooses experts for the tokens that it is fed: the prompt's, and those of a response but its last one. No
log-prob depends on the experts of a response's last token.

Letters: T tokens of the buffer, L layers of the model, K experts of a token.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import GroupPart, Response, decode_experts
from megatron_rl.types import Architecture


@dataclasses.dataclass(frozen=True)
class Routing:
    """Given experts of a pack's tokens."""

    experts_TLK: torch.Tensor
    """Experts of each token in each layer, counted from zero over all layers; zeros if unknown, and in dense layers."""
    is_known_T: torch.Tensor
    """True for a token whose experts are given."""


def lay_out_routing(
    parts: Sequence[GroupPart], architecture: Architecture, is_shared: bool, num_tokens: int
) -> Routing:
    """Lay out the experts of a slot's parts in a buffer of `num_tokens`, in the order of `pack_groups`.

    Without `is_shared`, each response follows a copy of its prompt. Raise an InputError for experts that are missing.
    """
    experts = architecture.experts
    assert experts is not None
    shape = (architecture.num_layers, experts.num_active)
    dtype = np.uint8 if experts.num_experts <= 256 else np.int16
    experts_TLK = np.zeros((num_tokens, *shape), dtype=dtype)
    is_known_T = np.zeros(num_tokens, dtype=bool)
    start = 0
    for length, data, of in _list_segments(parts, is_shared):
        known_RLK = _decode(data, shape, experts.num_experts, of)
        wanted = length if of.response is None else length - 1
        if len(known_RLK) != wanted:
            raise InputError(
                f"{of} has the experts of {len(known_RLK)} tokens, and must have those of {wanted}: start the sidecar "
                "with --rollout-replay-routing and the same model"
            )
        _check(known_RLK, architecture, of)
        experts_TLK[start : start + wanted] = known_RLK
        is_known_T[start : start + wanted] = True
        start += length
    return Routing(torch.from_numpy(experts_TLK), torch.from_numpy(is_known_T))


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a segment among a slot's parts, for errors."""

    part: GroupPart
    response: Response | None = None

    def __str__(self) -> str:
        group = f"the group of prompt {self.part.prompt_index}"
        return f"{group}, its prompt," if self.response is None else f"{group}, engine {self.response.engine},"


_Experts = bytes | msgspec.UnsetType


def _list_segments(parts: Sequence[GroupPart], is_shared: bool) -> Iterator[tuple[int, _Experts, _Place]]:
    """Yield the length and the experts of each segment."""
    for part in parts:
        prompt = (len(part.prompt_tokens) // 4, part.prompt_experts, _Place(part))
        if is_shared:
            yield prompt
        for response in part.responses:
            if not is_shared:
                yield prompt
            yield len(response.tokens) // 4, response.experts, _Place(part, response)


def _decode(data: _Experts, shape: tuple[int, int], num_experts: int, of: _Place) -> np.ndarray:
    if isinstance(data, msgspec.UnsetType):
        return np.zeros((0, *shape), dtype=np.uint8)
    if len(data) % (shape[0] * shape[1] * (1 if num_experts <= 256 else 2)):
        raise InputError(
            f"{of} has {len(data)} bytes of experts, which are not those of whole tokens in {shape[0]} layers with "
            f"{shape[1]} experts each: start the sidecar with the same model"
        )
    return decode_experts(data, num_experts).reshape(-1, *shape)


def _check(experts_RLK: np.ndarray, architecture: Architecture, of: _Place) -> None:
    """Raise an InputError for a number of no expert, and for a layer of which nothing was recorded."""
    assert architecture.experts is not None
    num_experts, first = architecture.experts.num_experts, architecture.experts.num_dense_layers
    if experts_RLK.size and experts_RLK.max() >= num_experts:
        raise InputError(f"{of} has expert {experts_RLK.max()}, and the model has {num_experts}: use the same model")
    if experts_RLK.shape[2] > 1:
        is_same_RL = experts_RLK[:, first:, 0] == experts_RLK[:, first:, 1]
        if is_same_RL.any():
            row, layer = np.argwhere(is_same_RL)[0]
            raise InputError(
                f"{of} has the same expert twice for token {row} in layer {first + layer}: this vLLM does not record "
                "the experts of all layers; drop --rollout-replay-routing"
            )
