"""The groups that an independent GRPO step and the trainer both learn from, and the ways of computing that step.

Ranks read this before their platform is installed: nothing here imports megatron.
"""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from tests import grpo_twin, hf_models
from tests.grpo_twin import Group, Rules

GROUP_SIZE, GROUPS_PER_UPDATE, NUM_UPDATES = 4, 6, 2
LONGEST_PROMPT, LONGEST_RESPONSE = 38, 40
PLAIN = Rules(
    temperature=0.7, lower=0.1, upper=0.15, beta=0.1, aggregation="token", max_tokens=LONGEST_RESPONSE,
    learning_rate=0.25, clip_norm=0.5,
)  # fmt: skip
TRUNCATED = dataclasses.replace(PLAIN, is_corrected=True, truncation=1.1)
SEQUENCE = dataclasses.replace(TRUNCATED, aggregation="sequence")
CONSTANT = dataclasses.replace(PLAIN, is_corrected=True, aggregation="constant")
# Objectives that have a name, with narrow bounds, so that ratios reach them.
KNOWN = {
    rules.name: rules
    for rules in (
        dataclasses.replace(PLAIN, name="grpo", aggregation="sequence", estimator="unbiased"),
        dataclasses.replace(PLAIN, name="dr_grpo", aggregation="constant", advantage="mean", beta=0.1, estimator="k2"),
        dataclasses.replace(
            PLAIN, name="dapo", entropy=0.3, upper=0.3, is_corrected=True, truncation=1.1, level="geometric",
        ),
        dataclasses.replace(
            PLAIN, name="gspo", loss="gspo", lower=0.02, upper=0.03, aggregation="sequence", is_corrected=True,
            truncation=1.3, least_weight=0.8, level="sequence", is_masked=True,
        ),
        dataclasses.replace(
            PLAIN, name="rloo", loss="reinforce", advantage="rloo", aggregation="constant", is_in_reward=True,
            estimator="k1",
        ),
        dataclasses.replace(
            PLAIN, name="reinforce_plus_plus_baseline", advantage="batch", is_in_reward=True, estimator="k1",
            is_corrected=True, truncation=1.1, least_weight=0.9, is_masked=True,
        ),
        dataclasses.replace(
            PLAIN, name="reinforce_plus_plus", advantage="global", baseline=0.3, is_in_reward=True, estimator="k1",
            is_corrected=True,
        ),
        dataclasses.replace(
            PLAIN, name="gdpo", advantage="gdpo", is_in_reward=True, estimator="k1", is_corrected=True, truncation=1.1,
        ),
        dataclasses.replace(
            PLAIN, name="cispo", loss="cispo", lower=0.1, upper=0.15, estimator="k3+", least_kept=0.98, most_kept=1.02,
        ),
        dataclasses.replace(PLAIN, name="sapo", loss="sapo", aggregation="sequence", gates=(1.0, 1.4)),
        dataclasses.replace(PLAIN, name="dppo", loss="dppo", region=0.001),
        dataclasses.replace(PLAIN, name="ppo_clip", advantage="mean", dual=1.2, entropy=0.1),
    )
}  # fmt: skip
SGD = f"--optimizer sgd --sgd-momentum 0 --lr {PLAIN.learning_rate}"
# For the distributed optimizer, which Adam alone has. Its first step moves every weight by the rate.
ADAM = "--use-distributed-optimizer --lr 0.002"
OVERLAPPED = f"{ADAM} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"


@dataclasses.dataclass(frozen=True)
class Problem:
    """The groups and models that a step learns from."""

    policy: Path
    reference: Path
    updates: list[list[Group]]

    def divided(self, num_updates: int) -> "Problem":
        """Divide the same groups into `num_updates` updates."""
        groups = list(itertools.chain.from_iterable(self.updates))
        size = len(groups) // num_updates
        updates = [groups[first : first + size] for first in range(0, len(groups), size)]
        return dataclasses.replace(self, updates=updates)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way of computing the step."""

    layout: str
    micro_batch_size: int
    rules: Rules = TRUNCATED
    optimizer: str = SGD
    """The flags of the optimizer."""
    fault: str | None = None
    is_shuffled: bool = False
    """A flag that makes the groups of each update come in another order than their prompts."""
    roles: str = "fused"
    attention: str = ""
    """The flags of attention."""
    num_updates: int = NUM_UPDATES
    more: str = ""
    """Further flags."""

    def __str__(self) -> str:
        rules = self.rules
        correction = f" corrected to {rules.truncation}" if rules.is_corrected else ""
        words = [f"{self.layout} by {self.micro_batch_size}", f"{rules.aggregation}{correction}"]
        words += [rules.name] if rules.name else []
        words += [self.optimizer] if self.optimizer != SGD else []
        words += [self.fault] if self.fault is not None else []
        words += [self.roles] if self.roles != "fused" else []
        words += [self.attention] if self.attention else []
        words += [self.more] if self.more else []
        words += [f"{self.num_updates} updates"] if self.num_updates != NUM_UPDATES else []
        return ", ".join(words + ["shuffled"] * self.is_shuffled)

    @property
    def words(self) -> str:
        """The flags, except those of the layout."""
        rules = self.rules
        words = (
            f"{self.optimizer} --weight-decay 0 --lr-decay-style constant --clip-grad {rules.clip_norm} "
            f"--train-iters 1 --grpo-group-size {GROUP_SIZE} --micro-batch-size {self.micro_batch_size} "
            f"--grpo-prompts-per-step {GROUPS_PER_UPDATE * NUM_UPDATES} "
            f"--global-batch-size {GROUP_SIZE * GROUPS_PER_UPDATE * NUM_UPDATES // self.num_updates} "
            f"--seq-length {LONGEST_PROMPT + LONGEST_RESPONSE} "
            f"--rollout-max-tokens {rules.max_tokens} --rollout-temperature {rules.temperature} "
            f"--grpo-kl-beta {rules.beta} "
            f"--grpo-aggregation {rules.aggregation} --tri-model {self.roles} {self.attention} {self.more}"
        )
        words += f" --grpo-advantage {rules.advantage} --grpo-loss {rules.loss}"
        for flag, is_given in (
            ("--rl-inference-logprobs-is-correction", rules.is_corrected),
            (f"--rl-importance-sampling-truncation-coef {rules.truncation}", rules.truncation < math.inf),
            (f"--grpo-correction-lower {rules.least_weight}", rules.least_weight > 0),
            (f"--grpo-correction-level {rules.level}", rules.level != "token"),
            ("--grpo-correction-mode mask", rules.is_masked),
            (f"--grpo-reject-below {rules.least_kept}", rules.least_kept > 0),
            (f"--grpo-reject-above {rules.most_kept}", rules.most_kept < math.inf),
            (f"--grpo-dual-clip {rules.dual}", rules.dual is not None),
            (f"--grpo-kl-estimator {rules.estimator}", rules.estimator not in ("k1", "k3")),
            ("--grpo-kl-in reward", rules.is_in_reward),
            ("--reward exact length:8=-0.5", rules.advantage == "gdpo"),
            (f"--grpo-entropy-coef {rules.entropy}", rules.entropy > 0),
            (
                f"--grpo-clamp-eps-lower {rules.lower} --grpo-clamp-eps-upper {rules.upper}",
                rules.loss in ("clip", "gspo", "cispo"),
            ),
            (f"--dppo-divergence {rules.region}", rules.loss == "dppo"),
            (f"--sapo-temperature-pos {rules.gates[0]} --sapo-temperature-neg {rules.gates[1]}", rules.loss == "sapo"),
        ):
            words += f" {flag}" * is_given
        return words + _teach(rules.teaching) + _judge(rules.judging)


def _judge(judging: grpo_twin.Judging | None) -> str:
    if judging is None:
        return ""
    words = (
        f" --critic {judging.folder or 'head'} --critic-lr {judging.learning_rate} --critic-lambda {judging.own_decay}"
    )
    words += f" --gae-discount {judging.discount}"
    words += f" --critic-clip {judging.clip}" * (judging.clip is not None)
    words += f" --critic-loss-coef {judging.coef}" * (judging.folder is None)
    return (
        f"{words} --gae-lambda {judging.decay}"
        if judging.alpha is None
        else f"{words} --gae-length-alpha {judging.alpha}"
    )


def _teach(teaching: grpo_twin.Teaching | None) -> str:
    if teaching is None:
        return ""
    folders = str(teaching.folder) if teaching.other is None else f"t0={teaching.folder} t1={teaching.other}"
    words = f" --teacher {folders} --opd-divergence {teaching.divergence} --opd-coef {teaching.coef}"
    if teaching.divergence == "sampled":
        return f"{words} --opd-discount {teaching.discount}"
    words += f" --opd-mixture {teaching.mixture}" * (teaching.divergence == "jsd")
    return words if teaching.top_k is None else f"{words} --opd-top-k {teaching.top_k}"


@dataclasses.dataclass(frozen=True)
class RoleTrial:
    """One way of running the roles, over two iterations."""

    name: str
    problem: Problem
    flags: str
    """The flags of the layout."""
    roles: str = "fused"
    beta: float = TRUNCATED.beta
    is_reference: bool = False
    """A flag that makes the policy of the first iteration's start the reference."""
    fault: str | None = None


def draw_problem(root: Path, name: str = "qwen3", has_environments: bool = False) -> Problem:
    """Draw two updates of ragged groups, a policy of the named kind and a reference unlike it.

    With `has_environments`, environments wrote parts of some responses, and some responses branch.
    """
    policy = hf_models.draw(name, root / "policy")
    groups = _draw_groups(policy, has_environments)
    updates = [groups[first : first + GROUPS_PER_UPDATE] for first in range(0, len(groups), GROUPS_PER_UPDATE)]
    return Problem(policy, _draw_reference(policy, root / "reference", name), updates)


def _draw_groups(policy: Path, has_environments: bool) -> list[Group]:
    """Draw groups, one with equal rewards in each update, from an engine that differs a little from the policy."""
    # With these seeds no ratio lies so near a bound that rounding decides.
    draw = np.random.default_rng(6 if has_environments else 5)
    drawn = []
    for number in range(GROUPS_PER_UPDATE * NUM_UPDATES):
        prompt_length = int(draw.integers(1, LONGEST_PROMPT + 1))
        ends = prompt_length + draw.integers(1, LONGEST_RESPONSE + 1, GROUP_SIZE).cumsum()
        tokens = draw.integers(0, hf_models.VOCAB_SIZE, ends[-1])
        prompt, *responses = (part.tolist() for part in np.split(tokens, [prompt_length, *ends[:-1]]))
        group = Group(prompt, responses, [], [])
        if has_environments and number % 3:
            group = _interrupt(group) if number % 3 == 1 else _fork(group)
        drawn.append(group)
    groups = []
    for number, (group, log_probs) in enumerate(
        zip(drawn, grpo_twin.responses_log_probs(policy, drawn, PLAIN.temperature), strict=True)
    ):
        is_all_equal = number % GROUPS_PER_UPDATE == 4
        rewards = [1.0] * GROUP_SIZE if is_all_equal else draw.normal(size=GROUP_SIZE).tolist()
        engine = [(np.array(values) + 0.1 * draw.normal(size=len(values))).astype("<f4") for values in log_probs]
        heard = [np.where(group.list_sampled(response), values, 0.0).tolist() for response, values in enumerate(engine)]
        groups.append(dataclasses.replace(group, rewards=rewards, engine=heard))
    return groups


def _interrupt(group: Group) -> Group:
    """Have an environment write the begin of one response, and parts of the longer ones."""
    lengths = [len(response) for response in group.responses]
    given = [
        [(0, 2)] if number == 0 and length > 2 else [(3, 7), (8, 9)] if length > 9 else []
        for number, length in enumerate(lengths)
    ]
    return dataclasses.replace(group, given=given)


def _fork(group: Group) -> Group:
    """Have the longer responses branch: within a turn, at its end, from the prompt, and from amid it.

    An environment begins all of these, and most of its words are the same.
    """
    responses, given, branches = [], [], []
    for number, response in enumerate(group.responses):
        is_long = len(response) > 16
        responses.append([1, 2, 3 + number // 3, *response[3:]] if is_long else response)
        given.append([(0, 3), (9, 10), (14, 15)] if is_long else [])
        amid = -1 if len(group.prompt) > 2 else 0
        # Of the last branch all is the policy's: it said something else in the same place.
        branches.append([(7, 5), (9, 2 if number % 2 else amid), (12, 0 if number % 2 else 11)] if is_long else [])
        given[-1] += [(12, 14)] if is_long and number % 2 else []
    return dataclasses.replace(group, responses=responses, given=given, branches=branches)


def _draw_reference(policy: Path, folder: Path, name: str) -> Path:
    """Write a reference a tenth of the way from the policy to another model.

    At a greater distance a few tokens would make up all of the divergence.
    """
    hf_models.draw(name, folder, seed=1)
    file = folder / "model.safetensors"
    near, far = load_file(policy / file.name), load_file(file)
    save_file({key: near[key].lerp(far[key], 0.1) for key in near}, file, metadata={"format": "pt"})
    return folder
