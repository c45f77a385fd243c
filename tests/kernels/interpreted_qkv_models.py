"""Models whose heads the kernels split, in several layouts, against transformers in float64.

test_qkv.py runs this with TRITON_INTERPRET=1.
"""

from pathlib import Path
from unittest import mock

import torch.distributed as dist

from megatron_rl.ops import qkv
from megatron_rl.ops.backends import FunctionBackend
from megatron_rl.ops.qkv import triton_fused
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.ranks import run_ranks

LAYOUTS = {"TP2+SP": "qwen3", "PP2": "qwen2", "TP2": "llama_biased", "CP2": "qwen3"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def compute_on_ranks(folders: dict[str, Path]) -> dict[str, parity.Computed]:
    """Compute two micro-batches in each layout; count the layers' calls of the kernels."""
    dist.init_process_group("gloo")
    results = {}
    for layout, name in LAYOUTS.items():
        case = CASES[layout]
        with start_session(case) as session:
            changes = RECOMPUTED if layout == "TP2+SP" else {}
            model = build(session, case, folders[name], qkv_backend="triton", **changes)
            packs = parity.shared_packs(divisor(case.sizes))[:2]
            with mock.patch.dict(qkv.BACKENDS, triton=FunctionBackend(mock.Mock(wraps=triton_fused.split_heads))):
                log_probs = model.forward_backward(packs, parity.shared_loss)
                calls = qkv.BACKENDS["triton"].run.call_count
            num_layers = sum(len(chunk.decoder.layers) for chunk in model.chunks)
            assert calls == num_layers * len(packs) * (2 if changes else 1), layout
            results[layout] = parity.Computed(log_probs, model.gradients())
    return results


def test_models_with_the_kernels_have_the_log_probs_and_gradients_of_transformers(tmp_path: Path) -> None:
    names = sorted(set(LAYOUTS.values()))
    folders = {name: hf_models.draw(name, tmp_path / name) for name in names}
    expected = {name: parity.expected(folders[name], parity.micro_batches()[:2]) for name in names}
    computed, _ = run_ranks(compute_on_ranks, 2, folders)
    for layout, name in LAYOUTS.items():
        worst = expected[name].worst(computed[layout])
        assert all(error <= 1 for error, _ in worst.values()), (layout, worst)
