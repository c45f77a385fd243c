"""The auxiliary losses that routers have recorded, in the forms that versions of megatron-core use."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils

from megatron_rl.trainer.mcore.step.auxiliary import take_losses

VALUES = {"load_balancing_loss": [2.0, 4.0], "z_loss": [6.0, 10.0], "another": [1.0, 1.0]}


def older(patch: pytest.MonkeyPatch) -> None:
    entries = {name: {"values": torch.tensor(values)} for name, values in VALUES.items()}
    patch.delattr(moe_utils, "get_moe_metrics_tracker", raising=False)
    patch.setattr(moe_utils, "get_moe_layer_wise_logging_tracker", lambda: entries)


def newer(patch: pytest.MonkeyPatch) -> None:
    entries = {name: SimpleNamespace(values=torch.tensor(values)) for name, values in VALUES.items()}
    patch.setattr(moe_utils, "get_moe_metrics_tracker", lambda: SimpleNamespace(metrics=entries), raising=False)


@pytest.mark.parametrize("form", [older, newer])
def test_auxiliary_losses_are_taken_once_and_averaged_over_ranks(form, monkeypatch: pytest.MonkeyPatch) -> None:
    form(monkeypatch)
    monkeypatch.setattr(parallel_state, "get_tensor_and_context_parallel_world_size", lambda: 2)
    # A mean over layers; of two ranks' means of the second loss a half each.
    assert take_losses(2) == {"moe_load_balancing_loss": 3.0, "moe_z_loss": 4.0}
    assert take_losses(2) == {}
    form(monkeypatch)
    # A layer without experts records nothing.
    assert take_losses(1) == {"moe_load_balancing_loss": 6.0, "moe_z_loss": 8.0}
