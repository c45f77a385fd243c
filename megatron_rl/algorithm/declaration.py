"""The objects that declare an algorithm (a paper with the losses, advantages and names that it brings), and a role.

Flags, checks and the tables of docs/algorithms.md are derived from these objects. Nothing here imports torch, because
flags are known without it: a loss computes with the methods of the tensors that it is given.

Letters: N targets, K responses of a group, P pairs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_rl.types import Divergence

if TYPE_CHECKING:
    import numpy as np
    import torch

    from megatron_rl.algorithm.sequences import Sequences

POLICY, OLD = "policy", "old"
"""The names of the policy, and of the policy that sampled."""
CRITIC, OLD_CRITIC = "critic", "old_critic"
"""The names of the critic, and of the critic at the start of an iteration."""
HEAD = "head"
"""The value of --critic for a critic that is a layer on the policy."""


def find_role(model: str) -> str:
    """Return the role of a model by the model's name, which is ROLE.NAME if groups choose one of several."""
    return model.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Paper:
    """Where the formulas come from."""

    title: str
    url: str

    @property
    def link(self) -> str:
        return f"[{self.title}]({self.url})"


@dataclasses.dataclass(frozen=True)
class RoleLogProbs:
    """The results of the roles for a micro-batch's targets; the policy's have gradients."""

    policy_N: "torch.Tensor"
    old_N: "torch.Tensor"
    """Log-probs under the policy that sampled; if it is the policy itself, the policy's own, without gradients."""
    others: "Mapping[str, torch.Tensor]" = dataclasses.field(default_factory=dict)
    """Log-probs under the other roles, by their names; the policy's divergence from roles that declare one; values of
    critics, of which the one that is trained has gradients."""
    entropies_N: "torch.Tensor | None" = None
    """The entropies of the policy's distributions, with gradients."""
    is_of_model_N: "Mapping[str, torch.Tensor]" = dataclasses.field(default_factory=dict)
    """The targets of each model, where groups choose one of several, by the models' names."""
    rewards_N: "torch.Tensor | None" = None
    """The rewards of targets, each at the end of what it is for; None without a critic."""


@dataclasses.dataclass(frozen=True)
class Term:
    """The part of a role in a micro-batch's loss."""

    advantages_N: "torch.Tensor | None" = None
    """The part that is added to each target's advantage."""
    loss_N: "torch.Tensor | None" = None
    """The part that is added to each target's loss."""
    sums: "Mapping[str, torch.Tensor]" = dataclasses.field(default_factory=dict)
    """Sums over the targets, of which metrics are means."""


@dataclasses.dataclass(frozen=True)
class LossRole:
    """A role of models besides the policy and the old policy."""

    name: str
    """Its name in metrics, traces and checkpoints."""
    is_used: Callable[[Any], bool]
    """Checks whether a run with these settings (an AlgorithmConfig) has the role."""
    compute: "Callable[[RoleLogProbs, Sequences, Any], Term]"
    """Computes the role's part in the loss from the roles' results and the settings."""
    find_divergence: Callable[[Any], Divergence | None] = lambda config: None
    """Returns the divergence that the settings need in place of the log-probs of targets; None if they need these."""
    flag: str = ""
    """The flag that names the folders of its models."""
    find_models: Callable[[Any], Mapping[str, Path]] = lambda config: {}
    """Returns the folders of its models, if these are frozen and have architectures of their own, by their names."""


@dataclasses.dataclass(frozen=True)
class Targets:
    """The known values of a micro-batch's targets, from which a loss or a metric is computed."""

    policy_N: "torch.Tensor"
    """Log-probs under the policy that is trained, with gradients."""
    old_N: "torch.Tensor"
    """Log-probs under the policy that sampled, as the trainer computes them."""
    advantages_N: "torch.Tensor"
    sequences: "Sequences"
    """The response of each target, and sums over responses."""
    engine_N: "torch.Tensor | None" = None
    """Log-probs under the policy that sampled, as the engine gave them."""
    others: "Mapping[str, torch.Tensor]" = dataclasses.field(default_factory=dict)
    """Log-probs under the run's other roles, by their names, or the policy's divergence from them."""

    @property
    def reference_N(self) -> "torch.Tensor | None":
        """Return the log-probs under the reference, with `--grpo-kl-beta`; None without it."""
        return self.others.get("reference")

    @property
    def ratio_N(self) -> "torch.Tensor":
        """Return the policy's probability of each token over that of the policy that sampled it."""
        return (self.policy_N - self.old_N).exp()


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """The losses of targets, and the targets whose gradient a bound ends."""

    loss_N: "torch.Tensor"
    ratio_N: "torch.Tensor"
    is_low_N: "torch.Tensor | None" = None
    """Bad tokens that have become unlikely enough."""
    is_high_N: "torch.Tensor | None" = None
    """Good tokens that have become likely enough; for CISPO, those whose weight is bounded."""
    is_dual_N: "torch.Tensor | None" = None
    """Bad tokens that have become much likelier."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a token, for `--grpo-loss`."""

    name: str
    formula: str
    """The formula in the letters of docs/algorithms.md, for its table."""
    compute: Callable[[Targets, Any], Surrogate]
    """Computes the losses of targets from the targets and the settings (an AlgorithmConfig)."""
    remark: str = ""
    """The second cell of the table."""
    reads: tuple[str, ...] = ()
    """The settings that the loss reads: fields of AlgorithmConfig. With other losses their flags are refused."""


@dataclasses.dataclass(frozen=True)
class ScoredGroup:
    """The rewards of a whole group, in float64."""

    rewards_K: "np.ndarray"
    """The weighted sums, within `--grpo-reward-min` and `--grpo-reward-max`."""
    components: "Mapping[str, np.ndarray]"
    """The values of each reward function; NaN where a function does not apply."""
    weights: Mapping[str, float]
    """The weights of the reward functions."""
    baseline: float | None
    """The mean reward of the iteration before; None in the first one."""


@dataclasses.dataclass(frozen=True)
class Advantage:
    """The advantages of a group's responses, for `--grpo-advantage`."""

    name: str
    formula: str
    compute: "Callable[[ScoredGroup, Any], np.ndarray]"
    """Computes the advantages, in float64, from the group and the settings (an AlgorithmConfig)."""
    divided_over: Literal["token", "sequence"] | None = None
    """The unit that counts once in the deviation of the advantages over the update, if that divides the whole loss.

    As in the papers, each token or each response; as in `--grpo-aggregation`. The deviation is known once all groups of
    the update have arrived, so the division comes at the end.
    """
    takes_baseline: bool = False
    """The mean reward of the iteration before is taken off, so groups of equal rewards have advantages too."""
    takes_components: bool = False
    """The reward functions count one by one, not by their weighted sum."""
    compares: bool = True
    """Responses are compared with the others of their group, which must have others."""
    takes_critic: bool = False
    """The results are rewards, of which the critic makes advantages."""


@dataclasses.dataclass(frozen=True)
class Preset:
    """The flags that `--algorithm NAME` sets."""

    name: str
    settings: Mapping[str, Any]
    """Values of fields of AlgorithmConfig.

    The weight of a divergence is not among them, nor are sizes: papers choose both for their models.
    """
    remark: str = ""
    """Words for the table, after the paper."""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The log-probs of the responses of pairs, less the reference's where the loss has one; and their lengths."""

    chosen_P: "torch.Tensor"
    rejected_P: "torch.Tensor"
    chosen_lengths_P: "torch.Tensor"
    rejected_lengths_P: "torch.Tensor"
    strangers: "torch.Tensor"
    """The same log-probs of the responses to other prompts, as if to these, where the loss reads them."""

    @property
    def margin_P(self) -> "torch.Tensor":
        return self.chosen_P - self.rejected_P

    @property
    def mean_margin_P(self) -> "torch.Tensor":
        """Return the margin of the means over the tokens of each response."""
        return self.chosen_P / self.chosen_lengths_P - self.rejected_P / self.rejected_lengths_P


@dataclasses.dataclass(frozen=True)
class Preference:
    """The loss of a pair of responses, of which the first was chosen, for `--dpo-loss-type`."""

    name: str
    formula: str
    compute: "Callable[[Pairs, Any], torch.Tensor]"
    """Computes the losses of pairs from the pairs and the settings (a PreferenceConfig)."""
    has_reference: bool = True
    reads_strangers: bool = False
    """True if the loss also reads the responses to another prompt, as if they were to this one."""
    reads: tuple[str, ...] = ()
    """The settings besides `beta` that the loss reads. With other losses their flags are refused."""

    @property
    def num_responses(self) -> int:
        """The number of responses that are computed for a pair."""
        return 4 if self.reads_strangers else 2


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """A paper with all that it brings; one file of `algorithm/library` declares one."""

    paper: Paper
    losses: tuple[Loss, ...] = ()
    advantages: tuple[Advantage, ...] = ()
    presets: tuple[Preset, ...] = ()
    preferences: tuple[Preference, ...] = ()
