"""The teacher, a model of any size with the policy's vocabulary: the policy learns its distribution (`--teacher`).

`sampled` rewards each token that the policy sampled with the teacher's log-prob less the policy's, an estimate of minus
KL(policy, teacher). Every other name is a divergence over the vocabulary, a term of the loss.
"""

from typing import Any

import torch

from megatron_rl.algorithm.declaration import LossRole, RoleLogProbs, Term
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.types import Divergence


def find_divergence(config: Any) -> Divergence | None:
    if config.opd_divergence == "sampled":
        return None
    return Divergence(config.opd_divergence, config.opd_top_k, config.opd_mixture)


def teach(log_probs: RoleLogProbs, sequences: Sequences, config: Any) -> Term:
    """Compute the part of a teacher from its log-probs of targets, or from the divergence from it."""
    is_sampled = find_divergence(config) is None
    divergence_N = log_probs.others[TEACHER.name]
    if is_sampled:
        divergence_N = log_probs.old_N - divergence_N
    sums = {"teacher_kl": divergence_N.detach().sum(dtype=torch.float64)}
    for model, is_of_model_N in log_probs.is_of_model_N.items():
        name = model.partition(".")[2]
        sums[f"teacher_kl.{name}"] = divergence_N.detach()[is_of_model_N].sum(dtype=torch.float64)
        sums[f"teacher_targets.{name}"] = is_of_model_N.sum()
    if is_sampled:
        return Term(advantages_N=-config.opd_coef * sequences.sum_from(divergence_N, config.opd_discount), sums=sums)
    return Term(loss_N=config.opd_coef * divergence_N, sums=sums)


TEACHER = LossRole(
    "teacher",
    is_used=lambda config: config.teacher is not None,
    compute=teach,
    find_divergence=find_divergence,
    flag="--teacher",
    find_models=lambda config: name_teachers(config.teacher),
)
