"""Hidden states of frozen models, which travel between pipeline stages in the policy's messages.

Megatron's schedules accept a communicator to send and receive with. `Piggyback` appends the frozen models' hidden
states to the policy's, and hands the schedule only the policy's part of a received message. So forward messages are
longer, and everything else, gradients above all, is what a single model exchanges. The states of a model of another
width are cut into rows of the policy's width, the last of which is filled up.

A separate channel for the frozen models would need groups, an order of sends and receives that never blocks, and a rule
for when a sent buffer may be freed. The existing messages have all of these.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.utils.weak import WeakTensorKeyDictionary


class Piggyback(P2PCommunicator):
    """The communicator between pipeline stages for one run of a schedule."""

    def __init__(self, config: ModelParallelConfig, width: int, widths: Sequence[int]):
        """Carry hidden states of these `widths`, a frozen model each, with the policy's, which have `width`."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        assert config.variable_seq_lengths, "the next stage must be told how long a message is"
        self._width, self._widths = width, widths
        # The hidden states that travel with each tensor of the policy.
        self._frozen = WeakTensorKeyDictionary()

    def put(self, policy: torch.Tensor, frozen: list[torch.Tensor]) -> None:
        """Send the frozen models' outputs with a chunk's output; they must have its number of rows."""
        assert [len(states) for states in frozen] == [len(policy)] * len(self._widths)
        self._frozen[policy] = frozen

    def take(self, policy: torch.Tensor) -> list[torch.Tensor]:
        """Return the frozen models' inputs that came with a chunk's input.

        The chunk's input gets memory of its own, since it is kept for the backward pass. The message is not kept.
        """
        policy.data = policy.data.clone()
        return self._frozen.pop(policy)

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **others: Any) -> tuple:
        """Send and receive the longer messages. All of Megatron's communication goes through this method."""
        message = None
        if tensor_send_next is not None:
            frozen = self._frozen.pop(tensor_send_next)
            message = torch.cat([tensor_send_next.detach(), *(self._cut(states) for states in frozen)])
        received, *rest = super()._communicate(tensor_send_next=message, **others)
        return (None if received is None else self._split(received), *rest)

    def _split(self, received: torch.Tensor) -> torch.Tensor:
        """Return the policy's part of a message, which may still be in transit."""
        num_rows = self._find_num_rows(len(received))
        counts = [self._count_rows(num_rows, width) for width in self._widths]
        policy, *parts = received.detach().split([num_rows, *counts])
        frozen = [
            part if width == self._width else part.flatten()[: num_rows * width].view(num_rows, 1, width)
            for part, width in zip(parts, self._widths, strict=True)
        ]
        # The schedule reads the gradient from this leaf.
        policy = policy.detach().requires_grad_()
        self._frozen[policy] = frozen
        return policy

    def _cut(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states [rows, 1, width] in rows of the policy's width."""
        if states.shape[-1] == self._width:
            return states
        flat = states.flatten()
        return torch.nn.functional.pad(flat, (0, -len(flat) % self._width)).view(-1, 1, self._width)

    def _count_rows(self, num_rows: int, width: int) -> int:
        return -(-num_rows * width // self._width)

    def _find_num_rows(self, length: int) -> int:
        """Return the number of the policy's rows in a message of this length."""
        # Each model rounds up, so there may be fewer rows than its width alone would give.
        num_rows = length * self._width // (self._width + sum(self._widths))
        while num_rows + sum(self._count_rows(num_rows, width) for width in self._widths) > length:
            num_rows -= 1
        return num_rows
