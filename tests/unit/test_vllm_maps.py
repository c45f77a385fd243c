"""An engine's maps of the weights that a trainer publishes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.errors import InputError
from megatron_rl.sidecar.vllm import received
from megatron_rl.sidecar.vllm.received import Maps, map_file_tensors, read_started_from

TENSORS = {"b.weight": torch.arange(12.0).view(4, 3), "a.bias": torch.arange(5).to(torch.bfloat16)}


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def made(folder: Path) -> Path:
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    return folder


def test_tensors_are_found_in_the_order_in_which_they_lie_and_show_what_is_written_later(memory: Path) -> None:
    found = map_file_tensors(made(memory / "one"))
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    places = [tensor.data_ptr() for tensor in found.values()]
    assert places == sorted(places)
    with (memory / "one" / "model.safetensors").open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(torch.ones(5, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    assert found["a.bias"].tolist() == [1.0] * 5


def test_two_folders_in_memory_stay_mapped_under_any_name_for_as_long_as_they_exist(memory: Path) -> None:
    one, two = made(memory / "one"), made(memory / "two")
    kept = Maps()
    with mock.patch.object(received, "_map", wraps=received._map) as mapped:
        first, second = kept.find(one), kept.find(two)
        for _ in range(3):
            one, two = one.rename(memory / "later"), two.rename(memory / "last")
            assert kept.find(one) is first
            assert kept.find(two) is second
        assert mapped.call_count == 2
        kept.find(made(memory / "third"))
        assert mapped.call_count == 3
        assert kept.find(one) is not first
        assert mapped.call_count == 4


def test_a_removed_map_is_released(memory: Path) -> None:
    kept = Maps()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        folder = made(memory / str(number))
        kept.find(folder)
        shutil.rmtree(folder)
    left = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(memory) in line]
    assert len(left) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_files_that_are_not_in_memory_are_mapped_each_time(tmp_path: Path) -> None:
    folder, kept = made(tmp_path / "one"), Maps()
    with mock.patch.object(received, "_map", wraps=received._map) as mapped:
        kept.find(folder)
        kept.find(folder)
    assert mapped.call_count == 2


def test_a_folder_without_tensors_and_half_a_file_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must hold a safetensors file"):
        map_file_tensors(tmp_path)
    folder = made(tmp_path / "one")
    os.truncate(folder / "model.safetensors", 200)
    with pytest.raises(InputError, match="cannot be read"):
        map_file_tensors(folder)


def test_an_engine_that_starts_from_mxfp4_is_refused_with_a_remedy(tmp_path: Path) -> None:
    blocks = {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8)}
    save_file(blocks, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="experts in MXFP4.*start them from a folder of the model in bfloat16"):
        read_started_from(tmp_path)


class Device:
    """A device that only notes which pages are locked; it refuses those of one file."""

    def __init__(self, refused: Path | None = None) -> None:
        self.refused = None if refused is None else refused.stat().st_size
        self.locked: dict[int, int] = {}
        self.num_calls = 0

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        self.num_calls += 1
        assert mapped.data_ptr() % os.sysconf("SC_PAGESIZE") == 0
        if mapped.nbytes == self.refused:
            return "not permitted"
        self.locked[mapped.data_ptr()] = mapped.nbytes
        return None

    def page_unlock(self, mapped: torch.Tensor) -> None:
        del self.locked[mapped.data_ptr()]


def test_pages_of_kept_maps_are_locked_once_and_unlocked_with_their_map(memory: Path, tmp_path: Path) -> None:
    device = Device()
    kept, one, two = Maps(device), made(memory / "one"), made(memory / "two")
    size = (one / "model.safetensors").stat().st_size
    for _ in range(3):
        kept.find(one)
        kept.find(two)
    kept.find(made(tmp_path / "on disk"))
    assert (list(device.locked.values()), device.num_calls) == ([size, size], 2)
    first = kept.find(one)["b.weight"].untyped_storage().data_ptr()
    assert first in device.locked
    kept.find(made(memory / "third"))
    assert first not in device.locked
    assert (len(device.locked), device.num_calls) == (2, 3)


def test_pages_that_cannot_be_locked_are_mapped_all_the_same_and_never_unlocked(memory: Path, caplog) -> None:
    one = made(memory / "one")
    device = Device(refused=one / "model.safetensors")
    kept = Maps(device)
    assert torch.equal(kept.find(one)["b.weight"], TENSORS["b.weight"])
    shutil.rmtree(one)
    kept.find(made(memory / "two"))
    assert device.locked == {}
    assert [record.args for record in caplog.records] == [("not permitted",)]
