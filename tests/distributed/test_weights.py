"""Weights from Hugging Face to Megatron and back: the same bytes, whatever the layout on the way."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import hf_models
from tests.distributed.layouts import CASES, Case, build, list_layouts, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change


def round_trip(case: Case, folder: Path, out: Path) -> dict[str, object]:
    """Load a folder, save it as it is, stream it, then double every weight and save it again."""
    with start_session(case) as session:
        model = build(session, case, folder)
        saved = model.weights.save_hf(out / "same", source=folder)
        streamed = [dict(bucket) for bucket in model.weights.stream(bucket_bytes=40_000)]
        with torch.no_grad():
            for shard in model.weights.shards:
                shard.parameter.mul_(2)
        doubled = model.weights.save_hf(out / "doubled", source=folder)
        return {
            "saved": saved,
            "doubled": doubled,
            "fingerprint": model.weights.fingerprint(),
            "half": model.weights.fingerprint("bfloat16"),
            "streamed": {name: tensor for bucket in streamed for name, tensor in bucket.items()},
            "num_buckets": len(streamed),
        }


def round_trips(world_size: int, folders: dict[str, Path], out: Path) -> dict[tuple[str, str], dict]:
    """Try every layout of `world_size` ranks, each with the weights that the previous one saved."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for model, folder in folders.items():
        source = folder
        for name in list_layouts(model):
            if CASES[name].world_size == world_size:
                results[name, model] = round_trip(CASES[name], source, out / name / model)
                source = out / name / model / "same"
    return results


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["common", "others"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = [name for name in hf_models.CONFIGS if (name in hf_models.COMPARED_LESS_OFTEN) is request.param]
    return {name: hf_models.draw(name, root / name) for name in names}


@pytest.fixture(scope="module")
def out(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def trips(folders: dict[str, Path], out: Path) -> dict[tuple[str, str], list[dict]]:
    results: dict[tuple[str, str], list[dict]] = {}
    for world_size in (1, 2, 4):
        for ranks in run_ranks(round_trips, world_size, world_size, folders, out):
            for key, result in ranks.items():
                results.setdefault(key, []).append(result)
    return results


def test_every_layout_returns_the_bytes_it_was_given(trips, folders, out) -> None:
    for layout, model in trips:
        given = load_file(folders[model] / "model.safetensors")
        returned = load_file(out / layout / model / "same" / "model.safetensors")
        assert given.keys() == returned.keys()
        for name, tensor in given.items():
            assert torch.equal(tensor.view(torch.int32), returned[name].view(torch.int32)), (layout, model, name)


def test_a_change_of_every_shard_is_exported(trips, folders, out) -> None:
    for layout, model in trips:
        given = load_file(folders[model] / "model.safetensors")
        doubled = load_file(out / layout / model / "doubled" / "model.safetensors")
        for name, tensor in given.items():
            # What is not trained is copied.
            wanted = tensor if hf_models.is_of_tower(name) else tensor * 2
            assert torch.equal(wanted, doubled[name]), (layout, model, name)


def test_the_stream_yields_every_tensor_once_on_rank_0(trips, folders) -> None:
    for (layout, model), ranks in trips.items():
        stored = load_file(folders[model] / "model.safetensors")
        stored = {name: tensor for name, tensor in stored.items() if not hf_models.is_of_tower(name)}
        given = hf_models.split_stacks(stored)
        first, *others = (rank["streamed"] for rank in ranks)
        assert sorted(first) == sorted(given), (layout, model)
        assert not any(others)
        assert all(rank["num_buckets"] > 3 for rank in ranks)
        for name, tensor in first.items():
            assert torch.equal(tensor, given[name]), (layout, model, name)


def test_the_fingerprint_belongs_to_the_weights_and_not_to_the_layout(trips, folders) -> None:
    for key in ("saved", "doubled", "fingerprint", "half"):
        for model in folders:
            seen = {rank[key] for (_, name), ranks in trips.items() if name == model for rank in ranks}
            assert len(seen) == 1, (key, model)
    for ranks in trips.values():
        assert ranks[0]["doubled"] == ranks[0]["fingerprint"] != ranks[0]["saved"]
        assert ranks[0]["half"] != ranks[0]["fingerprint"]


def test_transformers_loads_what_was_saved(folders, out) -> None:
    tokens = torch.tensor([hf_models.sequences([30])[0]])
    pairs = {
        "qwen3": "TP2xPP2", "qwen3_moe": "EP2xPP2", "llama_biased": "PP2xVPP2", "glm4_moe": "PP2xVPP2",
        "qwen2_moe": "EP2xPP2", "seed_oss": "TP2xPP2", "qwen3_next": "EP2xPP2", "qwen3_5": "TP2xPP2",
        "gemma3_text": "PP2xVPP2", "deepseek_v3": "TP2+SP,EP2,ETP1", "deepseek_v3_direct": "PP2xVPP2",
        "glm4_moe_lite": "EP2xPP2", "gpt_oss": "EP2xPP2", "deepseek_v2": "TP2+SP,EP2,ETP1",
        "ernie4_5": "TP2xPP2", "qwen3_5_moe": "PP2xVPP2", "minimax_m2": "TP2+SP,EP2,ETP1",
        "qwen3_vl": "TP2xPP2", "qwen3_5_images": "TP2xPP2", "gemma3": "PP2xVPP2",
    }  # fmt: skip
    for model in folders.keys() & pairs.keys():
        logits = [
            hf_models.load(folder)(tokens).logits for folder in (folders[model], out / pairs[model] / model / "same")
        ]
        assert torch.equal(*logits)
