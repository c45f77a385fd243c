"""A slot in the form that the model takes: one pack, and what the algorithm knows of each of its targets.

Letters: T tokens of the buffer, N targets, S responses of the micro-batch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch

from megatron_rl.algorithm.declaration import find_role
from megatron_rl.config.settings import Settings
from megatron_rl.errors import InputError
from megatron_rl.ops import gated_delta
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.shared.protocol.turns import list_parts, list_turns, mask_sampled
from megatron_rl.shared.protocol.wire import GroupPart, Response, Slot, decode_log_probs, decode_tokens
from megatron_rl.trainer.data.device_copier import DeviceCopier, PendingCopy
from megatron_rl.trainer.data.forest import Branching, Tokens, lay_out_groups, separate_parts
from megatron_rl.trainer.data.packing import Pack, pack_groups, pack_segments, separate_responses
from megatron_rl.trainer.data.routing import lay_out_routing
from megatron_rl.types import Architecture

TurnAdvantage = Callable[[GroupPart], list[np.ndarray]]
"""Function from a part to the advantages of all turns of its whole group."""


@dataclasses.dataclass(frozen=True)
class BatchFacts:
    """The facts of a batch that outlive its tensors."""

    num_tokens: int
    """Number of tokens of the buffer, padding included."""
    num_targets: int
    num_responses: int
    parts: tuple[GroupPart, ...]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch. `pack.target_sequences_N` has each target's index into the tensors over S."""

    replica: int
    index: int
    """Number of the slot in its iteration."""
    pack: Pack
    engine_log_probs_N: torch.Tensor
    """Log-probs that the engine gave the tokens when it sampled them, fp32."""
    advantages_S: torch.Tensor
    lengths_S: torch.Tensor
    """Number of tokens of each response that the policy sampled."""
    parts: tuple[GroupPart, ...]
    turn_advantages_N: torch.Tensor | None = None
    """The advantages of targets by their turns, or rewards for a critic; None if all targets of a response have its
    advantage."""
    is_of_model_N: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The targets of each model that not all groups need, by its name; models of no target are left out."""
    known_N: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The log-probs of targets under models that engines compute, by name; NaN for targets of other models."""
    arrival: PendingCopy = PendingCopy()
    """The tensors' arrival on the device; wait for it before computing with them."""

    @property
    def num_responses(self) -> int:
        return len(self.lengths_S)

    @property
    def num_targets(self) -> int:
        return len(self.engine_log_probs_N)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the buffer, padding included."""
        return self.pack.num_tokens

    def needs(self, model: str) -> bool:
        """Check whether this model is computed; one with a dot in its name only for the groups that choose it."""
        return find_role(model) == model or model in self.is_of_model_N

    def spread_advantages(self) -> torch.Tensor:
        if self.turn_advantages_N is not None:
            return self.turn_advantages_N
        # index_select: its result does not depend on the number of threads.
        return self.advantages_S.index_select(0, self.pack.target_sequences_N)

    @property
    def facts(self) -> BatchFacts:
        return BatchFacts(self.pack.num_tokens, self.num_targets, self.num_responses, self.parts)

    def copy_to_device(self, copier: DeviceCopier) -> "Batch":
        """Begin to copy the batch to the device, and return it as it will be there."""
        copied, arrival = copier.copy(self, self.pack.layout)
        return dataclasses.replace(copied, arrival=arrival)


@dataclasses.dataclass(frozen=True)
class Batcher:
    """Turns slots into batches; the same bytes give the same batch on every rank."""

    advantage: Callable[[GroupPart], np.ndarray]
    """Function from a part to the advantages of its whole group."""
    turn_advantage: TurnAdvantage | None = None
    """Function for --grpo-turn-credit; None without it."""
    places_rewards: bool = False
    """Whether `advantage` gives rewards, each of which belongs to the last target of its response or turn."""
    multiple_of: int = 1
    """Divisor of the buffer's length, which is padded to a multiple of it."""
    vocab_size: int | None = None
    is_shared: bool = True
    """Whether the responses of a group share one copy of their prompt."""
    prepare: Callable[[Layout], object] | None = None
    """Function that makes the attention's tables for a layout, so that they are copied with the batch."""
    num_parts: int = 1
    """Number of ranks that share a pack's rows."""
    replayed: Architecture | None = None
    """The model for which the experts that engines chose are laid out with the pack; None leaves them out."""
    choose: Callable[[GroupPart], str] | None = None
    """Function from a part to its model in a role of several; None if no role has several."""
    served: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The models that engines compute, with the hashes of their folders."""

    def batch(self, slot: Slot) -> Batch:
        """Pack the slot's groups, in their order."""
        parts = [part for part in slot.parts if part.responses]
        responses = [response for part in parts for response in part.responses]
        masks = [mask_sampled(response) for response in responses]
        pack = self._pack(parts, responses, masks)
        if self.replayed is not None:
            routing = lay_out_routing(parts, self.replayed, self.is_shared, pack.num_tokens)
            pack = dataclasses.replace(pack, routing=routing)
        if self.prepare is not None:
            self.prepare(pack.layout)
        if self.num_parts > 1:
            # Divided in the loader's thread and on the host: on a device it would stall every micro-batch.
            pack = pack.divided(self.num_parts)
        empty = np.zeros(0, dtype=np.float32)
        advantages = [
            self.advantage(part)[part.first_response : part.first_response + len(part.responses)] for part in parts
        ]
        engine = [decode_log_probs(response.log_probs)[mask] for response, mask in zip(responses, masks, strict=True)]
        of_turns = None
        if self.places_rewards:
            of_turns = torch.from_numpy(place_rewards(parts, self.advantage).astype(np.float32))
        elif self.turn_advantage is not None:
            of_turns = torch.from_numpy(spread_turn_advantages(parts, self.turn_advantage).astype(np.float32))
        return Batch(
            replica=slot.replica,
            index=slot.index,
            pack=pack,
            engine_log_probs_N=torch.from_numpy(np.concatenate([empty, *engine]).astype(np.float32)),
            advantages_S=torch.from_numpy(np.concatenate([empty, *advantages]).astype(np.float32)),
            lengths_S=torch.tensor([int(mask.sum()) for mask in masks], dtype=torch.int64),
            parts=tuple(slot.parts),
            turn_advantages_N=of_turns,
            is_of_model_N=self._choose_models(parts, pack),
            known_N=self._read_served(parts, masks),
        )

    def _read_served(self, parts: Sequence[GroupPart], masks: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Read the log-probs of models that engines compute; raise an InputError if one lacks a target's."""
        if not self.served:
            return {}
        found, models, of_responses = [np.zeros(0, dtype="<f4")], dict.fromkeys([*self.served][:1]), iter(masks)
        if self.choose is not None:
            models = {self.choose(part): None for part in parts}
        for part in parts:
            name = next(iter(self.served)) if self.choose is None else self.choose(part)
            for response in part.responses:
                mask, data = next(of_responses), response.teacher_log_probs
                values = np.full(len(mask), np.nan, dtype="<f4")
                is_same = name in self.served and response.teacher_hash == self.served[name]
                if is_same and not isinstance(data, msgspec.UnsetType):
                    values = decode_log_probs(data)
                if name in self.served and (len(values) != len(mask) or not np.isfinite(values[mask]).all()):
                    raise InputError(
                        f"the group of prompt {part.prompt_index} ({part.row}), engine {response.engine}, has no "
                        f"finite log-prob of {name} for each token: start the sidecar with the same --teacher"
                    )
                found.append(values[mask])
        known_N = torch.from_numpy(np.concatenate(found))
        return {name: known_N for name in models if name in self.served}

    def _choose_models(self, parts: Sequence[GroupPart], pack: Pack) -> dict[str, torch.Tensor]:
        if self.choose is None:
            return {}
        models = [name for part in parts for name in [self.choose(part)] * len(part.responses)]
        of_targets = pack.target_sequences_N
        return {name: torch.tensor([one == name for one in models])[of_targets] for name in dict.fromkeys(models)}

    def _pack(self, parts: Sequence[GroupPart], responses: Sequence[Response], masks: Sequence[np.ndarray]) -> Pack:
        """Pack the responses; a mask is True for each token of a response that the policy sampled."""
        if all(mask.all() for mask in masks) and not any(response.branches for response in responses):
            groups: list[tuple[Tokens, list[Tokens]]] = [
                (decode_tokens(part.prompt_tokens), [decode_tokens(response.tokens) for response in part.responses])
                for part in parts
            ]
            groups = groups if self.is_shared else separate_responses(groups)
            return pack_groups(groups, self.multiple_of, vocab_size=self.vocab_size)
        of_response = iter(masks)
        branching = [
            (
                decode_tokens(part.prompt_tokens),
                [
                    Branching(decode_tokens(response.tokens), next(of_response), list_parts(response))
                    for response in part.responses
                ],
            )
            for part in parts
        ]
        segments = lay_out_groups(branching) if self.is_shared else separate_parts(branching)
        return pack_segments(segments, self.multiple_of, vocab_size=self.vocab_size)


def spread_turn_advantages(parts: Sequence[GroupPart], advantage: TurnAdvantage) -> np.ndarray:
    """Return the advantage of each target, in the order of responses and their tokens."""
    found = [np.zeros(0)]
    for part in parts:
        of_group = advantage(part)
        for number, response in enumerate(part.responses, part.first_response):
            turns = list_turns(response)
            lengths = [turn.end - turn.start for turn in turns if not turn.is_given]
            found.append(np.repeat(of_group[number], lengths))
    return np.concatenate(found)


def place_rewards(parts: Sequence[GroupPart], compute: Callable[[GroupPart], np.ndarray]) -> np.ndarray:
    """Return the reward of each target: turns' at their ends, and what these leave of a response's at the end of all.

    `compute` gives the rewards of a part's whole group.
    """
    placed = [np.zeros(0)]
    for part in parts:
        rewards_K = compute(part)
        for number, response in enumerate(part.responses, part.first_response):
            lengths = [turn.end - turn.start for turn in list_turns(response) if not turn.is_given]
            of_targets, of_turns = np.zeros(sum(lengths)), part.turn_rewards[number] if part.turn_rewards else []
            for end, reward in zip(np.cumsum(lengths), of_turns, strict=False):
                of_targets[end - 1] += reward
            of_targets[-1:] += rewards_K[number] - sum(of_turns)
            placed.append(of_targets)
    return np.concatenate(placed)


def build_preparation(settings: Settings, device: torch.device) -> Callable[[Layout], None]:
    """Return the function that makes the tables of a layout, which keeps them."""
    attention, linear = BACKENDS.find(settings.attention.backend), settings.architecture.linear

    def prepare(layout: Layout) -> None:
        for window in settings.architecture.windows:
            attention.prepare(layout, device, window)
        if linear is not None:
            gated_delta.prepare(layout, linear.window, settings.model.linear_attention_backend)

    return prepare
