"""A slot in the form that the model takes: one pack, and what the algorithm knows of each of its targets.

Letters: T tokens of the buffer, N targets, S responses of the micro-batch.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.shared.protocol.wire import GroupPart, Slot, decode_log_probs, decode_tokens
from megatron_rl.trainer.data.packing import Pack, Tokens, pack_groups, separate_responses


@dataclasses.dataclass(frozen=True)
class Contents:
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
    """Number of tokens of each response."""
    parts: tuple[GroupPart, ...]

    @property
    def num_responses(self) -> int:
        return len(self.lengths_S)

    @property
    def num_targets(self) -> int:
        return len(self.engine_log_probs_N)

    @property
    def contents(self) -> Contents:
        return Contents(self.pack.num_tokens, self.num_targets, self.num_responses, self.parts)

    def to(self, device: torch.device) -> "Batch":
        """Return the same batch on a device."""
        return dataclasses.replace(
            self,
            pack=self.pack.to(device),
            engine_log_probs_N=self.engine_log_probs_N.to(device),
            advantages_S=self.advantages_S.to(device),
            lengths_S=self.lengths_S.to(device),
        )


@dataclasses.dataclass(frozen=True)
class Batcher:
    """Turns slots into batches; the same bytes give the same batch on every rank."""

    advantage: Callable[[GroupPart], np.ndarray]
    """Function from a part to the advantages of its whole group."""
    multiple_of: int = 1
    """Divisor of the buffer's length, which is padded to a multiple of it."""
    vocab_size: int | None = None
    is_shared: bool = True
    """Whether the responses of a group share one copy of their prompt."""
    prepare: Callable[[Layout], object] | None = None
    """Function that prepares the attention's tables for a layout, so that the first layer need not."""
    num_parts: int = 1
    """Number of ranks that share a pack's rows."""

    def batch(self, slot: Slot) -> Batch:
        """Pack the slot's groups, in their order."""
        responses = [response for part in slot.parts for response in part.responses]
        groups: list[tuple[Tokens, list[Tokens]]] = [
            (decode_tokens(part.prompt_tokens), [decode_tokens(response.tokens) for response in part.responses])
            for part in slot.parts
        ]
        pack = pack_groups(
            groups if self.is_shared else separate_responses(groups), self.multiple_of, vocab_size=self.vocab_size
        )
        if self.prepare is not None:
            self.prepare(pack.layout)
        if self.num_parts > 1:
            # Divided in the loader's thread and on the host: on a device it would stall every micro-batch.
            pack = pack.divided(self.num_parts)
        advantages = [
            self.advantage(part)[part.first_response : part.first_response + len(part.responses)] for part in slot.parts
        ]
        engine = np.concatenate([decode_log_probs(response.log_probs) for response in responses])
        return Batch(
            replica=slot.replica,
            index=slot.index,
            pack=pack,
            engine_log_probs_N=torch.from_numpy(engine.astype(np.float32)),
            advantages_S=torch.from_numpy(np.concatenate(advantages).astype(np.float32)),
            lengths_S=torch.tensor([len(decode_tokens(response.tokens)) for response in responses]),
            parts=tuple(slot.parts),
        )
