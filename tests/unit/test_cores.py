"""Cores of a host: their division among ranks and engines, and the binding of a process to some of them."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config.hardware import CoreShares, count_cores, find_asked_threads, share_cores
from megatron_rl.platforms import cuda, host
from megatron_rl.platforms.host import read_core_list
from tests.processes import run_python


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "num_workers", "asked", "of_rank", "of_worker"),
    [
        (2, 1, 1, None, 1, 1),
        (2, 2, 1, None, 1, 1),
        (1, 4, 2, None, 1, 1),
        (64, 4, 2, None, 8, 16),
        (63, 1, 1, None, 32, 31),
        (64, 4, 0, None, 16, 32),
        (64, 0, 2, None, 1, 32),
        (8, 2, 1, 2, 3, 2),
        (8, 2, 1, 100, 1, 100),
    ],
)
def test_ranks_and_engines_have_half_of_the_cores_each_and_a_thread_at_least(
    num_cores: int, num_ranks: int, num_workers: int, asked: int | None, of_rank: int, of_worker: int
) -> None:
    assert share_cores(num_cores, num_ranks, num_workers, asked) == CoreShares(num_cores, of_rank, of_worker)


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000", None), ("200000 100000", 2), ("50000 100000", 1), ("", None), (None, None)]
)
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, text: str | None, most: int | None) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    found = len(os.sched_getaffinity(0))
    assert count_cores(tmp_path / "cpu.max") == (found if most is None else min(most, found))


def test_threads_that_torchrun_has_set_by_itself_are_nobodys_wish() -> None:
    # The child of this process is like a rank of torchrun: it sees its own variables, and those its parent began with.
    child = "from megatron_rl.config.hardware import find_asked_threads; print(find_asked_threads())"
    launcher = (
        "import os, subprocess, sys; os.environ.setdefault('OMP_NUM_THREADS', '1'); "
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    without = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    by_torchrun = {**without, "TORCHELASTIC_RUN_ID": "none"}
    assert run_python(launcher, env=by_torchrun).strip() == "None"
    assert run_python(launcher, env={**by_torchrun, "OMP_NUM_THREADS": "3"}).strip() == "3"
    assert run_python(launcher, env=without).strip() == "1"
    assert run_python(child, env=without).strip() == "None"


def test_threads_are_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert find_asked_threads() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert find_asked_threads() == 4


def test_a_rank_is_bound_to_the_cores_of_its_gpu_unless_it_is_bound_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(cuda.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(cuda, "_PCI_DEVICES", tmp_path)
    mine, bound = set(range(8)), []
    monkeypatch.setattr(host.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda process: mine)
    monkeypatch.setattr(host.os, "sched_setaffinity", lambda process, cores: bound.append(cores))
    platform = cuda.CudaPlatform()
    platform.place(1)
    assert bound == []
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    platform.place(1)
    assert bound == []
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", lambda index: device)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("0-1,6\n")
    platform.place(1)
    assert bound == [{0, 1, 6}]
    mine.remove(7)
    platform.place(1)
    assert bound == [{0, 1, 6}]


def test_lists_of_cores_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "list"
    for text, expected in (("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("none", set())):
        path.write_text(text)
        assert read_core_list(path) == expected
    assert read_core_list(tmp_path / "nowhere") == set()
