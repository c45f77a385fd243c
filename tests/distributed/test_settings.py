"""Settings change how a model is computed, not its results: recomputation, uneven stages, overlap, half precision.

The kernel that splits heads runs on GPUs; here its definition takes its place.
"""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from megatron.core import parallel_state
from safetensors.torch import load_file

from megatron_rl.ops.qkv import naive, triton_fused
from tests import hf_models
from tests.distributed.layouts import CASES, Case, ParallelSizes, build, divisor, start_session
from tests.distributed.parity import Computed, by_transformers, expected, micro_batches, shared_loss, shared_packs
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

_SP = (("sequence_parallel", True),)
_FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
_CORE = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
_UNEVEN = (("num_layers_in_first_pipeline_stage", 1),)
_COUNTED = (("account_for_embedding_in_pipeline_split", True), ("account_for_loss_in_pipeline_split", True))
TP2, PP2, CP2 = ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(context=2)
SETTINGS = {
    case.name: case
    for case in (
        Case("one rank", 1),
        Case("full recomputation", 2, TP2, _FULL),
        Case("full recomputation, saved in parts", 2, TP2, (*_FULL, ("distribute_saved_activations", True))),
        Case("attention recomputed", 2, TP2, _SP + _CORE),
        Case("uneven stages", 2, PP2, _UNEVEN),
        Case("embedding and loss counted as layers", 2, PP2, _COUNTED + _FULL),
        Case("fewer query groups than ranks", 4, ParallelSizes(tensor=4), _SP),
        Case("rows over ranks, recomputed", 2, CP2, _FULL),
        Case("fused heads, recomputed", 2, TP2, _SP + _FULL),
        Case("fused heads, rows over ranks", 2, CP2, _CORE),
        Case("rows over ranks, attention recomputed", 4, ParallelSizes(tensor=2, context=2), _SP + _CORE),
    )
}
HALF_LAYOUTS = ("TP2+SP", "PP2xVPP2", "DP2+distopt", "CP2")
OVERLAPPED = ("DP2", "DP2+distopt", "PP2xVPP2")
# Results of a replica, in calls that follow each other.
NUM_MICRO_BATCHES = (2, 4, 2)

Result = tuple[Computed, str]


def run_settings(names: list[str], folders: dict[str, Path], out: Path) -> dict[tuple[str, str], Result]:
    torch.distributed.init_process_group("gloo")
    results = {}
    for name in names:
        case = SETTINGS[name]
        definition = mock.Mock(wraps=naive.split_heads)
        with start_session(case) as session, mock.patch.object(triton_fused, "split_heads", definition):
            for model_name, folder in folders.items():
                is_fused = name.startswith("fused heads")
                model = build(session, case, folder, qkv_backend="triton" if is_fused else "torch")
                packs = shared_packs(divisor(case.sizes))
                log_probs = model.forward_backward(packs, shared_loss)
                # Ranks that share a key head take Megatron's way.
                num_groups = model.architecture.num_query_groups
                assert definition.called is (is_fused and num_groups >= case.sizes.tensor)
                definition.reset_mock()
                model.weights.save_hf(out / name / model_name, source=folder)
                results[name, model_name] = (Computed(log_probs, model.gradients()), model.weights.fingerprint())
    return results


def run_half(folders: dict[str, Path], out: Path, precise: Path) -> dict[str, Any]:
    """Run two ranks in bfloat16; and overlapped reductions over calls with more and with fewer micro-batches."""
    torch.distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in HALF_LAYOUTS:
        with start_session(CASES[name]) as session:
            for model_name, folder in folders.items():
                model = build(session, CASES[name], folder, bf16=True)
                log_probs = model.forward_backward(shared_packs(divisor(CASES[name].sizes)), shared_loss)
                saved = model.weights.save_hf(out / name / model_name, source=folder)
                streamed = {key: value for bucket in model.weights.stream(bucket_bytes=30_000) for key, value in bucket}
                results[name, model_name] = (log_probs, model.gradients(), saved, streamed)
    for name in OVERLAPPED:
        case = dataclasses.replace(CASES.get(name, Case(name, 2)), overlap_grad_reduce=True)
        with start_session(case) as session:
            model = build(session, case, precise)
            packs = shared_packs(1) * 2
            size = parallel_state.get_data_parallel_world_size()
            results[name] = []
            for count in NUM_MICRO_BATCHES:
                log_probs = model.forward_backward(packs[: count * size], shared_loss)
                results[name].append((count * size, Computed(log_probs, model.gradients())))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": hf_models.draw("qwen3", root / "qwen3", num_key_value_heads=2),
        "llama_biased": hf_models.draw("llama_biased", root / "llama", num_key_value_heads=1),
    }


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_each_setting_gives_the_results_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    computed: dict[tuple[str, str], Result] = {}
    for size in (1, 2, 4):
        names = [name for name, case in SETTINGS.items() if case.world_size == size]
        computed |= run_ranks(run_settings, size, names, folders, tmp_path)[0]
    assert len(computed) == len(SETTINGS) * len(folders)
    everywhere = {name: expected(folder) for name, folder in folders.items()}
    for (setting, model), (ours, fingerprint) in computed.items():
        worst = everywhere[model].worst(ours)
        print(f"{setting:>40} {model:<14} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values())
        assert fingerprint == computed["one rank", model][1]
        given, returned = (
            load_file(path / "model.safetensors") for path in (folders[model], tmp_path / setting / model)
        )
        assert given.keys() == returned.keys()
        assert all(torch.equal(bytes_of(tensor), bytes_of(returned[name])) for name, tensor in given.items())


def test_half_precision_is_as_close_as_transformers_and_exported_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    halves = {}
    for name, folder in folders.items():
        halves[name] = tmp_path / "half" / name
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(halves[name])
    ranks = run_ranks(run_half, 2, halves, tmp_path, folders["qwen3"])
    for name, folder in halves.items():
        truth, half = (torch.cat(by_transformers(folder, dtype)) for dtype in (torch.float64, torch.bfloat16))
        given = load_file(folder / "model.safetensors")
        for layout in HALF_LAYOUTS:
            log_probs, gradients, saved, _ = ranks[0][layout, name]
            ours = torch.cat(log_probs)
            assert ours.dtype == torch.float32
            # transformers rounds in other places, so twice its own mean error is as close as can be asked.
            assert (ours - truth).abs().mean() <= 2 * (half - truth).abs().mean()
            assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())
            assert saved == ranks[0][HALF_LAYOUTS[0], name][2] == ranks[1][layout, name][2]
            returned = load_file(tmp_path / layout / name / "model.safetensors")
            streamed = ranks[0][layout, name][3] | ranks[1][layout, name][3]
            assert given.keys() == returned.keys() == streamed.keys()
            for key, tensor in given.items():
                assert torch.equal(bytes_of(tensor), bytes_of(returned[key])), (layout, name, key)
                assert torch.equal(bytes_of(tensor), bytes_of(streamed[key])), (layout, name, key)
    of_packs = {count: expected(folders["qwen3"], (micro_batches() * 2)[:count]) for count in (2, 4, 8)}
    for name in OVERLAPPED:
        for count, ours in ranks[0][name]:
            worst = of_packs[count].worst(ours)
            print(f"{name}, overlapped, {count} micro-batches: error / bound: {worst}")
            assert all(error <= 1 for error, _ in worst.values()), f"{name}: a reduction lost micro-batches"
