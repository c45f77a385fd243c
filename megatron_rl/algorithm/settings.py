"""The settings of the objective: one field a flag, as in `config/trainer.py`. Nothing here needs torch."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from megatron_rl.algorithm.library import ADVANTAGES, LOSSES, PRESETS, LossSettings
from megatron_rl.flag import megatron_flag, own_flag

_NAMED = re.compile(r"(?P<name>\w[\w-]*)=(?P<folder>.+)")
_SERVED = "engines:"


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(LossSettings):
    """The objective that is maximized, and the bounds of an update."""

    group_size: int = megatron_flag(
        8,
        "Responses to a prompt.",
        "--grpo-group-size",
        bound="at least 1",
    )
    prompts_per_step: int | None = megatron_flag(
        None,
        "Prompts in an iteration; one `--global-batch-size` if not given.",
        "--grpo-prompts-per-step",
        bound="at least 1",
    )
    filter_groups: bool = megatron_flag(
        False,
        "Sample other prompts in place of those whose responses all got the same reward; see `--grpo-filter-by`.",
        "--grpo-filter-groups-with-same-reward",
    )
    filter_by: str | None = own_flag(
        None,
        "The function of `--reward` whose values must differ within a group, or `sum` for the weighted sum; if not "
        "given, the first function, and with `--grpo-advantage gdpo` any of them.",
        "--grpo-filter-by",
    )
    spare_prompts: int | None = own_flag(
        None,
        "The most such prompts that an iteration may take; twice its prompts if not given.",
        "--grpo-spare-prompts",
        bound="at least 1",
    )
    kl_beta: float = megatron_flag(
        0.0,
        "The weight of the divergence (KL) from the reference.",
        "--grpo-kl-beta",
        bound="finite and at least 0",
        remedy="a negative weight would reward divergence; write 0 or more",
    )
    ref_model: Path | None = own_flag(
        None, "The Hugging Face folder of the reference; the run's first weights if not given.", "--grpo-ref-model"
    )
    ref_interval: int | None = own_flag(
        None,
        "Iterations between copies of the policy's weights into the reference; none is made if not given.",
        "--grpo-ref-interval",
        bound="at least 1",
    )
    name: str | None = own_flag(
        None,
        "An algorithm by its name: sets the flags in its row of docs/algorithms.md; each can still be written.",
        "--algorithm",
        choices=tuple(PRESETS),
    )
    advantage: str = own_flag(
        "grpo",
        "The advantages of a group's responses, from its rewards; docs/algorithms.md has the formulas, and a guide to "
        "your own.",
        "--grpo-advantage",
        choices=tuple(ADVANTAGES),
        takes_function=True,
    )
    turn_credit: bool = own_flag(
        False,
        "Give each turn of a conversation its own advantage, from the rewards of the turn and of later ones.",
        "--grpo-turn-credit",
    )
    reward_min: float = own_flag(-math.inf, "The lower bound that rewards are clipped to.", "--grpo-reward-min")
    reward_max: float = own_flag(math.inf, "The upper bound that rewards are clipped to.", "--grpo-reward-max")
    loss: str = own_flag(
        "clip",
        "The loss of a token, from its ratio and its advantage; docs/algorithms.md has the formulas, and a guide to "
        "your own.",
        "--grpo-loss",
        choices=tuple(LOSSES),
        takes_function=True,
    )
    metrics: list[str] | None = own_flag(
        None,
        "Metrics of your own, FILE.py:FUNCTION each: a value for each token, whose mean is written with the others.",
        "--grpo-metric",
        takes_function=True,
    )
    aggregation: Literal["token", "sequence", "constant"] = own_flag(
        "token",
        "The values that an update averages: its tokens, its responses' means, or its responses' sums divided by the "
        "most tokens that a response may have.",
        "--grpo-aggregation",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "unbiased"] | None = own_flag(
        None,
        "The estimator of a token's divergence; k3 in the loss and k1 in the reward if not given.",
        "--grpo-kl-estimator",
    )
    kl_in: Literal["loss", "reward"] = own_flag(
        "loss",
        "The place of the divergence: a term of the loss, or subtracted from the reward of its token and of the tokens "
        "before it.",
        "--grpo-kl-in",
    )
    teacher: list[str] | None = own_flag(
        None,
        "The Hugging Face folder of a teacher, a model of any size with the policy's vocabulary: the policy learns its "
        "distribution of the tokens that follow what the policy samples. Several are NAME=FOLDER each, and a row's "
        "column `teacher` names the one of its responses. `engines:` before a folder has a vLLM server compute it.",
        "--teacher",
    )
    roles: list[str] | None = own_flag(
        None,
        "Your roles, FILE.py:ROLE=FOLDER each: a frozen model in the pass, and its part in the loss; "
        "docs/algorithms.md has a guide.",
        "--grpo-role",
    )
    opd_coef: float = own_flag(1.0, "The weight of the divergence from the teacher.", "--opd-coef", bound="above 0")
    opd_divergence: Literal["sampled", "reverse", "forward", "jsd"] = own_flag(
        "sampled",
        "The divergence of the policy P from the teacher Q. `sampled` estimates KL(P, Q) from the sampled token, as "
        "its reward. The others are terms of the loss, over the vocabulary: KL(P, Q), KL(Q, P), and the weighted mean "
        "of both from their mixture.",
        "--opd-divergence",
    )
    opd_top_k: int | None = own_flag(
        None,
        "The teacher's likeliest tokens that count singly in a divergence over the vocabulary; all others count "
        "together, as one token. All count singly if not given.",
        "--opd-top-k",
        bound="at least 1",
    )
    opd_mixture: float = own_flag(
        0.5,
        "The teacher's weight in the mixture of `--opd-divergence jsd`, and of its divergence from the mixture.",
        "--opd-mixture",
        bound="above 0 and below 1",
    )
    opd_discount: float = own_flag(
        0.0,
        "The factor by which a sampled divergence counts in the reward of the token before it.",
        "--opd-discount",
        bound="between 0 and 1",
    )
    critic: str | None = own_flag(
        None,
        "The Hugging Face folder whose weights the critic begins with, or `policy` for those of `--hf-model`; for "
        "`--grpo-advantage gae`. Its last layer gives one number, from the folder's `score.weight` or from 0. With "
        "`head` the critic is only such a layer, on the policy's last hidden states, and its loss trains the policy "
        "too.",
        "--critic",
    )
    critic_loss_coef: float = own_flag(
        1.0, "The weight of the loss of `--critic head`.", "--critic-loss-coef", bound="above 0"
    )
    critic_lr: float | None = own_flag(
        None,
        "The critic's learning rate, with the policy's schedule; `--lr` if not given.",
        "--critic-lr",
        bound="above 0",
    )
    critic_warmup_iters: int = own_flag(
        0, "The first iterations, in which only the critic learns.", "--critic-warmup-iters", bound="at least 0"
    )
    critic_clip: float | None = own_flag(
        None,
        "The distance from the old critic's value beyond which a value's loss is not improved further.",
        "--critic-clip",
        bound="above 0",
    )
    critic_lambda: float | None = own_flag(
        None,
        "The `--gae-lambda` of the values that the critic learns; the same if not given.",
        "--critic-lambda",
        bound="between 0 and 1",
    )
    gae_lambda: float = own_flag(
        0.95,
        "The factor by which the surprise of a token counts in the advantage of the token before it.",
        "--gae-lambda",
        bound="between 0 and 1",
    )
    gae_discount: float = own_flag(
        1.0,
        "The factor by which a reward counts in the value of the token before it.",
        "--gae-discount",
        bound="between 0 and 1",
    )
    gae_length_alpha: float | None = own_flag(
        None,
        "Give each response a lambda by its length, 1 - 1 / (alpha length), in place of `--gae-lambda`.",
        "--gae-length-alpha",
        bound="above 0",
    )
    replay_routing: bool = own_flag(
        False,
        "In the later updates of an iteration, send tokens to the experts that the old policy's routers choose, in "
        "place of the policy's own choice.",
        "--grpo-replay-routing",
    )
    entropy_coef: float = own_flag(
        0.0,
        "The weight of the policy's entropy, which is subtracted from the loss.",
        "--grpo-entropy-coef",
        bound="finite and at least 0",
    )
    importance_correction: bool = megatron_flag(
        False,
        "Weight each token by the trainer's probability divided by the engine's.",
        "--rl-inference-logprobs-is-correction",
    )
    importance_truncation: float | None = megatron_flag(
        None,
        "The largest weight of `--rl-inference-logprobs-is-correction`.",
        "--rl-importance-sampling-truncation-coef",
        bound="above 0",
        remedy="0 zeroes every weight, a negative cap flips its sign",
    )
    correction_lower: float | None = own_flag(
        None,
        "The smallest weight of `--rl-inference-logprobs-is-correction`.",
        "--grpo-correction-lower",
        bound="at least 0",
    )
    correction_level: Literal["token", "sequence", "geometric"] = own_flag(
        "token",
        "The unit that is weighed: each token, or each response by the product or the geometric mean of its tokens' "
        "weights.",
        "--grpo-correction-level",
    )
    correction_mode: Literal["truncate", "mask"] = own_flag(
        "truncate", "The weight in place of one beyond its bounds: the bound, or zero.", "--grpo-correction-mode"
    )
    reject_below: float | None = own_flag(
        None,
        "Leave responses out if the geometric mean of their tokens' weights is below this.",
        "--grpo-reject-below",
        bound="above 0",
    )
    reject_above: float | None = own_flag(
        None,
        "Leave responses out if the geometric mean of their tokens' weights is above this.",
        "--grpo-reject-above",
        bound="above 0",
    )

    def __post_init__(self) -> None:
        if self.kl_estimator is None:
            # Set in spite of the frozen dataclass, so that every reader gets the estimator in use.
            object.__setattr__(self, "kl_estimator", ESTIMATORS[self.kl_in])


def name_teachers(words: Sequence[str] | None, are_served: bool = False) -> dict[str, Path]:
    """Return the folder of each teacher by the name of its model: `teacher`, or `teacher.NAME` for NAME=FOLDER.

    They are those in the trainer's pass, or those that are served by engines.
    """
    folders = {}
    for word in words or ():
        named = _NAMED.fullmatch(word)
        name, folder = ("teacher", word) if named is None else (f"teacher.{named['name']}", named["folder"])
        if folder.startswith(_SERVED) == are_served:
            folders[name] = Path(folder.removeprefix(_SERVED))
    return folders


ESTIMATORS: Mapping[str, str] = {"loss": "k3", "reward": "k1"}
"""The estimator of each place of the divergence without a flag."""
