"""GRPO once more, from its formulas: transformers and torch, padded sequences, nothing packed, nothing shared.

What the trainer computes is compared with this, so nothing of megatron_rl is used here.

Letters: B responses of the update, L tokens of the longest sequence, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import hf_models
from tests.truth import everything_in

Tensors = dict[str, torch.Tensor]
# Sequences that go through the model together: fewer leave less padding.
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its responses, their rewards, and the log-probs that an engine gave with them."""

    prompt: list[int]
    responses: list[list[int]]
    rewards: list[float]
    engine: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is maximized, and the step that is taken."""

    temperature: float
    lower: float
    upper: float
    beta: float
    aggregation: str
    max_tokens: int
    learning_rate: float
    clip_norm: float
    is_corrected: bool = False
    """Whether tokens are weighed by the policy's probability over the engine's."""
    truncation: float = math.inf
    """The largest such weight."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What one update saw; means are over tokens."""

    loss: float
    gradients: Tensors
    """Before they are clipped."""
    gradient_norm: float
    num_tokens: int
    means: dict[str, float]
    per_token: Tensors
    """What the means are of, and the loss."""
    num_clipped: int
    """Tokens whose gradient the clipping ends."""
    margin: float
    """How near to a bound of the clipping or of the truncation the nearest ratio lies."""


@dataclasses.dataclass(frozen=True)
class _Padded:
    ids_BL: torch.Tensor
    attention_BL: torch.Tensor
    is_response_BL: torch.Tensor
    engine_BL: torch.Tensor
    advantages_B1: torch.Tensor


class Twin:
    """A policy and its reference, in an iteration of several updates, each over its own groups, in one precision."""

    def __init__(
        self,
        policy: Path,
        reference: Path,
        updates: Sequence[Sequence[Group]],
        rules: Rules,
        dtype: torch.dtype = torch.float32,
    ):
        self.rules = rules
        self._dtype = dtype
        self._policy = self._load(policy)
        self._batches = [_pad(groups, dtype) for groups in updates]
        # Old is the policy that the iteration starts with, whatever the updates make of it.
        self._old = [self._log_probs(self._policy, batch) for batch in self._batches]
        frozen = self._load(reference)
        self._reference = [self._log_probs(frozen, batch) for batch in self._batches]

    def load(self, weights: Tensors) -> None:
        """Go on from these weights."""
        self._policy.load_state_dict(weights)

    def step(self) -> Tensors:
        """Clip the last gradients and go along them, without momentum; returns the weights."""
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self.rules.clip_norm)
        torch.optim.SGD(self._policy.parameters(), lr=self.rules.learning_rate).step()
        return {name: value.detach().clone() for name, value in self._policy.named_parameters()}

    def update(self, number: int) -> Update:
        """The loss of an update and its gradients, at the present weights."""
        rules, batch, old_BL = self.rules, self._batches[number], self._old[number]
        mask_BL = batch.is_response_BL
        self._policy.zero_grad()
        logp_BL = self._log_probs(self._policy, batch, with_gradients=True)
        ratio_BL = torch.exp(logp_BL - old_BL)
        advantage_BL = batch.advantages_B1.expand_as(ratio_BL)
        bounded_BL = torch.clamp(ratio_BL, 1 - rules.lower, 1 + rules.upper)
        surrogate_BL = torch.minimum(ratio_BL * advantage_BL, bounded_BL * advantage_BL)
        weight_BL = torch.exp(old_BL - batch.engine_BL)
        if rules.is_corrected:
            surrogate_BL = surrogate_BL * weight_BL.clamp(max=rules.truncation)
        away_BL = self._reference[number] - logp_BL
        kl_BL = torch.exp(away_BL) - away_BL - 1
        loss_BL = rules.beta * kl_BL - surrogate_BL
        loss = self._aggregate(loss_BL, mask_BL)
        loss.backward()
        gradients = {name: value.grad.clone() for name, value in self._policy.named_parameters()}
        with torch.no_grad():
            bounds = [(ratio_BL, 1 - rules.lower), (ratio_BL, 1 + rules.upper)]
            if rules.is_corrected:
                bounds.append((weight_BL, rules.truncation))
            found = {
                "loss": loss_BL,
                "ratio": ratio_BL,
                "clipped_low": (advantage_BL < 0) & (ratio_BL < 1 - rules.lower),
                "clipped_high": (advantage_BL > 0) & (ratio_BL > 1 + rules.upper),
                "kl": kl_BL,
                "entropy": -old_BL,
                "mismatch": (old_BL - batch.engine_BL).abs(),
                "mismatch_kl": weight_BL - torch.log(weight_BL) - 1,
            }
            per_token = {name: value[mask_BL].to(self._dtype) for name, value in found.items()}
        return Update(
            loss=loss.item(),
            gradients=gradients,
            gradient_norm=torch.stack([value.double().norm() for value in gradients.values()]).norm().item(),
            num_tokens=int(mask_BL.sum()),
            means={name: value.double().mean().item() for name, value in per_token.items()},
            per_token=per_token,
            num_clipped=int(sum(per_token[name].sum() for name in ("clipped_low", "clipped_high"))),
            margin=min((value_BL - bound)[mask_BL].abs().min().item() for value_BL, bound in bounds),
        )

    def _load(self, folder: Path) -> torch.nn.Module:
        with everything_in(self._dtype):
            return hf_models.load(folder, self._dtype)

    def _log_probs(self, model: torch.nn.Module, batch: _Padded, with_gradients: bool = False) -> torch.Tensor:
        with torch.set_grad_enabled(with_gradients), everything_in(self._dtype):
            parts = [
                log_probs(model, ids_BL, attention_BL, self.rules.temperature)
                for ids_BL, attention_BL in zip(batch.ids_BL.split(_ROWS), batch.attention_BL.split(_ROWS), strict=True)
            ]
        return torch.cat(parts)

    def _aggregate(self, loss_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        masked_BL = torch.where(mask_BL, loss_BL, 0.0)
        if self.rules.aggregation == "token":
            return masked_BL.sum() / mask_BL.sum()
        if self.rules.aggregation == "sequence":
            return (masked_BL.sum(1) / mask_BL.sum(1)).mean()
        assert self.rules.aggregation == "constant"
        return masked_BL.sum() / (len(mask_BL) * self.rules.max_tokens)


def log_probs(
    model: torch.nn.Module, ids_BL: torch.Tensor, attention_BL: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Of every token given those before it, at the temperature; zero for the first of each sequence."""
    logits_BLV = model(input_ids=ids_BL, attention_mask=attention_BL).logits[:, :-1] / temperature
    chosen_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen_BL, (1, 0))


def responses_log_probs(folder: Path, groups: Sequence[tuple[list[int], list[list[int]]]], temperature: float) -> list:
    """Of every token of every response to every prompt, one sequence at a time; as lists."""
    model = hf_models.load(folder)

    def of(prompt: list[int], response: list[int]) -> list[float]:
        ids_1L = torch.tensor([prompt + response])
        return log_probs(model, ids_1L, torch.ones_like(ids_1L), temperature)[0, len(prompt) :].tolist()

    with torch.no_grad():
        return [[of(prompt, response) for response in responses] for prompt, responses in groups]


def _pad(groups: Sequence[Group], dtype: torch.dtype) -> _Padded:
    """A row for each response, behind a copy of its prompt; what is missing on the right is masked."""
    length = max(len(group.prompt) + len(response) for group in groups for response in group.responses)
    ids, attention, is_response, engine, advantages = [], [], [], [], []
    for group in groups:
        for number, response in enumerate(group.responses):
            before, after = len(group.prompt), length - len(group.prompt) - len(response)
            ids.append(group.prompt + response + [0] * after)
            attention.append([1] * (length - after) + [0] * after)
            is_response.append([False] * before + [True] * len(response) + [False] * after)
            engine.append([0.0] * before + group.engine[number] + [0.0] * after)
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        deviation = ((rewards - rewards.mean()) ** 2).mean().sqrt()
        advantages += ((rewards - rewards.mean()) / (deviation + 1e-6)).tolist()
    return _Padded(
        torch.tensor(ids),
        torch.tensor(attention),
        torch.tensor(is_response),
        torch.tensor(engine, dtype=dtype),
        torch.tensor(advantages, dtype=dtype)[:, None],
    )
