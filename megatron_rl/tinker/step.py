"""The pass of data that a client has sent: losses of log-probs, by Megatron's schedules."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_rl.algorithm.declaration import Targets
from megatron_rl.tinker.losses import LOG_PROBS, LOSSES, Bounds, find_weight
from megatron_rl.tinker.packs import ServedBatch
from megatron_rl.trainer.mcore.model.gpt import unwrap
from megatron_rl.trainer.mcore.step import auxiliary
from megatron_rl.trainer.mcore.step.forward_step import ForwardStep, Report


class ServedStep(ForwardStep):
    """Runs micro-batches through the model; the loss is the sum over their targets, and nothing is divided."""

    def __init__(self, loss: str, settings: Bounds, scale: float) -> None:
        """Multiply the loss by `scale`, since the schedule divides it: see `loss_scale`."""
        super().__init__()
        self._loss = LOSSES[loss]
        self._settings = settings
        self._scale = scale

    def forward_step(self, data_iterator: Iterator[ServedBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)
        output_tensor = model(batch.pack, self._temperature)
        auxiliary.weigh_losses(output_tensor, len(batch.places_N), unwrap(model).config)
        return output_tensor, partial(self.loss_func, batch)

    def loss_func(  # type: ignore[override] # the schedules give the last argument alone
        self, batch: ServedBatch, output_tensor: torch.Tensor
    ) -> tuple[torch.Tensor, Report]:
        """Return the sum of a micro-batch's losses, and its log-probs."""
        inputs, policy_N = batch.inputs, output_tensor.index_select(0, batch.places_N)
        advantages_N = inputs[find_weight(self._loss)]
        old_N = inputs.get(LOG_PROBS, policy_N.detach())
        targets = Targets(policy_N, old_N, advantages_N, batch.sequences, old_N, inputs)
        loss = self._loss.compute(targets, self._settings).sum()
        report = {"loss": loss.detach(), "log_probs": policy_N.detach()}
        return loss * self._scale, report
