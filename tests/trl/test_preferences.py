"""Losses of pairs and their gradients beside TRL's, from the same log-probs. `make test-trl` runs it.

Letters: P pairs, L tokens of the longest response.
"""

import collections
from types import SimpleNamespace

import pytest
import torch

from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.library.dpo import PreferenceConfig
from megatron_rl.algorithm.objective import PreferenceObjective

dpo = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL has an environment of its own: make test-trl")
kto = pytest.importorskip("trl.trainer.kto_trainer", reason="TRL has an environment of its own: make test-trl")
cpo = pytest.importorskip("trl.experimental.cpo.cpo_trainer", reason="TRL has an environment of its own: make test-trl")

# One process.
ACCELERATOR = SimpleNamespace(
    device="cpu", num_processes=1, gather=lambda value: value, gather_for_metrics=lambda value: value
)
LENGTHS = [(3, 5), (7, 1), (4, 4), (2, 9)]
BETA = 0.3


def compute(config: PreferenceConfig, policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Return the mean of the losses that an update divides by its pairs."""
    lengths_S = torch.tensor(LENGTHS).flatten()
    sequences_N = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    log_probs = RoleLogProbs(policy_N, policy_N.detach(), {"reference": reference_N})
    objective, zeros_N = PreferenceObjective(config, int(lengths_S.max())), torch.zeros_like(policy_N)
    total, _ = objective.loss(log_probs, zeros_N, zeros_N, sequences_N, lengths_S)
    return total / objective.share(len(policy_N), len(lengths_S))


def pad(values_N: torch.Tensor) -> torch.Tensor:
    """Return chosen and then rejected responses, [2 P, L], after a token of a prompt."""
    parts = values_N.split([length for pair in LENGTHS for length in pair])
    return torch.nn.utils.rnn.pad_sequence([*parts[::2], *parts[1::2]], batch_first=True)


def compute_trls_dpo(name: str, policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    mask = torch.nn.functional.pad((pad(torch.ones_like(policy_N)) != 0).long(), (1, 0))
    chosen_P, rejected_P = pad(reference_N).sum(1).chunk(2)
    zeros = torch.zeros_like(pad(policy_N))
    outputs = SimpleNamespace(log_probs=pad(policy_N), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=ACCELERATOR, aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=[name], loss_weights=[1.0], beta=BETA,
        use_weighting=False, _total_train_tokens=0,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
    )  # fmt: skip
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": chosen_P, "ref_rejected_logps": rejected_P,
    }  # fmt: skip
    loss: torch.Tensor = dpo.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss


def compute_trls_simpo(policy_N: torch.Tensor, smoothing: float) -> torch.Tensor:
    means = pad(policy_N).sum(1) / (pad(torch.ones_like(policy_N)) != 0).sum(1)
    trainer = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.4, beta=BETA, label_smoothing=smoothing, accelerator=ACCELERATOR
    )
    losses, _, _ = cpo.CPOTrainer.cpo_loss(trainer, *means.chunk(2))
    return losses.mean()


def compute_trls_kto(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Read each second pair as the responses to another prompt."""
    (policy, reference, here) = (pad(values_N) for values_N in (policy_N, reference_N, torch.ones_like(policy_N)))
    # Chosen responses come before the others.
    is_stranger_S = torch.arange(2 * len(LENGTHS)) % 2 == 1
    own_S = ~is_stranger_S
    mask = torch.nn.functional.pad((here != 0).long(), (1, 0))[own_S]
    zeros = torch.zeros_like(policy[own_S])
    outputs = SimpleNamespace(log_probs=policy[own_S], entropy=zeros, mean_logits=zeros)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=False), accelerator=ACCELERATOR, aux_loss_enabled=False, calculate_KL=True,
        precompute_ref_logps=True, loss_type="kto", beta=BETA, desirable_weight=1.0, undesirable_weight=1.0,
        _total_train_tokens=0, _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _compute_kl_logps=lambda model, batch: policy[is_stranger_S].sum(1),
    )  # fmt: skip
    inputs = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
        "label": torch.arange(len(LENGTHS)) < len(LENGTHS) // 2,
        "ref_logps": reference[own_S].sum(1), "ref_KL_logps": reference[is_stranger_S].sum(1),
    }  # fmt: skip
    loss: torch.Tensor = kto.KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return loss


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("sigmoid", "sigmoid"), ("hinge", "hinge"), ("ipo", "ipo"), ("simpo", ""), ("simpo smoothed", ""), ("kto", "")],
)
def test_losses_of_pairs_and_their_gradients_are_those_of_trl(ours: str, theirs: str) -> None:
    draw = torch.Generator().manual_seed(0)
    count = sum(map(sum, LENGTHS))
    policy_N, reference_N = (-torch.rand(count, generator=draw, dtype=torch.float64) - 0.01 for _ in range(2))
    policy_N.requires_grad_()
    smoothing = 0.1 if "smoothed" in ours else 0.0
    config = PreferenceConfig(ours.split()[0], beta=BETA, smoothing=smoothing, margin=0.4)
    own = compute(config, policy_N, reference_N)
    if ours == "kto":
        expected = compute_trls_kto(policy_N, reference_N)
    elif theirs:
        expected = compute_trls_dpo(theirs, policy_N, reference_N)
    else:
        expected = compute_trls_simpo(policy_N, smoothing)
    assert torch.allclose(own, expected, rtol=1e-12)
    slopes = [torch.autograd.grad(loss, policy_N, retain_graph=True)[0] for loss in (own, expected)]
    assert torch.allclose(*slopes, rtol=1e-10, atol=1e-14)
