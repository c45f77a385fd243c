"""Small tensors of a device are written together: those of adapters, and of weights with merged ones."""

from pathlib import Path

import torch

from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.mapping import TensorSpec
from tests.ranks import run_ranks


def _write(folder: Path) -> tuple[str, bool]:
    from megatron_rl import platforms

    device = platforms.select("npu").device()
    given = {name: torch.arange(6.0).view(2, 3) + number for number, name in enumerate("ab")}
    plan = files.FilePlan([TensorSpec(name, (2, 3), "float32") for name in given])
    files.create(folder, plan)
    with files.Writer(folder, plan) as writer:
        writer.put_whole([(name, tensor.to(device)) for name, tensor in given.items()])
    with files.Checkpoint(folder) as checkpoint:
        return device.type, all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in given.items())


def test_whole_tensors_of_a_device_arrive_in_files(tmp_path: Path) -> None:
    ((kind, is_equal),) = run_ranks(_write, 1, tmp_path / "version", platform="rehearsed")
    assert kind != "cpu"
    assert is_equal
