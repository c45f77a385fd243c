"""Compute supervised fine-tuning with transformers and torch's AdamW: padded sequences, nothing packed.

Tests compare the trainer's results with these, so nothing of megatron_rl is used here.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import hf_models
from tests.truth import everything_in

Tensors = dict[str, torch.Tensor]
Row = Sequence[Sequence[Sequence[int]]]
"""The sequences of a row. A sequence is turns, and every second turn is trained on."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The settings of AdamW and of its rate: a linear rise, then half a wave of a cosine."""

    num_steps: int
    num_rising: int
    rate: float
    least_rate: float
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def rate_of(self, step: int) -> float:
        """Return the rate of the step after `step` others."""
        if step <= self.num_rising:
            return self.rate * step / self.num_rising
        share = (step - self.num_rising) / (self.num_steps - self.num_rising)
        return self.least_rate + 0.5 * (1 + math.cos(math.pi * share)) * (self.rate - self.least_rate)


class Twin:
    """A model of a Hugging Face folder, in one precision."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.model = hf_models.load(folder, dtype)
        self._dtype = dtype

    def losses(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return the loss of each token that is trained on, with gradients."""
        chats = [turns for row in rows for turns in row]
        tokens = [[token for turn in turns for token in turn] for turns in chats]
        with everything_in(self._dtype):
            log_probs = hf_models.decode_log_probs(self.model, tokens)
        found = []
        for turns, of_chat in zip(chats, log_probs, strict=True):
            is_response = torch.tensor([number % 2 == 1 for number, turn in enumerate(turns) for _ in turn])
            found.append(-of_chat[is_response[1:]])
        return torch.cat(found)

    def gradients(self, rows: Sequence[Row]) -> tuple[torch.Tensor, Tensors]:
        """Return the losses, and the gradients of their mean by the checkpoint's names.

        The model cannot be used afterwards.
        """
        losses = self.losses(rows)
        losses.mean().backward()
        return losses.detach(), hf_models.gradients_of(self.model)

    def train(self, updates: Sequence[Sequence[Row]], rules: Rules) -> tuple[torch.Tensor, Tensors]:
        """Make the updates; return their losses, and the weights at the end."""
        # Norms and biases do not decay.
        decaying = [one for one in self.model.parameters() if one.dim() > 1]
        others = [one for one in self.model.parameters() if one.dim() <= 1]
        groups = [{"params": decaying, "weight_decay": rules.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
        losses = []
        for step, rows in enumerate(updates):
            for group in optimizer.param_groups:
                group["lr"] = rules.rate_of(step)
            optimizer.zero_grad()
            loss = self.losses(rows).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), rules.clip_norm)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses), {name: one.detach().clone() for name, one in self.model.named_parameters()}
