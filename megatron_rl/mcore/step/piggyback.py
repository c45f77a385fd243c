"""Hidden states of frozen models that go from one pipeline stage to the next behind the policy's.

Megatron's schedules may be given what they send and receive with. `Piggyback` makes the policy's hidden states the
front of a longer message, and hands the schedule the front of what it receives. So the messages forward are longer, and
everything else, the gradients that go back above all, is what a single model exchanges. A channel of its own for the
frozen models would need groups, an order of sends and receives that never blocks, and a rule for when a sent buffer may
go: the messages that are there have all of it.
"""

from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.utils.weak import WeakTensorKeyDictionary


class Piggyback(P2PCommunicator):
    """Between the stages of one run of a schedule."""

    def __init__(self, config: ModelParallelConfig, num_behind: int):
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        assert config.variable_seq_lengths, "the next stage must be told how long a message is"
        self._num_behind = num_behind
        self._behind = WeakTensorKeyDictionary()

    def put(self, front: torch.Tensor, behind: list[torch.Tensor]) -> None:
        """Have these sent behind a chunk's output, which they are like in shape."""
        assert len(behind) == self._num_behind
        self._behind[front] = behind

    def take(self, front: torch.Tensor) -> list[torch.Tensor]:
        """What came behind a chunk's input.

        The input gets memory of its own: it is kept for the backward pass, and the message it was part of is not.
        """
        front.data = front.data.clone()
        return self._behind.pop(front)

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **others: Any) -> tuple:
        """All of Megatron's sending and receiving comes down to this one method."""
        message = None
        if tensor_send_next is not None:
            message = torch.cat([tensor_send_next.detach(), *self._behind.pop(tensor_send_next)])
        received, *rest = super()._communicate(tensor_send_next=message, **others)
        return (None if received is None else self._front(received), *rest)

    def _front(self, received: torch.Tensor) -> torch.Tensor:
        """The policy's part; it may be still under way."""
        front, *behind = received.detach().chunk(1 + self._num_behind)
        # The leaf that the schedule reads a gradient from.
        front = front.detach().requires_grad_()
        self._behind[front] = behind
        return front
