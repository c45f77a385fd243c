"""Files that exports fill, on the host or from a device in parcels, hold the bytes that `files.Writer` writes."""

import dataclasses
import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.platforms.cuda import CudaPlatform
from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.device_export import DeviceExport
from megatron_rl.shared.weights.mapping import Coordinates, Mapping
from megatron_rl.shared.weights.parcels import plan_parcels
from megatron_rl.shared.weights.shards import Digests, HostExport, Shard, export, map_shards
from megatron_rl.types import Architecture, Experts
from tests.command_lines import QWEN3
from tests.deliveries import give_memory

SMALL = dataclasses.replace(QWEN3, num_layers=2)
# Its routers' biases are published in float32, whatever the dtype of the others.
MIXED = dataclasses.replace(
    SMALL,
    family="glm4_moe",
    experts=Experts(4, 2, 32, score="sigmoid", has_bias=True, num_dense_layers=1, shared_ffn_hidden_size=32),
)


def draw_shards(architecture: Architecture, size: int = 1, dtype: torch.dtype = torch.float32) -> list[list[Shard]]:
    """Draw the shards of all tensor-parallel ranks, with a padded vocabulary."""
    mapping = Mapping(architecture)
    padded = 208
    names = [name.parameters[0].format(layer=layer, expert=expert) for name, layer, expert in mapping._instances()]
    ranks = []
    for rank in range(size):
        # Experts are not divided, and the first rank writes them.
        coordinates = Coordinates(tensor_rank=rank, tensor_size=size, expert_data_rank=rank)
        generator = torch.Generator().manual_seed(rank)
        parameters = [
            (name, torch.randn(mapping.shard(name, coordinates, padded).shape, generator=generator).to(dtype))
            for name in names
        ]
        ranks.append(map_shards(mapping, coordinates, padded, parameters))
    return ranks


class Device(CpuPlatform):
    """A platform that records what it page-locks, and that may refuse."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.locked: list[int] = []
        self.num_locks = 0
        self.num_buffers = 0

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        if self.refusal is None:
            self.locked.append(mapped.data_ptr())
            self.num_locks += 1
        return self.refusal

    def page_unlock(self, mapped: torch.Tensor) -> None:
        self.locked.remove(mapped.data_ptr())

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.num_buffers += 1
        return super().host_buffer(num_bytes)


memory = pytest.fixture(give_memory)


def write_plainly(ranks: list[list[Shard]], plan: files.FilePlan, folder: Path) -> dict[str, bytes]:
    files.create(folder, plan)
    with files.Writer(folder, plan) as writer:
        for shards in ranks:
            export(shards, list(plan.specs.values()), [writer.put])
    return read(folder)


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("kind", ["host", "device", "device without locks"])
@pytest.mark.parametrize(
    ("architecture", "size", "dtype", "exported"),
    [
        (SMALL, 1, torch.float32, "float32"),
        (SMALL, 1, torch.float32, "bfloat16"),
        (SMALL, 2, torch.bfloat16, "bfloat16"),
        (MIXED, 2, torch.bfloat16, "bfloat16"),
    ],
)
def test_exports_write_the_bytes_that_are_written_block_by_block(
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    architecture: Architecture,
    size: int,
    dtype: torch.dtype,
    exported: str,
) -> None:
    monkeypatch.setattr(files, "_MAX_FILE_BYTES", 60_000 if architecture is MIXED else 100_000)
    # On the host, tensors below this size are written together if the rank has all of them.
    monkeypatch.setattr("megatron_rl.shared.weights.shards._SMALL_ELEMENTS", 5000)
    ranks = draw_shards(architecture, size, dtype)
    plan = files.FilePlan(Mapping(architecture).manifest(exported))
    assert len(plan.sizes) > 1
    wanted = write_plainly(ranks, plan, memory / "plain")
    device = Device("no memory may be locked" if kind == "device without locks" else None)
    counts: dict[str, int] = {}

    def count(name: str, num_elements: int) -> None:
        counts[name] = counts.get(name, 0) + num_elements

    for folder, counter in ((memory / "counted", count), (memory / "silent", None)):
        files.create(folder, plan)
        for of_rank in ranks:
            given = of_rank[::-1]
            written = HostExport(given, plan, 0.5) if kind == "host" else DeviceExport(device, given, plan, 10_000)
            written.write(folder, counter)
        assert read(folder) == wanted
    assert counts == {name: spec.num_elements for name, spec in plan.specs.items()}
    # Columns of a tensor are staged, as is everything if files cannot be locked.
    assert (device.num_buffers > 0) == (kind == "device without locks" or (kind == "device" and size > 1))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4).filter(lambda size: size != 3), st.integers(100, 60_000), st.booleans())
def test_each_owned_byte_is_in_one_parcel_once(size: int, most_bytes: int, is_narrow: bool) -> None:
    plan = files.FilePlan(Mapping(SMALL).manifest("bfloat16" if is_narrow else "float32"))
    filled = {file: torch.zeros(num_bytes, dtype=torch.uint8) for file, num_bytes in plan.sizes.items()}
    for shards in draw_shards(SMALL, size):
        for parcel in plan_parcels(shards, plan, most_bytes):
            assert parcel.num_bytes <= most_bytes or len(parcel.parts) == 1
            used = 0
            for part in parcel.parts:
                assert part.first_byte == used
                used += part.num_bytes
                for row in range(part.num_rows):
                    place = part.file_byte + row * part.pitch_bytes
                    filled[parcel.file][place : place + part.row_bytes] += 1
            strips = parcel.list_strips()
            assert sum(strip.num_bytes for strip in strips) == used
            runs = [strip for strip in strips if strip.num_rows == 1]
            assert sum(run.num_bytes for run in runs) == sum(p.num_bytes for p in parcel.parts if p.is_run)
            assert all(one.first_byte + one.num_bytes < other.first_byte for one, other in itertools.pairwise(runs))
            if size == 1:
                assert len(strips) == 1
    for file, header in plan.headers.items():
        assert (filled[file][: len(header)] == 0).all()
        assert (filled[file][len(header) :] == 1).all()


def test_two_folders_that_take_turns_are_locked_once_and_a_new_one_is_locked_again(memory: Path) -> None:
    ((shards,), device) = draw_shards(SMALL), Device()
    plan = files.FilePlan(Mapping(SMALL).manifest())
    written = DeviceExport(device, shards, plan)
    files.create(memory / "0", plan)
    files.create(memory / "1", plan)
    written.write(memory / "0")
    written.write(memory / "1")
    for version in range(2, 6):
        (memory / f"{version - 2}").rename(memory / f"{version}")
        with torch.no_grad():
            shards[0].parameter.add_(1)
        written.write(memory / f"{version}")
        assert read(memory / f"{version}") == write_plainly([shards], plan, memory / f"plain-{version}")
    assert device.num_locks == len(device.locked) == 2 * len(plan.sizes)
    # A user removes the spare folder: the version goes into new files under its name, and not into the old ones.
    for path in (memory / "4").iterdir():
        path.unlink()
    written.write(memory / "5")
    files.create(memory / "new", plan)
    written.write(memory / "new")
    assert read(memory / "new") == read(memory / "5")
    assert device.num_locks == 3 * len(plan.sizes)
    assert len(device.locked) == 2 * len(plan.sizes)
    written.forget_files()
    assert device.locked == []


def test_a_refusal_is_said_once_with_its_reason(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    ((shards,), device) = draw_shards(SMALL), Device("cudaHostRegister: operation not supported")
    plan = files.FilePlan(Mapping(SMALL).manifest())
    written = DeviceExport(device, shards, plan)
    with caplog.at_level(logging.WARNING):
        for version in range(3):
            files.create(memory / f"{version}", plan)
            written.write(memory / f"{version}")
    (message,) = (record.getMessage() for record in caplog.records if "page-locked" in record.getMessage())
    assert "operation not supported" in message
    written.forget_files()


@pytest.mark.parametrize("architecture", [SMALL, MIXED], ids=lambda one: one.family)
def test_parameters_that_are_moved_are_written_and_digested_where_they_lie_now(
    memory: Path, architecture: Architecture
) -> None:
    (shards,) = draw_shards(architecture)
    plan = files.FilePlan(Mapping(architecture).manifest("float32" if architecture is SMALL else "bfloat16"))
    device_export = DeviceExport(Device(), shards, plan)
    for version in range(2):
        for shard in shards:
            shard.parameter.data = shard.parameter.data + 1
        files.create(memory / f"{version}", plan)
        device_export.write(memory / f"{version}")
        assert read(memory / f"{version}") == write_plainly([shards], plan, memory / f"plain-{version}")
        found, expected = (Digests(list(plan.specs.values())) for _ in range(2))
        device_export.add_digests(found)
        expected.add_shards(shards)
        assert found.combine() == expected.combine()


class Runtime:
    """The functions of CUDA's runtime that lock memory."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, code: int) -> None:
        self.code = code
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        if self.code == 0:
            self.ranges[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.ranges.pop(address, None) else 713

    def cudaGetErrorString(self, code: int) -> str:
        return {801: "operation not supported"}[code]


def test_cuda_locks_the_whole_mapping_and_names_its_reason_if_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = torch.zeros(5000, dtype=torch.uint8)
    platform: Any = CudaPlatform()
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None if code == 0 else pytest.fail(str(code)))
    monkeypatch.setattr(platform, "device", lambda: torch.device("cpu"))
    assert platform.page_lock(mapped) is None
    assert runtime.ranges == {mapped.data_ptr(): 5000}
    platform.page_unlock(mapped)
    assert runtime.ranges == {}
    runtime.code = 801
    assert platform.page_lock(mapped) == "cudaHostRegister: operation not supported"
