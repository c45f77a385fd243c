"""A micro-batch of demonstrations from its pack to the loss: minus the log-probs of its responses' tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_rl.data.packing import Pack
from megatron_rl.mcore.step import auxiliary
from megatron_rl.mcore.step.forward_step import ForwardStep, Report


class SupervisedStep(ForwardStep):
    """Runs a pack through the model, and sums minus the log-probs of its targets."""

    def __init__(self, scale: float):
        """The loss is multiplied by `scale`, since the schedule divides it: see `loss_scale`."""
        super().__init__()
        self._scale = scale

    def forward_step(self, data_iterator: Iterator[Pack], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run the next pack through a chunk."""
        pack = next(data_iterator)
        output_tensor = model(pack, self._temperature)
        auxiliary.weigh_losses(output_tensor, pack.num_targets, get_model_config(model))
        return output_tensor, self.loss_func

    def loss_func(self, output_tensor: torch.Tensor) -> tuple[torch.Tensor, Report]:
        """Return the sum of a micro-batch's losses. `training/supervised` divides once per update."""
        loss = -output_tensor.sum()
        return loss * self._scale, {"loss": loss.detach()}
