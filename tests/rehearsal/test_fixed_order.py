"""An update of a model of each family with --deterministic-mode: every sum on the device has a fixed order."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.mcore.step.optimizer import apply_update
from tests import hf_models
from tests.distributed.layouts import forward_backward
from tests.distributed.parity import shared_loss, shared_packs
from tests.distributed.training import training
from tests.ranks import run_ranks
from tests.rehearsal import device
from tests.rehearsal.order import NEVER_ORDERED

pytestmark = pytest.mark.each_change

# The text models of these are among the others, with the same parts.
ALSO_IN_OTHERS = ("llama_biased", "qwen3_moe_raw", "deepseek_v3_direct", "qwen3_vl", "qwen3_5_images", "gemma3")
FLAGS = "--deterministic-mode --lr 0.01 --lr-decay-style constant"
FAMILIES = [name for name in hf_models.CONFIGS if name not in ALSO_IN_OTHERS]


def list_operators(models: Mapping[str, Path]) -> dict[str, frozenset[str]]:
    """Update each model once; list the operators that floating-point numbers went through."""
    torch.distributed.init_process_group("gloo")
    found = {}
    for name, folder in models.items():
        device.operators.clear()
        with training(folder, FLAGS, 1) as trained:
            copier = DeviceCopier(trained.session.platform)
            copies = [copier.copy(pack, pack.layout) for pack in shared_packs(1)]
            for _, pending in copies:
                pending.wait()
            forward_backward(trained.wrapped, [pack for pack, _ in copies], shared_loss)
            apply_update(trained.optimizer, trained.scheduler, trained.wrapped, 0.01)
        found[name] = frozenset(device.operators)
    return found


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, frozenset[str]]:
    models = {name: hf_models.draw(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
    return run_ranks(list_operators, 1, models, platform="rehearsed")[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_with_deterministic_mode_every_sum_of_a_family_has_a_fixed_order(name: str, operators) -> None:
    assert "aten::mm" in operators[name]
    assert not operators[name] & NEVER_ORDERED
