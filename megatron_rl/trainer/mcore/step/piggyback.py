"""Hidden states of frozen models, which travel between pipeline stages in the policy's messages.

Megatron's schedules accept a communicator to send and receive with. `Piggyback` appends the frozen models' hidden
states to the policy's, and hands the schedule only the policy's part of a received message. So forward messages are
longer, and everything else, gradients above all, is what a single model exchanges. A message has the policy's number of
rows, which are as wide as all numbers need: models may have any width, and each micro-batch may have other models.

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

    def __init__(self, config: ModelParallelConfig, width: int):
        """Carry hidden states with the policy's, which have `width`."""
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        assert config.variable_seq_lengths, "the next stage must be told how long a message is"
        self._width = width
        # The numbers that travel with each tensor of the policy.
        self._frozen = WeakTensorKeyDictionary()

    def put(self, policy: torch.Tensor, frozen: Sequence[torch.Tensor]) -> None:
        """Send the frozen models' outputs with a chunk's output; they must have its number of rows."""
        assert all(len(states) == len(policy) for states in frozen)
        self._frozen[policy] = frozen

    def take(self, policy: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Return the frozen models' inputs that came with a chunk's input, of these widths.

        The chunk's input gets memory of its own, since it is kept for the backward pass. The message is not kept.
        """
        policy.data = policy.data.clone()
        counts = [len(policy) * width for width in widths]
        [numbers] = self._frozen.pop(policy)
        parts = numbers[: sum(counts)].split(counts)
        return [part.view(len(policy), 1, width) for part, width in zip(parts, widths, strict=True)]

    def _communicate(self, *, tensor_send_next: torch.Tensor | None, **others: Any) -> tuple:
        """Send and receive the longer messages. All of Megatron's communication goes through this method."""
        message = None
        if tensor_send_next is not None:
            message = self._join(tensor_send_next)
        received, *rest = super()._communicate(tensor_send_next=message, **others)
        return (None if received is None else self._split(received), *rest)

    def _split(self, received: torch.Tensor) -> torch.Tensor:
        """Return the policy's part of a message, which may still be in transit."""
        flat, count = received.detach().flatten(), len(received) * self._width
        # The schedule reads the gradient from this leaf.
        policy = flat[:count].view(-1, 1, self._width).detach().requires_grad_()
        self._frozen[policy] = [flat[count:]]
        return policy

    def _join(self, policy: torch.Tensor) -> torch.Tensor:
        """Return a message with the policy's number of rows; the last numbers of the last one may mean nothing."""
        parts = [states.detach().flatten() for states in (policy, *self._frozen.pop(policy))]
        num_rows = len(policy)
        padding = -sum(map(len, parts)) % num_rows
        return torch.cat([*parts, policy.new_zeros(padding)]).view(num_rows, 1, -1)
