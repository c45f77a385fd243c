"""Norms over all heads count in the gradient's norm once for each tensor-parallel rank's own heads."""

from pathlib import Path

import pytest
import torch

from megatron_rl.trainer.mcore.step.optimizer import apply_update
from tests import hf_models
from tests.distributed.training import training
from tests.ranks import run_ranks

WORDS = (
    "--lr 1e-3 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1"
)


def update(folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the gradient's norm that an update reports, and the gradients."""
    torch.distributed.init_process_group("gloo")
    with training(folder, WORDS) as trained:
        trained.accumulate()
        gradients = trained.gradients()
        return apply_update(trained.optimizer, trained.scheduler, trained.wrapped, 1.0).gradient_norm, gradients


@pytest.mark.slow
def test_the_gradients_norm_has_the_norms_of_every_ranks_heads(tmp_path: Path) -> None:
    (ours, gradients), _ = run_ranks(update, 2, hf_models.draw("minimax_m2", tmp_path / "model"))
    squares = {name: value.double().square().sum().item() for name, value in gradients.items()}
    truth = sum(squares.values()) ** 0.5
    of_norms = sum(value for name, value in squares.items() if name.endswith(("q_norm.weight", "k_norm.weight")))
    without = (truth**2 - of_norms / 2) ** 0.5
    print(f"norm {ours:.8g}, by definition {truth:.8g}, without a rank's norms about {without:.8g}")
    assert abs(ours - truth) < 0.05 * (truth - without)
