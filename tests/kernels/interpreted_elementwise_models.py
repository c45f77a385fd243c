"""Models with the kernels of element-wise work, in several layouts, against transformers in float64.

test_elementwise.py runs this with TRITON_INTERPRET=1.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.ops.elementwise import triton_fused
from megatron_rl.trainer.data.packing import pack_groups
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.distributed.parity import Computed, Groups, expected, micro_batches, shared_loss
from tests.ranks import run_ranks


def short_batches() -> list[Groups]:
    """Return two micro-batches of few tokens, because programs are slow in the interpreter."""
    return [
        [(prompt[:5], [response[:4] for response in responses[:2]]) for prompt, responses in groups[:2]]
        for groups in micro_batches()[:2]
    ]


# Each label has a layout, a model and changes of its configuration. Then it has each rank's number of calls: of SwiGLU,
# which a dense layer calls once, and of that of experts, once a layer too. Additions with a norm, which a layer calls
# twice, and norms without an addition follow.
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Counts = tuple[int, int, int, int]
MODELS: dict[str, dict[str, tuple[str, str, dict[str, Any], list[Counts]]]] = {
    "few": {
        # The last layer of the first stage has no norm after it.
        "PP2": ("PP2", "qwen3", {}, [(4, 0, 6, 2), (4, 0, 8, 2)]),
        # What is between layers has no norm. The rest runs twice.
        "recomputed": ("DP2+distopt", "qwen3", _RECOMPUTED, [(8, 0, 8, 9)] * 2),
    },
    "more": {
        "TP2+SP": ("TP2+SP", "qwen3", {}, [(8, 0, 16, 2)] * 2),
        "experts": ("EP2", "qwen3_moe", {}, [(0, 4, 8, 1)] * 2),
        "shared experts": ("TP2+SP", "qwen2_moe", {}, [(8, 8, 16, 2)] * 2),
        "biased": ("TP2", "llama_biased", {}, [(0, 0, 0, 18)] * 2),
    },
}


def run_models(which: str, folders: dict[str, Path]) -> dict[str, tuple[Computed, Counts]]:
    """Compute models with the kernels on two ranks; return results, and how often each kernel ran forward."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for label, (layout, name, changes, _) in MODELS[which].items():
        gathers = label == "recomputed"
        case = dataclasses.replace(CASES[layout], elementwise_backend="triton", overlap_param_gather=gathers)
        with start_session(case) as session:
            model = build(session, case, folders[name], **changes)
            packs = [pack_groups(groups, divisor(case.sizes)) for groups in short_batches()]
            with (
                mock.patch.object(triton_fused, "swiglu", wraps=triton_fused.swiglu) as swiglu,
                mock.patch.object(triton_fused, "weighted_swiglu", wraps=triton_fused.weighted_swiglu) as weighted,
                mock.patch.object(triton_fused, "add_and_normalize", wraps=triton_fused.add_and_normalize) as add,
                mock.patch.object(torch.nn.functional, "rms_norm", wraps=torch.nn.functional.rms_norm) as norm,
            ):
                log_probs = model.forward_backward(packs, shared_loss)
            # Norms of queries and keys have another width.
            norms = [call for call in norm.call_args_list if call.args[1] == (model.architecture.hidden_size,)]
            counts = swiglu.call_count, weighted.call_count, add.call_count, len(norms)
            results[label] = (Computed(log_probs, model.gradients()), counts)
            # Gathers that overlap need an optimizer, which would end them.
            assert gathers or all(map(torch.equal, model.forward(packs), log_probs))
    return results


@pytest.mark.parametrize("which", MODELS)
def test_models_with_the_kernels_give_the_results_of_transformers(which: str, tmp_path: Path) -> None:
    names = {name for _, name, _, _ in MODELS[which].values()}
    folders = {name: hf_models.draw(name, tmp_path / name) for name in names}
    truths = {name: expected(folder, short_batches()) for name, folder in folders.items()}
    ranks = run_ranks(run_models, 2, which, folders)
    for label, (_, name, _, counts) in MODELS[which].items():
        worst = truths[name].worst(ranks[0][label][0])
        print(f"{label:>14} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values()), label
        assert [rank[label][1] for rank in ranks] == counts, label
