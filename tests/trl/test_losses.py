"""Losses and their gradients beside those of TRL's GRPOTrainer, on the same log-probs. `make test-trl` runs it.

TRL computes advantages and the engine's weights where it generates, and that code cannot be called by itself: these are
compared with formulas (tests/unit/test_losses.py).

Letters: B responses, L tokens of the longest.
"""

import collections
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.library import PRESETS
from megatron_rl.algorithm.settings import AlgorithmConfig
from tests.unit.test_losses import MAX_TOKENS, Batch, compute, draw_batch

trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL has an environment of its own: make test-trl")

# Our names, and TRL's names for the same.
PAIRS: dict[str, tuple[AlgorithmConfig, dict[str, Any]]] = {
    "grpo": (AlgorithmConfig(**PRESETS["grpo"].settings), {"loss_type": "grpo"}),
    "grpo with a reference": (
        AlgorithmConfig(**PRESETS["grpo"].settings, kl_beta=0.04),
        {"loss_type": "grpo", "beta": 0.04},
    ),
    "grpo with an unbiased divergence": (
        AlgorithmConfig(**PRESETS["grpo"].settings, kl_beta=0.04, kl_estimator="unbiased"),
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
    ),
    "dr_grpo": (AlgorithmConfig(**PRESETS["dr_grpo"].settings), {"loss_type": "dr_grpo"}),
    "dapo": (AlgorithmConfig(**PRESETS["dapo"].settings), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "tokens": (AlgorithmConfig(), {"loss_type": "bnpo"}),
    "gspo": (
        AlgorithmConfig(**{**PRESETS["gspo"].settings, "clamp_eps_lower": 0.02, "clamp_eps_upper": 0.03}),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "two-sided clip": (AlgorithmConfig(dual_clip=1.3), {"loss_type": "bnpo", "delta": 1.3}),
    # TRL's bound is the weight itself.
    "cispo": (
        AlgorithmConfig(**{**PRESETS["cispo"].settings, "clamp_eps_upper": 0.1}),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sapo": (AlgorithmConfig(**PRESETS["sapo"].settings), {"loss_type": "sapo"}),
    "entropy": (AlgorithmConfig(entropy_coef=0.1), {"loss_type": "bnpo", "entropy_coef": 0.1}),
    "weighed tokens": (
        AlgorithmConfig(importance_correction=True, importance_truncation=1.05),
        {"loss_type": "bnpo", "vllm_importance_sampling_correction": True},
    ),
}


DEFAULTS = {
    "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "entropy_coef": 0.0,
    "vllm_importance_sampling_correction": False, "use_bias_correction_kl": False, "delta": None,
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
}  # fmt: skip


@dataclasses.dataclass
class Accelerator:
    """The accelerator of one process."""

    num_processes: int = 1

    def reduce(self, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return value

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value


def pad(batch: Batch, name: str, lengths: list[int]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(batch[name].split(lengths)), batch_first=True)


def theirs(batch: Batch, options: dict[str, Any], truncation: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return TRL's loss, and its gradient by the policy's log-probs."""
    lengths = batch["lengths"].tolist()
    mask_BL = torch.arange(max(lengths)) < batch["lengths"][:, None]
    policy_BL = pad(batch, "policy", lengths).requires_grad_()
    options = {**DEFAULTS, **options}
    trainer = SimpleNamespace(
        **options, args=SimpleNamespace(**options), aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=options["vllm_importance_sampling_correction"],
        model=SimpleNamespace(training=False), accelerator=Accelerator(), max_completion_length=MAX_TOKENS,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=options["entropy_coef"] > 0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy_BL, pad(batch, "entropies", lengths), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(len(lengths), 1), "prompt_mask": torch.ones(len(lengths), 1),
        "completion_ids": torch.zeros_like(mask_BL), "completion_mask": mask_BL.long(),
        "advantages": torch.stack([part[0] for part in batch["advantages"].split(lengths)]),
        "old_per_token_logps": pad(batch, "old", lengths), "ref_per_token_logps": pad(batch, "reference", lengths),
        "num_items_in_batch": mask_BL.sum(),
        "importance_sampling_ratio": (pad(batch, "old", lengths) - pad(batch, "engine", lengths)).exp().clamp(
            max=math.inf if truncation is None else truncation
        ),
    }  # fmt: skip
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    (gradient_BL,) = torch.autograd.grad(loss, policy_BL)
    return loss.detach(), gradient_BL[mask_BL]


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 10**6))
def test_the_loss_and_its_gradient_are_trls(name, lengths, seed) -> None:
    config, options = PAIRS[name]
    batch = draw_batch(lengths, seed)
    total, gradient, _ = compute(config, batch)
    expected, slopes = theirs(batch, dict(options), config.importance_truncation)
    assert abs(total - expected) <= 1e-6 * max(1, abs(expected))
    assert (gradient - slopes).abs().max() <= 1e-6 * slopes.abs().max().clamp(min=1e-3)
