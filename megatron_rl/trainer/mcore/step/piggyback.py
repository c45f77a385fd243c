"""Hidden states of frozen models, which travel between pipeline stages in the policy's messages.

Megatron's schedules accept a communicator to send and receive with. `Piggyback` appends the frozen models' hidden
states to the policy's, and hands the schedule only the policy's part of a received message. So forward messages are
longer, and everything else, gradients above all, is what a single model exchanges.

A separate channel for the frozen models would need groups, an order of sends and receives that never blocks, and a rule
for when a sent buffer may be freed. The existing messages have all of these.
"""

from typing import Any

import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch.utils.weak import WeakTensorKeyDictionary


class Piggyback(P2PCommunicator):
    """The communicator between pipeline stages for one run of a schedule."""

    def __init__(self, config: ModelParallelConfig, num_frozen: int):
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        assert config.variable_seq_lengths, "the next stage must be told how long a message is"
        self._num_frozen = num_frozen
        # The hidden states that travel with each tensor of the policy.
        self._frozen = WeakTensorKeyDictionary()

    def put(self, policy: torch.Tensor, frozen: list[torch.Tensor]) -> None:
        """Send the frozen models' outputs with a chunk's output; they must have its shape."""
        assert len(frozen) == self._num_frozen
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
            message = torch.cat([tensor_send_next.detach(), *self._frozen.pop(tensor_send_next)])
        received, *rest = super()._communicate(tensor_send_next=message, **others)
        return (None if received is None else self._split(received), *rest)

    def _split(self, received: torch.Tensor) -> torch.Tensor:
        """Return the policy's part of a message, which may still be in transit."""
        policy, *frozen = received.detach().chunk(1 + self._num_frozen)
        # The schedule reads the gradient from this leaf.
        policy = policy.detach().requires_grad_()
        self._frozen[policy] = frozen
        return policy
