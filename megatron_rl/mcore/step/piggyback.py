"""Hidden states of frozen models that travel from one pipeline stage to the next behind the policy's.

Megatron's schedules accept a communicator to send and receive with. `Piggyback` makes the policy's hidden states the
front of a longer message, and hands the schedule only the front of what it receives. So forward messages are longer,
and everything else, gradients above all, is what a single model exchanges. A separate channel for the frozen models
would need groups, an order of sends and receives that never blocks, and a rule for when a sent buffer may be freed: the
existing messages have all of these.
"""

from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.utils.weak import WeakTensorKeyDictionary


class Piggyback(P2PCommunicator):
    """The communicator between pipeline stages for one run of a schedule."""

    def __init__(self, config: ModelParallelConfig, num_behind: int):
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        assert config.variable_seq_lengths, "the next stage must be told how long a message is"
        self._num_behind = num_behind
        self._behind = WeakTensorKeyDictionary()

    def put(self, front: torch.Tensor, behind: list[torch.Tensor]) -> None:
        """Have these sent behind a chunk's output; they must have its shape."""
        assert len(behind) == self._num_behind
        self._behind[front] = behind

    def take(self, front: torch.Tensor) -> list[torch.Tensor]:
        """Return what came behind a chunk's input.

        The input gets memory of its own: it is kept for the backward pass, the message that it was part of is not.
        """
        front.data = front.data.clone()
        return self._behind.pop(front)

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **others: Any) -> tuple:
        """Send and receive the longer messages: all of Megatron's communication goes through this method."""
        message = None
        if tensor_send_next is not None:
            message = torch.cat([tensor_send_next.detach(), *self._behind.pop(tensor_send_next)])
        received, *rest = super()._communicate(tensor_send_next=message, **others)
        return (None if received is None else self._front(received), *rest)

    def _front(self, received: torch.Tensor) -> torch.Tensor:
        """Return the policy's part of a message, which may still be in transit."""
        front, *behind = received.detach().chunk(1 + self._num_behind)
        # The schedule reads the gradient from this leaf.
        front = front.detach().requires_grad_()
        self._behind[front] = behind
        return front
