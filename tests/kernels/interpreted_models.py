"""Models with our kernels, in several layouts, against transformers in float64.

test_interpreted.py runs this with TRITON_INTERPRET=1.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.ops.elementwise import triton_fused
from megatron_rl.ops.qkv import triton_fused as fused_heads
from megatron_rl.trainer.data.packing import pack_groups
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.distributed.parity import Computed, Groups, expected, micro_batches, shared_loss
from tests.ranks import run_ranks

_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Counts = tuple[int, ...]
# Each label has a layout, a model and changes of its configuration, and each rank's number of calls. For element-wise
# work these are calls of SwiGLU and of that of experts, one a layer, of additions with a norm, two a layer, and of
# norms without an addition. Heads are split once a layer.
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
    "heads": {
        "recomputed": ("TP2+SP", "qwen3", _RECOMPUTED, [(16,)] * 2),
        "PP2": ("PP2", "qwen2", {}, [(4,)] * 2),
        "TP2": ("TP2", "llama_biased", {}, [(8,)] * 2),
        "CP2": ("CP2", "qwen3", {}, [(8,)] * 2),
    },
}


def short_batches() -> list[Groups]:
    """Return two micro-batches of few tokens, because programs are slow in the interpreter."""
    return [
        [(prompt[:5], [response[:4] for response in responses[:2]]) for prompt, responses in groups[:2]]
        for groups in micro_batches()[:2]
    ]


@contextlib.contextmanager
def count_calls(which: str, hidden_size: int) -> Iterator[Callable[[], Counts]]:
    """Yield what returns how often each kernel ran forward."""
    with contextlib.ExitStack() as stack:

        def watch(module: Any, name: str) -> mock.Mock:
            return stack.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))

        if which == "heads":
            split = watch(fused_heads, "split_heads")
            yield lambda: (split.call_count,)
            return
        kernels = [watch(triton_fused, name) for name in ("swiglu", "weighted_swiglu", "add_and_normalize")]
        norm = watch(torch.nn.functional, "rms_norm")
        # Norms of queries and keys have another width.
        yield lambda: (
            *(kernel.call_count for kernel in kernels),
            sum(call.args[1] == (hidden_size,) for call in norm.call_args_list),
        )


def run_models(which: str, folders: dict[str, Path]) -> dict[str, tuple[Computed, Counts]]:
    """Compute models with the kernels on two ranks; return results, and how often each kernel ran forward."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for label, (layout, name, changes, _) in MODELS[which].items():
        gathers = layout == "DP2+distopt"
        heads, elementwise = ("triton", "torch") if which == "heads" else ("torch", "triton")
        case = dataclasses.replace(CASES[layout], elementwise_backend=elementwise, overlap_param_gather=gathers)
        with start_session(case) as session:
            model = build(session, case, folders[name], qkv_backend=heads, **changes)
            packs = [pack_groups(groups, divisor(case.sizes)) for groups in short_batches()]
            with count_calls(which, model.architecture.hidden_size) as count:
                log_probs = model.forward_backward(packs, shared_loss)
                counts = count()
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
