"""The text model of a folder that holds a vision model too: transformers' log-probs, and every byte after an export."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import InputError
from megatron_rl.trainer.data.packing import pack_sequences
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks
from tests.truth import error_over_bound

pytestmark = pytest.mark.each_change

FAMILIES = ("qwen3_vl", "gemma3")
SEQUENCES = hf_models.sequences([40, 9])


def compute(folders: dict[str, Path], out: Path) -> dict[str, tuple[torch.Tensor, list[str], str]]:
    """Return log-probs, the names that are streamed, and the error of an export from a folder that is gone."""
    torch.distributed.init_process_group("gloo")
    found = {}
    with start_session(CASES["TP2"]) as session:
        for name, folder in folders.items():
            model = build(session, CASES["TP2"], folder)
            log_probs = torch.cat(model.forward([pack_sequences(SEQUENCES)]))
            model.weights.save_hf(out / name, source=folder, dtype="bfloat16")
            streamed = [tensor for bucket in model.weights.stream() for tensor, _ in bucket]
            moved = folder.with_name(f"{name}-moved")
            session.run_or_raise_everywhere(lambda: shutil.move(folder, moved) if session.rank == 0 else None)  # noqa: B023
            with pytest.raises(InputError) as caught:
                model.weights.save_hf(out / f"{name}-again", source=folder)
            found[name] = (log_probs, streamed, str(caught.value))
    return found


def test_the_text_is_transformers_and_the_vision_model_is_copied(tmp_path: Path) -> None:
    folders = {name: hf_models.draw(name, tmp_path / name, num_hidden_layers=4) for name in FAMILIES}
    expected = {
        name: [
            torch.cat(hf_models.log_probs(folder, SEQUENCES, dtype=dtype)) for dtype in (torch.float32, torch.float64)
        ]
        for name, folder in folders.items()
    }
    before = {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}
    for name, (ours, streamed, gone) in run_ranks(compute, 2, folders, tmp_path / "out")[0].items():
        assert error_over_bound(ours, *expected[name]) <= 1
        after, given = load_file(tmp_path / "out" / name / "model.safetensors"), before[name]
        assert after.keys() == given.keys()
        towers = {tensor for tensor in given if hf_models.is_of_tower(tensor)}
        assert towers
        for tensor, values in given.items():
            # The dtype of an export is that of the text.
            wanted = values if tensor in towers else values.to(torch.bfloat16)
            assert after[tensor].dtype is wanted.dtype
            assert torch.equal(after[tensor], wanted), (name, tensor)
        assert {*streamed} == given.keys() - towers
        assert "must hold *.safetensors" in gone
