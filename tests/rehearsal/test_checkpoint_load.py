"""A checkpoint is loaded onto an emulated device: how often the host waits, and which tensor is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import InputError
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks
from tests.rehearsal.streams import state
from tests.rehearsal.syncs import log

pytestmark = pytest.mark.each_change


def load(case: str, models: list[Path], broken: Path) -> tuple[list[list[str]], str, list[str]]:
    """Load each model; return the waits beside the copies, the refusal of a broken model, and the device's faults."""
    waits = []
    with start_session(CASES[case]) as session:
        for model in models:
            weights = build(session, CASES[case], model).weights
            with log.during() as syncs:
                weights.load_hf(model)
            waits.append([sync.what for sync in syncs if sync.what != "copy to the device"])
        try:
            weights.load_hf(broken)
            said = ""
        except InputError as error:
            said = str(error)
    return waits, said, state.faults


def test_the_waits_of_a_load_are_as_many_for_2_layers_as_for_8(tmp_path: Path) -> None:
    models = [hf_models.draw("qwen3", tmp_path / f"{count}", num_hidden_layers=count) for count in (2, 8)]
    broken = hf_models.draw("qwen3", tmp_path / "broken", num_hidden_layers=8)
    tensors = load_file(broken / "model.safetensors")
    for layer in (3, 5):
        tensors[f"model.layers.{layer}.self_attn.k_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    ((waits, said, faults),) = run_ranks(load, 1, "TP1", models, broken, platform="rehearsed")
    assert waits == [["_local_scalar_dense"]] * 2
    assert said.startswith(f"model.layers.3.self_attn.k_proj.weight in {broken} holds numbers that are not finite in")
    assert faults == []
