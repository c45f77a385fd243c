"""Divergences from a teacher and their gradients beside TRL's, from the same logits. `make test-trl` runs it."""

import pytest
import torch

from megatron_rl.ops.log_probs import TargetRows, VocabularyShard
from megatron_rl.ops.log_probs.divergence import output_divergences
from megatron_rl.types import Divergence

gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL has an environment of its own: make test-trl")


@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.0), ("reverse", 1.0), ("jsd", 0.5), ("jsd", 0.2)])
def test_divergences_are_those_of_trl(kind: str, beta: float) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((11, 24), (300, 24), (11, 16), (300, 16))
    hidden, weight, other, others_weight = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_(number < 2)
        for number, shape in enumerate(shapes)
    )
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        (hidden @ weight.T)[None], (other @ others_weight.T)[None], beta=beta, temperature=0.7, reduction="none"
    ).sum(-1)[0]
    form = Divergence(kind, mixture=beta if kind == "jsd" else 0.5)
    rows = TargetRows(other, others_weight)
    targets = torch.zeros(len(hidden), dtype=torch.int64)
    policy, shard = TargetRows(hidden, weight), VocabularyShard(0, 300)
    ours = output_divergences(policy, targets, [(rows, form)], shard, 0.7, 64)[:, 1]
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    grads = [torch.autograd.grad(one.sum(), (hidden, weight)) for one in (ours, theirs)]
    for mine, other_grad in zip(*grads, strict=True):
        assert torch.allclose(mine, other_grad, rtol=1e-9, atol=1e-12)
