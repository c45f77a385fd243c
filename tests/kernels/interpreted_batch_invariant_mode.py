"""A model with Megatron's batch-invariant mode, whose kernels run in Triton's interpreter.

test_interpreted.py runs this with TRITON_INTERPRET=1.
"""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.distributed.parity import Computed, expected, shared_loss, shared_packs
from tests.nursery import WITH_TRANSFORMER_ENGINE
from tests.ranks import run_ranks

# Modules of TransformerEngine whose functions the mode replaces, where they have them.
_REPLACED_IN = (
    "cpp_extensions", "module.linear", "module.layernorm_linear", "module.layernorm", "module._common",
)  # fmt: skip


def compute(folder: Path) -> tuple[Computed, int]:
    """Return log-probs and gradients of a model's packs with the mode, and the products that its kernel computed."""
    for path in _REPLACED_IN:
        name = f"transformer_engine.pytorch.{path}"
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
        setattr(sys.modules[name.rpartition(".")[0]], path.rpartition(".")[2], sys.modules[name])
    kernels = importlib.import_module("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    session_module = importlib.import_module("megatron_rl.trainer.mcore.session")
    torch.distributed.init_process_group("gloo")
    case = CASES["TP1"]
    with start_session(case) as session:
        model = build(session, case, folder)
        packs = shared_packs(divisor(case.sizes))
        with (
            mock.patch.object(kernels, "matmul_persistent", wraps=kernels.matmul_persistent) as product,
            mock.patch.object(kernels, "mean_dim", mean_on_cpu),
        ):
            session_module.choose_invariant_order()
            assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
            try:
                log_probs = model.forward_backward(packs, shared_loss)
            finally:
                kernels.disable_batch_invariant_mode()
        return Computed(log_probs, model.gradients()), product.call_count


def mean_on_cpu(input: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
    """Compute what the mode's kernel for means does, which refuses a CPU; torch's own mean would come back here."""
    return input.sum(dim, keepdim=keepdim) / input.shape[dim]


def test_megatrons_invariant_kernels_compute_the_models_log_probs_and_gradients(tmp_path: Path) -> None:
    folder = hf_models.draw("qwen3", tmp_path, num_hidden_layers=2)
    ((computed, num_products),) = run_ranks(compute, 1, folder, platform=WITH_TRANSFORMER_ENGINE)
    worst = expected(folder).worst(computed)
    print(f"{num_products} products, error / bound: {worst}")
    # Each linear layer has a product forward, and two backward but for the output layer.
    assert num_products >= 2 * 4 * 3
    assert all(error <= 1 for error, _ in worst.values())
