"""Publishes from emulated devices: the streamed tensors, and the order in which streams hand them over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import hf_models
from tests.distributed.test_stream_publish import MODELS, streams
from tests.ranks import run_ranks
from tests.rehearsal.streams import state

pytestmark = pytest.mark.each_change


def stream(world_size: int, folders: dict[str, Path]) -> tuple[dict[Any, dict[str, Any]], list[str]]:
    return streams(world_size, folders), state.faults


def test_every_layout_streams_the_models_numbers_from_its_devices(tmp_path) -> None:
    folders = {name: hf_models.draw(name, tmp_path / name) for name in MODELS}
    ranks = run_ranks(stream, 2, 2, folders, platform="rehearsed")
    assert not any(faults for _, faults in ranks)
    for (_, model, _), sent in ranks[0][0].items():
        given = load_file(folders[model] / "model.safetensors")
        assert sent["fingerprint"] == sent["own"]
        assert sent["tensors"].keys() == given.keys()
        assert all(torch.equal(tensor, given[name].to(tensor.dtype)) for name, tensor in sent["tensors"].items())
