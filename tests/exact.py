"""Compute the gradient of an update in expectation, over every response and every group that can be drawn.

Policies and references are tables: a response is one token that ends it, or another one and a second token. Each update
has one group of each of the `PROMPTS`. Nothing is sampled: every multiset of responses counts by its probability. The
truth is the gradient of the expected reward less the divergence, by differentiation of that expectation.

Letters: V vocabulary, R responses that can be drawn, G multisets of responses, K responses of a group, N tokens.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from megatron_rl.algorithm.advantages import GroupAdvantages, compute_deviation
from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.objective import Objective, Statistics, combine_statistics
from megatron_rl.algorithm.settings import AlgorithmConfig

BASELINE = 0.4
WEIGHTS = {"right": 1.0, "short": 0.5}
MAX_TOKENS = 2
Components = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt's policy, its reference and its rewards. The first token 0 ends a response, any other does not."""

    logits: torch.Tensor
    """The first row belongs to the first token; row v belongs to the second token if the first was v."""
    reference: torch.Tensor
    components: Components
    """The values of the functions in WEIGHTS, for each response."""

    @property
    def rewards(self) -> torch.Tensor:
        columns = (weight * torch.tensor(self.components[name]) for name, weight in WEIGHTS.items())
        return sum(columns, torch.zeros(len(self.responses), dtype=torch.float64))

    @functools.cached_property
    def responses(self) -> list[tuple[int, ...]]:
        return list_responses(self.logits.shape[1])

    def log_probs(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return the log-probs of the tokens of each response."""
        table = logits.log_softmax(-1)
        return [torch.stack([table[row, token] for row, token in _find_places(one)]) for one in self.responses]

    @functools.cached_property
    def slopes(self) -> list[torch.Tensor]:
        """The gradients of the log-probs of each response's tokens by the logits; a row for each token."""
        logits = self.logits.clone().requires_grad_()
        return [
            torch.stack([torch.autograd.grad(value, logits, retain_graph=True)[0].flatten() for value in one])
            for one in self.log_probs(logits)
        ]

    def divergence(self, logits: torch.Tensor, is_fixed: bool = False) -> torch.Tensor:
        """Return KL(policy || reference) over whole responses.

        If fixed, the chances of reaching a token are constants.
        """
        away_V = logits.log_softmax(-1) - self.reference.log_softmax(-1)
        of_rows = (logits.softmax(-1) * away_V).sum(-1)
        reached = torch.cat([torch.ones(1, dtype=torch.float64), logits.softmax(-1)[0, 1:]])
        return ((reached.detach() if is_fixed else reached) * of_rows).sum()

    def expected_reward(self, logits: torch.Tensor) -> torch.Tensor:
        chances = torch.stack([one.sum().exp() for one in self.log_probs(logits)])
        return (chances * self.rewards).sum()


def list_responses(vocabulary: int) -> list[tuple[int, ...]]:
    return [(0,), *itertools.product(range(1, vocabulary), range(vocabulary))]


def _find_places(response: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip((0, *response), response, strict=False))


def draw_prompts(vocabulary: int = 3, count: int = 2, spread: float = 0.5) -> list[Prompt]:
    """Draw policies at some distance from their references; several rewards that differ."""
    draw = torch.Generator().manual_seed(3)
    prompts = []
    for _ in range(count):
        logits = torch.randn(vocabulary, vocabulary, generator=draw, dtype=torch.float64)
        away = spread * torch.randn(vocabulary, vocabulary, generator=draw, dtype=torch.float64)
        responses = list_responses(vocabulary)
        right = torch.randint(0, 2, (len(responses),), generator=draw).double().tolist()
        right[0], right[-1] = 0.0, 1.0
        short = [1.0 if len(one) == 1 else 0.0 for one in responses]
        prompts.append(Prompt(logits, logits + away, {"right": right, "short": short}))
    return prompts


PROMPTS = draw_prompts()


def find_truth(prompts: Sequence[Prompt], beta: float, is_fixed: bool = False, reward: float = 1.0) -> torch.Tensor:
    """Return the gradient of the expected reward less `beta` times the divergence, by all logits."""
    gradients = []
    for prompt in prompts:
        logits = prompt.logits.clone().requires_grad_()
        value = reward * prompt.expected_reward(logits) - beta * prompt.divergence(logits, is_fixed)
        gradients.append(torch.autograd.grad(value, logits)[0].flatten())
    return torch.cat(gradients)


@dataclasses.dataclass(frozen=True)
class Draw:
    """A multiset of responses."""

    chance: float
    share: int
    gradient: torch.Tensor
    """The gradient of the sum of the group's losses, by the logits of its prompt."""
    statistics: Statistics
    """The statistics of the group's micro-batch."""
    has_signal: bool


def list_draws(prompt: Prompt, config: AlgorithmConfig, group_size: int, is_constant: bool = False) -> list[Draw]:
    """List every group that can be drawn, through the project's own advantages and losses; rewards may be all equal.

    A micro-batch is one group if the update needs its statistics, else all: a loss is a sum over responses.
    """
    advantages = GroupAdvantages(config, WEIGHTS)
    groups = list(itertools.combinations_with_replacement(range(len(prompt.responses)), group_size))
    batches = [[group] for group in groups] if advantages.is_divided else [groups]
    return [draw for batch in batches for draw in _list_draws(prompt, config, advantages, batch, is_constant)]


def _list_draws(
    prompt: Prompt,
    config: AlgorithmConfig,
    advantages: GroupAdvantages,
    groups: Sequence[tuple[int, ...]],
    is_constant: bool,
) -> list[Draw]:
    """Compute these groups as one micro-batch; each group gets the statistics of all."""
    objective, baseline = Objective(config, MAX_TOKENS), BASELINE if advantages.has_baseline else None
    policy, reference = prompt.log_probs(prompt.logits), prompt.log_probs(prompt.reference)
    chances = [math.exp(float(one.sum())) for one in policy]
    rewards, of_groups = [], []
    for numbers in groups:
        components = {
            name: [0.0 if is_constant else column[number] for number in numbers]
            for name, column in prompt.components.items()
        }
        rewards.append(
            [sum(WEIGHTS[name] * column[place] for name, column in components.items()) for place in range(len(numbers))]
        )
        of_groups.append(advantages(SimpleNamespace(rewards=rewards[-1], components=components), baseline))
    responses = [number for numbers in groups for number in numbers]
    lengths = torch.tensor([len(policy[number]) for number in responses])
    sequences_N = torch.repeat_interleave(torch.arange(len(responses)), lengths)
    live_N = torch.cat([policy[number] for number in responses]).requires_grad_()
    total, statistics = objective.loss(
        RoleLogProbs(
            live_N,
            live_N.detach(),
            {"reference": torch.cat([reference[number] for number in responses])} if config.kl_beta else {},
        ),
        live_N.detach(),
        torch.from_numpy(np.concatenate(of_groups))[sequences_N],
        sequences_N,
        lengths,
    )
    (of_tokens_N,) = torch.autograd.grad(total, live_N)
    counts = [sum(len(policy[number]) for number in numbers) for numbers in groups]
    draws = []
    for numbers, of_group, slopes in zip(groups, rewards, of_tokens_N.split(counts), strict=True):
        repeats = [numbers.count(number) for number in set(numbers)]
        ways = math.factorial(len(numbers)) // math.prod(map(math.factorial, repeats))
        chance = ways * math.prod(chances[number] for number in numbers)
        gradient = slopes @ torch.cat([prompt.slopes[number] for number in numbers])
        share = objective.share(len(slopes), len(numbers))
        draws.append(Draw(chance, share, gradient, statistics, len(set(of_group)) > 1))
    return draws


def expect_gradient(
    config: AlgorithmConfig,
    prompts: Sequence[Prompt] = PROMPTS,
    group_size: int = 3,
    is_filtered: bool = False,
    is_constant: bool = False,
) -> torch.Tensor:
    """Compute the expected ascent of an update of a group of each of two prompts; filtered ones have a signal."""
    first, second = (
        [one for one in list_draws(prompt, config, group_size, is_constant) if one.has_signal or not is_filtered]
        for prompt in prompts
    )
    is_divided = GroupAdvantages(config, WEIGHTS).is_divided
    deviations = {id(draw): combine_statistics([draw.statistics])[0] for draw in (*first, *second) if is_divided}
    weights = np.zeros((len(first), len(second)))
    for (row, one), (column, other) in itertools.product(enumerate(first), enumerate(second)):
        divisor = float(one.share + other.share)
        if is_divided:
            divisor *= compute_deviation(deviations[id(draw)] for draw in (one, other))
        weights[row, column] = one.chance * other.chance / divisor
    weights /= sum(one.chance for one in first) * sum(one.chance for one in second)
    of_first, of_second = torch.from_numpy(weights.sum(1)), torch.from_numpy(weights.sum(0))
    parts = (
        weights_G @ torch.stack([one.gradient for one in draws])
        for weights_G, draws in ((of_first, first), (of_second, second))
    )
    # A prompt's gradient is a share of the update's mean, and `constant` divides by the most tokens.
    return -torch.cat([*parts]) * len(prompts) * MAX_TOKENS


@dataclasses.dataclass(frozen=True)
class Bias:
    """The relation of an expected gradient to the true one."""

    share: float
    """The multiple of the truth that is nearest to the gradient."""
    rest: float
    """The rest, relative to that multiple."""


def find_bias(found: torch.Tensor, truth: torch.Tensor) -> Bias:
    share = float(found @ truth / (truth @ truth))
    return Bias(share, float((found - share * truth).norm() / max(abs(share) * float(truth.norm()), 1e-300)))
