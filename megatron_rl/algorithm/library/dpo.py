"""DPO and its kin: losses of pairs of responses to a prompt, of which one was preferred.

Letters: P pairs.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

from megatron_rl.algorithm.declaration import Algorithm, Pairs, Paper, Preference
from megatron_rl.flag import own_flag

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """The loss of `--stage dpo`."""

    loss: Literal["sigmoid", "hinge", "ipo", "kto", "simpo"] = own_flag(
        "sigmoid", "The loss of a pair; docs/algorithms.md has the formulas.", "--dpo-loss-type"
    )
    beta: float = own_flag(0.1, "The papers' beta, which weighs log-probs.", "--dpo-beta", bound="finite and above 0")
    smoothing: float = own_flag(
        0.0,
        "The probability that the other response of a pair should have been preferred, for `sigmoid` and `simpo`.",
        "--dpo-label-smoothing",
        bound="at least 0 and below 1",
    )
    margin: float = own_flag(
        0.5, "The margin between responses that `simpo` asks for.", "--dpo-margin", bound="finite and at least 0"
    )


def compute_sigmoid(pairs: Pairs, config: PreferenceConfig) -> "torch.Tensor":
    return _classify(config.beta * pairs.margin_P, config.smoothing)


def compute_hinge(pairs: Pairs, config: PreferenceConfig) -> "torch.Tensor":
    return (1 - config.beta * pairs.margin_P).clamp(min=0)


def compute_ipo(pairs: Pairs, config: PreferenceConfig) -> "torch.Tensor":
    return (pairs.mean_margin_P - 1 / (2 * config.beta)).square()


def compute_kto(pairs: Pairs, config: PreferenceConfig) -> "torch.Tensor":
    """Compare each response with what the policy gained on responses that have nothing to do with their prompts."""
    gained = pairs.strangers.mean().clamp(min=0).detach()
    chosen_P, rejected_P = (config.beta * (one - gained) for one in (pairs.chosen_P, pairs.rejected_P))
    return ((-chosen_P).sigmoid() + rejected_P.sigmoid()) / 2


def compute_simpo(pairs: Pairs, config: PreferenceConfig) -> "torch.Tensor":
    return _classify(config.beta * pairs.mean_margin_P - config.margin, config.smoothing)


def _classify(logit_P: "torch.Tensor", smoothing: float) -> "torch.Tensor":
    """Return minus the log of the chosen response's probability, or of the other's with the smoothing's weight."""
    none = logit_P.new_zeros(())
    loss_P = (1 - smoothing) * (-logit_P).logaddexp(none)
    return loss_P + smoothing * logit_P.logaddexp(none) if smoothing else loss_P


DPO = Algorithm(
    Paper("DPO", "https://arxiv.org/abs/2305.18290"),
    preferences=(Preference("sigmoid", "-log sigmoid(b m)", compute_sigmoid, reads=("smoothing",)),),
)
SLIC = Algorithm(
    Paper("SLiC-HF", "https://arxiv.org/abs/2305.10425"),
    preferences=(Preference("hinge", "max(0, 1 - b m)", compute_hinge),),
)
IPO = Algorithm(
    Paper("IPO", "https://arxiv.org/abs/2310.12036"),
    preferences=(Preference("ipo", "(n - 1 / (2 b))^2", compute_ipo),),
)
KTO = Algorithm(
    Paper("KTO", "https://arxiv.org/abs/2402.01306"),
    preferences=(
        Preference(
            "kto",
            "(sigmoid(b (z - l of the chosen)) + sigmoid(b (l of the other - z))) / 2",
            compute_kto,
            reads_strangers=True,
        ),
    ),
)
SIMPO = Algorithm(
    Paper("SimPO", "https://arxiv.org/abs/2405.14734"),
    preferences=(
        Preference(
            "simpo",
            "-log sigmoid(b n - `--dpo-margin`)",
            compute_simpo,
            has_reference=False,
            reads=("smoothing", "margin"),
        ),
    ),
)
