"""Compute GRPO from its formulas: transformers and torch, padded sequences, nothing packed, nothing shared.

Tests compare the trainer's results with these, so nothing of megatron_rl is used here.

Letters: B responses of the update, L tokens of the longest sequence, V vocabulary.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

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
    given: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list)
    """The ranges of each response's tokens that an environment wrote; empty without environments."""
    branches: list[list[tuple[int, int]]] = dataclasses.field(default_factory=list)
    """For each response, the tokens that branches begin with, and those that each follows, less one; -1: the prompt's
    last one is left out too."""

    def list_paths(self, number: int) -> list[list[int]]:
        """List the places of prompt and response that each part of a response makes, after all that it follows.

        Prompt and response are counted as one. A path ends with the part's own tokens.
        """
        before, length = len(self.prompt), len(self.responses[number])
        begins = [(0, 0), *(self.branches[number] if self.branches else ())]
        paths: list[list[int]] = []
        for (begin, after), (end, _) in itertools.pairwise([*begins, (length, 0)]):
            # What stands before `after` is what some earlier part's path has up to there.
            known = next((path for path in paths if before + after - 1 in path), [*range(before)])
            kept = [place for place in known if place < before + after]
            paths.append([*kept, *range(before + begin, before + end)])
        return [path for path in paths if path]

    def list_sampled(self, number: int) -> list[bool]:
        """List, for each token of a response, whether the policy wrote it."""
        given = {place for begin, end in (self.given[number] if self.given else ()) for place in range(begin, end)}
        return [place not in given for place in range(len(self.responses[number]))]

    @property
    def components(self) -> dict[str, list[float | None]]:
        """The values of the reward functions, by the names in WEIGHTS; one does not apply to responses of one token."""
        lengths = [len(response) for response in self.responses]
        return {"exact": list(self.rewards), "length": [None if length == 1 else length % 3.0 for length in lengths]}


# The weights of the reward functions.
WEIGHTS = {"exact": 1.0, "length": -0.5}


CRITIC = "critic."
"""The begin of the names of a critic's parameters."""


@dataclasses.dataclass(frozen=True)
class Teaching:
    """The divergence from a teacher, and its weight."""

    folder: Path
    divergence: str = "sampled"
    top_k: int | None = None
    mixture: float = 0.5
    coef: float = 0.7
    discount: float = 0.0
    other: Path | None = None
    """The teacher of every second group, if there are two."""


@dataclasses.dataclass(frozen=True)
class Judging:
    """A critic, a language model's body with the `score.weight` of its folder, and how it is used."""

    folder: Path | None
    """None for a head on the policy."""
    decay: float = 0.9
    """Lambda, for advantages."""
    own_decay: float = 0.9
    """Lambda, for what the critic learns."""
    discount: float = 1.0
    clip: float | None = None
    alpha: float | None = None
    learning_rate: float = 0.05
    coef: float = 1.0

    def draw_score(self, width: int) -> torch.Tensor:
        """Draw the weight of a head on the policy: at 0 it would have no gradient for the policy."""
        return 0.3 * torch.randn(1, width, generator=torch.Generator().manual_seed(5))


@dataclasses.dataclass(frozen=True)
class Rules:
    """The objective that is maximized, and the step that is taken."""

    temperature: float
    lower: float
    upper: float
    beta: float
    aggregation: str
    max_tokens: int
    learning_rate: float
    clip_norm: float
    is_corrected: bool = False
    """A flag that weighs tokens by the policy's probability over the engine's."""
    truncation: float = math.inf
    """The largest such weight."""
    least_weight: float = 0.0
    level: str = "token"
    is_masked: bool = False
    """A flag that sets weights beyond their bounds to zero."""
    least_kept: float = 0.0
    most_kept: float = math.inf
    """The bounds of a response's mean weight; a response outside them does not count."""
    loss: str = "clip"
    advantage: str = "grpo"
    baseline: float | None = None
    """The mean reward of the iteration before, for `global`."""
    dual: float | None = None
    region: float = 0.15
    """The change of a probability that ends the gradient of `dppo`."""
    gates: tuple[float, float] = (1.0, 1.05)
    """The steepness of the gate of `sapo`, where advantages are positive and where not."""
    estimator: str = "k3"
    """The estimator of the divergence; within a reward only k1 is allowed."""
    is_in_reward: bool = False
    entropy: float = 0.0
    """The weight of the entropy."""
    name: str = ""
    """The name that a person gives these rules."""
    teaching: Teaching | None = None
    judging: Judging | None = None


@dataclasses.dataclass(frozen=True)
class Update:
    """The results of one update; means are over tokens."""

    loss: float
    gradients: Tensors
    """The gradients before they are clipped."""
    gradient_norm: float
    num_tokens: int
    means: dict[str, float]
    per_token: Tensors
    """The values that the means are taken over, and the loss."""
    num_clipped: int
    """Tokens whose gradient the clipping sets to zero."""
    margin: float
    """The distance of the nearest ratio from a bound of the clipping or of the truncation."""


@dataclasses.dataclass(frozen=True)
class _Padded:
    """Rows of parts of responses, and what is known of each response's tokens."""

    ids_RL: torch.Tensor
    attention_RL: torch.Tensor
    row_BL: torch.Tensor
    column_BL: torch.Tensor
    """The row and the place in it where each token of prompt and response is predicted."""
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
        stir: int | None = None,
        start: "Twin | None" = None,
    ):
        """Make the models; `stir` draws which of their weights move, each to a neighbour in its precision.

        `start` is a twin of the same models, groups and precision: the frozen models' log-probs are the same by all
        rules with one temperature.
        """
        self.rules = rules
        self._dtype = dtype
        self._draws = None if stir is None else torch.Generator().manual_seed(stir)
        self._policy = self._load(policy)
        self._batches = [_pad(groups, dtype, rules) for groups in updates]
        self._critic, self._score, self._expected = None, torch.zeros(0), []
        if rules.judging is not None:
            if (folder := rules.judging.folder) is None:
                score = rules.judging.draw_score(self._policy.config.hidden_size)
            else:
                self._critic = self._load(folder)
                score = load_file(folder / "model.safetensors")["score.weight"]
            self._score = torch.nn.Parameter(score.to(dtype))
            with torch.no_grad():
                self._expected = [self._values(batch) for batch in self._batches]
        self._taught = []
        if rules.teaching is not None:
            self._taught = self._teach(rules.teaching, updates)
        if start is not None:
            assert start.rules.temperature == rules.temperature
            self._old, self._reference = start._old, start._reference
            return
        # The old policy is the one that the iteration starts with, whatever the updates change.
        self._old = [self._log_probs(self._policy, batch)[0] for batch in self._batches]
        frozen = self._load(reference)
        self._reference = [self._log_probs(frozen, batch)[0] for batch in self._batches]

    def _teach(self, teaching: Teaching, updates: Sequence[Sequence[Group]]) -> list[tuple[torch.Tensor, ...]]:
        """Return the teachers' results of each update, those of every second group by the other one."""
        folders = [teaching.folder] if teaching.other is None else [teaching.folder, teaching.other]
        of_teachers = []
        for folder in folders:
            teacher = self._load(folder)
            of_teachers.append([self._log_probs(teacher, batch) for batch in self._batches])
        numbers, taught = itertools.count(), []
        for groups, *results in zip(updates, *of_teachers, strict=True):
            choice_B = torch.tensor(
                [number % len(folders) for group in groups for number in [next(numbers)] * len(group.responses)]
            )
            taught.append(
                tuple(
                    torch.stack(values)[choice_B, torch.arange(len(choice_B))] for values in zip(*results, strict=True)
                )
            )
        return taught

    def load(self, weights: Tensors) -> None:
        """Continue from these weights."""
        of_critic = {name.removeprefix(CRITIC): one for name, one in weights.items() if name.startswith(CRITIC)}
        self._policy.load_state_dict({name: one for name, one in weights.items() if not name.startswith(CRITIC)})
        self._stir(self._policy)
        if self.rules.judging is not None:
            self._score.data.copy_(of_critic.pop("score.weight"))
        if self._critic is not None:
            self._critic.load_state_dict(of_critic, strict=False)
            self._stir(self._critic)

    def step(self) -> Tensors:
        """Clip the last gradients and follow them, without momentum; return the weights."""
        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self.rules.clip_norm)
        torch.optim.SGD(self._policy.parameters(), lr=self.rules.learning_rate).step()
        if self.rules.judging is not None:
            of_critic = [value for name, value in self._named_parameters() if name.startswith(CRITIC)]
            torch.nn.utils.clip_grad_norm_(of_critic, self.rules.clip_norm)
            torch.optim.SGD(of_critic, lr=self.rules.judging.learning_rate).step()
        return {name: value.detach().clone() for name, value in self._named_parameters()}

    def _named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """List what has gradients; the critic's language model has an output layer that has none."""
        named = list(self._policy.named_parameters())
        if self.rules.judging is not None:
            of_body = () if self._critic is None else self._critic.named_parameters()
            others = [*of_body, ("score.weight", self._score)]
            named += [(CRITIC + name, value) for name, value in others if name != "lm_head.weight"]
        return named

    def _values(self, batch: _Padded) -> torch.Tensor:
        """Return the critic's value of each token: of what stands before it."""
        judge = self._policy if self._critic is None else self._critic
        with everything_in(self._dtype):
            body = judge.model(input_ids=batch.ids_RL, attention_mask=batch.attention_RL)
            value_RL = (body.last_hidden_state @ self._score.T)[:, :-1, 0]
        return torch.nn.functional.pad(value_RL, (1, 0))[batch.row_BL, batch.column_BL]

    def update(self, number: int) -> Update:
        """Compute the loss of an update and its gradients, at the present weights."""
        rules, batch, old_BL = self.rules, self._batches[number], self._old[number]
        mask_BL = batch.is_response_BL
        for _, value in self._named_parameters():
            value.grad = None
        logp_BL, entropy_BL, all_BLV = self._log_probs(self._policy, batch, with_gradients=True)
        ratio_BL = torch.exp(logp_BL - old_BL)
        advantage_BL = batch.advantages_B1.expand_as(ratio_BL)
        if rules.is_in_reward:
            kl_BL = _divergence(rules.estimator, old_BL - self._reference[number], torch.ones_like(old_BL))
            to_come_BL = torch.where(mask_BL, kl_BL, 0.0).flip(1).cumsum(1).flip(1)
            advantage_BL = advantage_BL - rules.beta * to_come_BL
        else:
            kl_BL = _divergence(rules.estimator, logp_BL - self._reference[number], ratio_BL)
        critic_BL = torch.zeros_like(logp_BL)
        if rules.judging is not None:
            value_BL, old_value_BL = self._values(batch), self._expected[number]
            advantage_BL, target_BL = _estimate(rules.judging, batch.advantages_B1, old_value_BL, mask_BL)
            critic_BL = (value_BL - target_BL) ** 2 / 2
            if (clip := rules.judging.clip) is not None:
                bounded_BL = torch.clamp(value_BL, old_value_BL - clip, old_value_BL + clip)
                critic_BL = torch.maximum(critic_BL, (bounded_BL - target_BL) ** 2 / 2)
        teacher_BL, teaching = torch.zeros_like(logp_BL), rules.teaching
        if teaching is not None and teaching.divergence == "sampled":
            teacher_BL = old_BL - self._taught[number][0]
            to_come_BL = _discount(torch.where(mask_BL, teacher_BL, 0.0), mask_BL, teaching.discount)
            advantage_BL = advantage_BL - teaching.coef * to_come_BL
        elif teaching is not None:
            teacher_BL = _diverge(teaching, all_BLV, self._taught[number][2])
        if rules.loss == "gspo":
            # The sequence's ratio, as its authors write it for tokens with advantages of their own.
            mean_BL = _mean_of_responses(logp_BL - old_BL, mask_BL)
            ratio_BL = torch.exp(mean_BL.detach() + logp_BL - logp_BL.detach())
        token_BL, edges, found = _lose(rules, ratio_BL, advantage_BL, logp_BL)
        correction_BL, more = _weigh(rules, old_BL - batch.engine_BL, mask_BL)
        loss_BL = token_BL * correction_BL
        if not rules.is_in_reward:
            loss_BL = loss_BL + rules.beta * kl_BL
        loss_BL = loss_BL - rules.entropy * entropy_BL
        if teaching is not None and teaching.divergence != "sampled":
            loss_BL = loss_BL + teaching.coef * teacher_BL
        if rules.judging is not None:
            loss_BL = loss_BL + rules.judging.coef * critic_BL
        deviation = self._deviation(advantage_BL, mask_BL)
        loss = self._aggregate(loss_BL, mask_BL) / deviation
        loss.backward()
        gradients = {name: value.grad.clone() for name, value in self._named_parameters()}
        with torch.no_grad():
            away_BL = old_BL - batch.engine_BL
            bounds = [*((ratio_BL, edge) for edge in edges), *more]
            found |= {
                "loss": loss_BL / deviation,
                "ratio": ratio_BL,
                "kl": kl_BL,
                "teacher_kl": teacher_BL,
                "critic.loss": critic_BL,
                "entropy_policy": entropy_BL,
                "entropy": -old_BL,
                "mismatch": away_BL.abs(),
                "mismatch_kl": torch.exp(away_BL) - away_BL - 1,
            }
            per_token = {name: value[mask_BL].to(self._dtype) for name, value in found.items()}
        return Update(
            loss=loss.item(),
            gradients=gradients,
            gradient_norm=torch.stack(
                [value.double().norm() for name, value in gradients.items() if not name.startswith(CRITIC)]
            )
            .norm()
            .item(),
            num_tokens=int(mask_BL.sum()),
            means={name: value.double().mean().item() for name, value in per_token.items()},
            per_token=per_token,
            num_clipped=int(sum(value.sum() for name, value in per_token.items() if name.startswith("clipped"))),
            margin=min(
                ((value_BL - bound)[mask_BL].abs().min().item() for value_BL, bound in bounds), default=math.inf
            ),
        )

    def _load(self, folder: Path) -> torch.nn.Module:
        with everything_in(self._dtype):
            model = hf_models.load(folder, self._dtype)
        self._stir(model)
        return model

    @torch.no_grad()
    def _stir(self, model: torch.nn.Module) -> None:
        """Move a twelfth of the weights by a unit in their last place: on average as far as rounding moves a value."""
        if self._draws is None:
            return
        for weight in model.parameters():
            drawn = torch.rand(weight.shape, generator=self._draws)
            upwards = torch.where(drawn < 1 / 24, torch.inf, weight)
            weight.copy_(torch.nextafter(weight, torch.where(drawn > 1 - 1 / 24, -torch.inf, upwards)))

    def _log_probs(
        self, model: torch.nn.Module, batch: _Padded, with_gradients: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probs, entropies, and the log-probs of all tokens."""
        lengths_R = batch.attention_RL.sum(1)
        order_R = lengths_R.argsort()
        parts = []
        with torch.set_grad_enabled(with_gradients), everything_in(self._dtype):
            # Rows of about one length together, so that there is little padding.
            for rows in order_R.split(_ROWS):
                length = int(lengths_R[rows].max())
                ids_RL, attention_RL = (values_RL[rows, :length] for values_RL in (batch.ids_RL, batch.attention_RL))
                found = log_probs_and_entropies(model, ids_RL, attention_RL, self.rules.temperature)
                missing = batch.ids_RL.shape[1] - length
                parts.append([_pad_end(values, missing) for values in found])
        place = order_R.argsort()[batch.row_BL], batch.column_BL
        log_probs_BL, entropies_BL, all_BLV = (torch.cat(values)[place] for values in zip(*parts, strict=True))
        return log_probs_BL, entropies_BL, all_BLV

    def _deviation(self, advantage_BL: torch.Tensor, mask_BL: torch.Tensor) -> float:
        """Return the divisor of all advantages of an update if it is common to them: over tokens, or over responses."""
        squares_BL = torch.where(mask_BL, advantage_BL.double() ** 2, 0.0)
        if self.rules.advantage in ("batch", "global"):
            return float((squares_BL.sum() / mask_BL.sum()).sqrt()) + 1e-6
        if self.rules.advantage == "gdpo":
            return float((squares_BL.sum(1) / mask_BL.sum(1)).mean().sqrt()) + 1e-6
        return 1.0

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
    """Return the log-prob of each token given those before it, at the temperature; zero for each sequence's first."""
    return log_probs_and_entropies(model, ids_BL, attention_BL, temperature)[0]


def log_probs_and_entropies(
    model: torch.nn.Module, ids_BL: torch.Tensor, attention_BL: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return these log-probs, and the entropy and the log-probs of the distribution that each token was drawn from."""
    logits_BLV = model(input_ids=ids_BL, attention_mask=attention_BL).logits[:, :-1] / temperature
    all_BLV = logits_BLV.log_softmax(-1)
    chosen_BL = all_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
    entropy_BL = -(all_BLV.exp() * all_BLV).sum(-1)
    pad = torch.nn.functional.pad
    return pad(chosen_BL, (1, 0)), pad(entropy_BL, (1, 0)), pad(all_BLV, (0, 0, 1, 0))


def _pad_end(values: torch.Tensor, missing: int) -> torch.Tensor:
    """Pad rows at their end; each place has one value, or one for each token of the vocabulary."""
    return torch.nn.functional.pad(values, (0, 0) * (values.dim() - 2) + (0, missing))


def _estimate(
    judging: Judging, reward_B1: torch.Tensor, value_BL: torch.Tensor, mask_BL: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and what the critic learns, by the recursion over the tokens of each response."""
    advantage_BL, target_BL = torch.zeros_like(value_BL), torch.zeros_like(value_BL)
    for row, of_response in enumerate(mask_BL):
        places = of_response.nonzero()[:, 0].tolist()
        decay = judging.decay
        if judging.alpha is not None:
            decay = max(0.0, 1 - 1 / (judging.alpha * max(1, len(places))))
        after, advantage, surplus = 0.0, 0.0, 0.0
        for number, place in enumerate(reversed(places)):
            value = value_BL[row, place]
            delta = (reward_B1[row, 0] if number == 0 else 0.0) + judging.discount * after - value
            advantage = delta + judging.discount * decay * advantage
            surplus = delta + judging.discount * judging.own_decay * surplus
            advantage_BL[row, place], target_BL[row, place] = advantage, surplus + value
            after = value
    return advantage_BL, target_BL


def _discount(values_BL: torch.Tensor, mask_BL: torch.Tensor, discount: float) -> torch.Tensor:
    """Return the sum of each token's value and the later ones, which count less with each token between."""
    sum_B, sums = torch.zeros_like(values_BL[:, 0]), []
    for value_B, is_token_B in zip(values_BL.unbind(1)[::-1], mask_BL.unbind(1)[::-1], strict=True):
        sum_B = torch.where(is_token_B, value_B + discount * sum_B, sum_B)
        sums.append(sum_B)
    return torch.stack(sums[::-1], dim=1)


def _diverge(teaching: Teaching, p_BLV: torch.Tensor, q_BLV: torch.Tensor) -> torch.Tensor:
    """Return the divergence of log-probs p from the teacher's, q."""
    if teaching.top_k is not None:
        most_BLK = q_BLV.topk(teaching.top_k).indices
        p_BLV, q_BLV = (_lump(log_probs_BLV, most_BLK) for log_probs_BLV in (p_BLV, q_BLV))
    p, q, share = p_BLV.exp(), q_BLV.exp(), teaching.mixture
    if teaching.divergence == "reverse":
        return (p * (p_BLV - q_BLV)).sum(-1)
    if teaching.divergence == "forward":
        return (q * (q_BLV - p_BLV)).sum(-1)
    assert teaching.divergence == "jsd"
    log_m = (share * q + (1 - share) * p).log()
    return (share * q * (q_BLV - log_m) + (1 - share) * p * (p_BLV - log_m)).sum(-1)


def _lump(log_probs_BLV: torch.Tensor, kept_BLK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of these tokens, and the log-prob of all others together."""
    others_BLV = log_probs_BLV.scatter(-1, kept_BLK, -torch.inf)
    return torch.cat((log_probs_BLV.gather(-1, kept_BLK), others_BLV.logsumexp(-1, keepdim=True)), dim=-1)


def responses_log_probs(folder: Path, groups: Sequence[Group], temperature: float) -> list[list[list[float]]]:
    """Return the log-prob of each token of each response, one sequence at a time, as lists."""
    model = hf_models.load(folder)

    def of(group: Group, number: int) -> list[float]:
        whole = torch.tensor(group.prompt + group.responses[number])
        found = torch.zeros(len(whole))
        for path in group.list_paths(number):
            ids_1L = whole[path][None]
            own = log_probs(model, ids_1L, torch.ones_like(ids_1L), temperature)[0]
            # A later part is the last that has its tokens; what it shares is what it was.
            found[path] = own
        return found[len(group.prompt) :].tolist()

    with torch.no_grad():
        return [[of(group, number) for number in range(len(group.responses))] for group in groups]


def _divergence(name: str, away: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Return a token's divergence, from the policy's log-prob less the reference's."""
    value = {
        "k1": lambda: away,
        "k2": lambda: away**2 / 2,
        "k3": lambda: torch.exp(-away) - 1 + away,
        # The gradient of half the square is the distance times its own.
        "k3+": lambda: (torch.exp(-away) - 1 + away).detach() + away.detach() * (away - away.detach()),
        "unbiased": lambda: ratio * (torch.exp(-away) - 1 + away),
    }
    return value[name]()


def _mean_of_responses(value_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_BL, value_BL, 0.0).sum(1, keepdim=True) / mask_BL.sum(1, keepdim=True)


def _lose(
    rules: Rules, ratio_BL: torch.Tensor, advantage_BL: torch.Tensor, logp_BL: torch.Tensor
) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    """Return the losses of tokens, the ratios at which they change, and which tokens lie beyond those."""
    low, high = 1 - rules.lower, 1 + rules.upper
    good_BL, bad_BL = advantage_BL > 0, advantage_BL < 0
    if rules.loss in ("clip", "gspo"):
        gain_BL = torch.minimum(ratio_BL * advantage_BL, torch.clamp(ratio_BL, low, high) * advantage_BL)
        found = {"clipped_low": bad_BL & (ratio_BL < low), "clipped_high": good_BL & (ratio_BL > high)}
        if rules.dual is None:
            return -gain_BL, [low, high], found
        found["clipped_dual"] = bad_BL & (ratio_BL > rules.dual)
        least_BL = torch.maximum(gain_BL, rules.dual * advantage_BL)
        return -torch.where(bad_BL, least_BL, gain_BL), [low, high, rules.dual], found
    if rules.loss == "cispo":
        weight_BL = torch.clamp(ratio_BL, low, high).detach()
        found = {"clipped_low": ratio_BL < low, "clipped_high": ratio_BL > high}
        return -weight_BL * advantage_BL * logp_BL, [low, high], found
    if rules.loss == "sapo":
        gate_BL = torch.where(good_BL, *(torch.tensor(gate, dtype=ratio_BL.dtype) for gate in rules.gates))
        return -4 / gate_BL * advantage_BL / (1 + torch.exp(gate_BL - gate_BL * ratio_BL)), [], {}
    if rules.loss == "dppo":
        moved_BL = (torch.exp(logp_BL) * (1 - 1 / ratio_BL)).detach()
        found = {
            "clipped_low": bad_BL & (moved_BL < -rules.region),
            "clipped_high": good_BL & (moved_BL > rules.region),
        }
        is_out_BL = found["clipped_low"] | found["clipped_high"]
        return -torch.where(is_out_BL, 0.0, ratio_BL) * advantage_BL, [], found
    assert rules.loss == "reinforce"
    return -advantage_BL * logp_BL, [], {}


def _weigh(
    rules: Rules, away_BL: torch.Tensor, mask_BL: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, float]]]:
    """Return the weights of tokens, and the values that must not lie at a bound."""
    mean_BL = _mean_of_responses(away_BL, mask_BL)
    log_BL = {
        "token": away_BL, "geometric": mean_BL, "sequence": mean_BL * mask_BL.sum(1, keepdim=True)
    }[rules.level].expand_as(away_BL)  # fmt: skip
    weight_BL, kept_BL = torch.exp(log_BL), torch.exp(mean_BL).expand_as(away_BL)
    bounds = [(kept_BL, bound) for bound in (rules.least_kept, rules.most_kept)]
    is_kept_BL = (kept_BL >= rules.least_kept) & (kept_BL <= rules.most_kept)
    if not rules.is_corrected:
        return is_kept_BL.to(away_BL.dtype), bounds
    bounds += [(weight_BL, bound) for bound in (rules.least_weight, rules.truncation)]
    is_inside_BL = (weight_BL >= rules.least_weight) & (weight_BL <= rules.truncation)
    bounded_BL = weight_BL.clamp(rules.least_weight, rules.truncation)
    used_BL = torch.where(is_inside_BL, weight_BL, 0.0) if rules.is_masked else bounded_BL
    return used_BL * is_kept_BL, bounds


def _advantages(group: Group, rules: Rules) -> torch.Tensor:
    name = rules.advantage
    if name == "gdpo":
        total = torch.zeros(len(group.responses), dtype=torch.float64)
        for of, weight in WEIGHTS.items():
            for number, value in enumerate(group.components[of]):
                if value is not None:
                    others = torch.tensor([v for v in group.components[of] if v is not None], dtype=torch.float64)
                    total[number] += weight * (value - others.mean()) / (others.std(correction=0) + 1e-6)
        return total
    rewards = torch.tensor(group.rewards, dtype=torch.float64)
    if rules.baseline is not None:
        return rewards - rules.baseline
    away = rewards - rewards.mean()
    if name == "grpo":
        return away / ((away**2).mean().sqrt() + 1e-6)
    if name == "gae":
        return rewards
    if name == "rloo":
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        return rewards - others
    assert name in ("mean", "batch")
    return away


def _pad(groups: Sequence[Group], dtype: torch.dtype, rules: Rules) -> _Padded:
    """Lay out a row for each part of a response, after a copy of all that it follows; the padding is masked."""
    length = max(len(group.prompt) + len(response) for group in groups for response in group.responses)
    ids, attention, rows, columns, is_response, engine, advantages = [], [], [], [], [], [], []
    for group in groups:
        for number, response in enumerate(group.responses):
            whole = group.prompt + response
            row_of, column_of = [0] * length, [0] * length
            for path in group.list_paths(number):
                for column, place in enumerate(path):
                    row_of[place], column_of[place] = len(ids), column
                ids.append([whole[place] for place in path] + [0] * (length - len(path)))
                attention.append([1] * len(path) + [0] * (length - len(path)))
            rows.append(row_of)
            columns.append(column_of)
            before, after = len(group.prompt), length - len(whole)
            is_response.append([False] * before + group.list_sampled(number) + [False] * after)
            engine.append([0.0] * before + group.engine[number] + [0.0] * after)
        advantages += _advantages(group, rules).tolist()
    return _Padded(
        torch.tensor(ids),
        torch.tensor(attention),
        torch.tensor(rows),
        torch.tensor(columns),
        torch.tensor(is_response),
        torch.tensor(engine, dtype=dtype),
        torch.tensor(advantages, dtype=dtype)[:, None],
    )
