"""Settings that change how a model is computed and not what: recomputation, uneven stages, overlap, half precision."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core import parallel_state
from safetensors.torch import load_file

from tests import hf_models
from tests.distributed.layouts import CASES, Case, ParallelSizes, build, divisor, session_of
from tests.distributed.parity import micro_batches, of_responses, shared_loss, shared_packs
from tests.ranks import run_ranks

TOLERANCE = 1e-5
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
        Case("attention computed anew", 2, TP2, _SP + _CORE),
        Case("uneven stages", 2, PP2, _UNEVEN),
        Case("embedding and loss counted as layers", 2, PP2, _COUNTED + _FULL),
        Case("fewer query groups than ranks", 4, ParallelSizes(tensor=4), _SP),
        Case("rows over ranks, recomputed", 2, CP2, _FULL),
        Case("rows over ranks, attention computed anew", 4, ParallelSizes(tensor=2, context=2), _SP + _CORE),
    )
}
HALF_LAYOUTS = ("TP2+SP", "PP2xVPP2", "DP2+distopt", "CP2")
OVERLAPPED = ("DP2", "DP2+distopt", "PP2xVPP2")

Result = tuple[list[torch.Tensor], dict[str, torch.Tensor], str]


def run_settings(names: list[str], folders: dict[str, Path], out: Path) -> dict[tuple[str, str], Result]:
    torch.distributed.init_process_group("gloo")
    results = {}
    for name in names:
        case = SETTINGS[name]
        with session_of(case) as session:
            for model_name, folder in folders.items():
                model = build(session, case, folder)
                packs = shared_packs(divisor(case.sizes))
                log_probs = model.forward_backward(packs, shared_loss)
                model.weights.save_hf(out / name / model_name, source=folder)
                results[name, model_name] = (log_probs, model.gradients(), model.weights.fingerprint())
    return results


def run_half(folders: dict[str, Path], out: Path, precise: Path) -> dict[str, Any]:
    """Two ranks in bfloat16; and overlapped reductions over calls with more and with fewer micro-batches."""
    torch.distributed.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in HALF_LAYOUTS:
        with session_of(CASES[name]) as session:
            for model_name, folder in folders.items():
                model = build(session, CASES[name], folder, bf16=True)
                log_probs = model.forward_backward(shared_packs(divisor(CASES[name].sizes)), shared_loss)
                saved = model.weights.save_hf(out / name / model_name, source=folder)
                streamed = {key: value for bucket in model.weights.stream(bucket_bytes=30_000) for key, value in bucket}
                results[name, model_name] = (log_probs, model.gradients(), saved, streamed)
    for name in OVERLAPPED:
        plain = dataclasses.replace(CASES.get(name, Case(name, 2)), overlap_grad_reduce=False)
        for case in (plain, dataclasses.replace(plain, overlap_grad_reduce=True)):
            with session_of(case) as session:
                model = build(session, case, precise)
                packs = shared_packs(1) * 2
                counts = [count * parallel_state.get_data_parallel_world_size() for count in (2, 4, 2)]
                gradients = []
                for count in counts:
                    model.forward_backward(packs[:count], shared_loss)
                    gradients.append(model.gradients())
                results[name, case.overlap_grad_reduce] = gradients
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


def worst(gradients: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(((gradients[key] - value).abs().max() / value.abs().max()).item() for key, value in reference.items())


def test_each_setting_gives_the_results_of_one_rank_without_it(folders: dict[str, Path], tmp_path: Path) -> None:
    computed: dict[tuple[str, str], Result] = {}
    for size in (1, 2, 4):
        names = [name for name, case in SETTINGS.items() if case.world_size == size]
        computed |= run_ranks(run_settings, size, names, folders, tmp_path)[0]
    assert len(computed) == len(SETTINGS) * len(folders)
    for (setting, model), (log_probs, gradients, fingerprint) in computed.items():
        expected, reference, identity = computed["one rank", model]
        difference = max((a - b).abs().max().item() for a, b in zip(log_probs, expected, strict=True))
        print(f"{setting:>40} {model:<14} log-probs {difference:.1e} gradients {worst(gradients, reference):.1e}")
        assert difference <= TOLERANCE
        assert worst(gradients, reference) <= TOLERANCE
        assert fingerprint == identity
        given, returned = (
            load_file(path / "model.safetensors") for path in (folders[model], tmp_path / setting / model)
        )
        assert given.keys() == returned.keys()
        assert all(torch.equal(bytes_of(tensor), bytes_of(returned[name])) for name, tensor in given.items())


def of_transformers(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Its log-probs of all responses, the model computed in that dtype and the softmax in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    whole = []
    for groups in micro_batches():
        values = []
        for tokens in [prompt + response for prompt, responses in groups for response in responses]:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, :-1].float()
            values.append(logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        whole.append(torch.cat(values))
    return torch.cat(of_responses(whole))


def test_half_precision_is_as_close_as_transformers_and_exported_bit_for_bit(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    halves = {}
    for name, folder in folders.items():
        halves[name] = tmp_path / "half" / name
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(halves[name])
    ranks = run_ranks(run_half, 2, halves, tmp_path, folders["qwen3"])
    for name, folder in halves.items():
        precise, half = (of_transformers(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
        given = load_file(folder / "model.safetensors")
        for layout in HALF_LAYOUTS:
            log_probs, gradients, saved, _ = ranks[0][layout, name]
            ours = torch.cat(log_probs)
            assert ours.dtype == torch.float32
            # transformers rounds in other places, so twice its own mean error is as close as can be asked.
            assert (ours - precise).abs().mean() <= 2 * (half - precise).abs().mean()
            assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())
            assert saved == ranks[0][HALF_LAYOUTS[0], name][2] == ranks[1][layout, name][2]
            returned = load_file(tmp_path / layout / name / "model.safetensors")
            streamed = ranks[0][layout, name][3] | ranks[1][layout, name][3]
            assert given.keys() == returned.keys() == streamed.keys()
            for key, tensor in given.items():
                assert torch.equal(bytes_of(tensor), bytes_of(returned[key])), (layout, name, key)
                assert torch.equal(bytes_of(tensor), bytes_of(streamed[key])), (layout, name, key)
    for name in OVERLAPPED:
        for overlapped, plain in zip(ranks[0][name, True], ranks[0][name, False], strict=True):
            assert worst(overlapped, plain) <= TOLERANCE, f"{name}: an overlapped reduction lost micro-batches"
