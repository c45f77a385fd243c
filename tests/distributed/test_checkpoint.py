"""Megatron's checkpoints of a model: written in one layout, read in another, described by flags alone."""

from pathlib import Path

import pytest
import torch
import transformers

from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint.serialization import load_model, save_model
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks


def save_and_load(
    folders: dict[str, Path], out: Path, pairs: dict[str, list[tuple[str, str]]]
) -> tuple[dict[tuple[str, str, str], tuple], str]:
    """Save in the first layout of each pair; load in the second, over other weights, and take the fingerprint.

    Return also the error of a load into another model.
    """
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, folder in folders.items():
        for writer, reader in pairs[name]:
            target = out / name / f"{writer}-{reader}"
            with start_session(CASES[writer]) as session:
                model = build(session, CASES[writer], folder)
                saved = model.weights.fingerprint()
                save_model(model.chunks, target, 7, session)
            with start_session(CASES[reader]) as session:
                model = build(session, CASES[reader], folder)
                with torch.no_grad():
                    for shard in model.weights.shards:
                        shard.parameter.fill_(float("nan"))
                iteration = load_model(model.chunks, target, session)
                model.weights.zero_padding()
                finite = all(bool(shard.parameter.isfinite().all()) for shard in model.weights.shards)
                results[name, writer, reader] = (saved, model.weights.fingerprint(), iteration, finite)
                if reader == "PP2":
                    model.weights.save_hf(out / name / "derived")
    return results, load_another_model(out / "qwen3" / "TP2-PP2", folders["qwen2"])


def load_another_model(checkpoint: Path, folder: Path) -> str:
    with start_session(CASES["TP2"]) as session:
        model = build(session, CASES["TP2"], folder)
        before = model.weights.fingerprint()
        with pytest.raises(InputError) as caught:
            load_model(model.chunks, checkpoint, session)
        assert model.weights.fingerprint() == before
        return str(caught.value)


NAMES = ("qwen3", "qwen2", "mixtral", "glm4_moe", "qwen3_5", "gemma3_text", "gpt_oss", "minimax_m2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in NAMES}


def test_a_checkpoint_is_read_in_any_layout_and_gets_a_config_of_its_own(folders, tmp_path: Path) -> None:
    dense = [("TP2", "PP2"), ("PP2xVPP2", "TP2"), ("DP2+distopt", "PP2xVPP2")]
    experts = [("EP2", "PP2"), ("PP2", "EP2")]
    pairs = {
        "qwen3": dense,
        "qwen2": dense,
        "mixtral": experts,
        "glm4_moe": experts,
        "qwen3_5": dense[:2],
        "gemma3_text": [("PP2xVPP2", "PP2")],
        "gpt_oss": experts,
        # Ranks divide its norms of queries and keys.
        "minimax_m2": [("TP2+SP,EP2,ETP1", "PP2")],
    }
    ranks = run_ranks(save_and_load, 2, folders, tmp_path, pairs)
    for key, (saved, loaded, iteration, finite) in ranks[0][0].items():
        assert saved == loaded, key
        assert iteration == 7
        assert finite, f"{key}: the padding of the vocabulary was left as it was"
    tokens = torch.tensor([hf_models.sequences([50])[0]])
    for name, folder in folders.items():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
            for path in (folder, tmp_path / name / "derived")
        ]
        assert torch.equal(*logits), name
    for _, text in ranks:
        assert "linear_proj.weight has shape [4, 64, 256]" in text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no checkpoint"),
        ({"latest_checkpointed_iteration.txt": "soon"}, "must hold a number or `release`, not 'soon'"),
        ({"latest_checkpointed_iteration.txt": "12"}, "iter_0000012 must be a distributed checkpoint"),
        ({"latest_checkpointed_iteration.txt": "release"}, "release must be a distributed checkpoint"),
    ],
)
def test_a_folder_without_a_checkpoint_is_an_error_that_says_what_is_missing(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    from megatron_rl.trainer.mcore.checkpoint.serialization import find

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        find(tmp_path)
