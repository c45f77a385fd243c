"""CUDA's handles are passed on as torch passes them, without its event; a GPU that cannot share is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from megatron_rl.platforms.cuda import CudaSharing
from megatron_rl.platforms.platform import CannotShare

pytestmark = pytest.mark.each_change

SHARED = (1, b"memory", 4096, 512, b"counter", 7, b"event", True)
"""The device's index, and all that torch says about a storage that it shares."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two GPUs, of which this process uses the first one."""
    found = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", segments=[{"is_expandable": False}], peers={(0, 1)}, opened=[]
    )

    def new_shared(*arguments: Any) -> Any:
        found.opened.append(arguments)
        raise RuntimeError("invalid resource handle\nCUDA kernel errors might be reported later")

    replaced = {
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "get_device_name": lambda: found.name,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid-{device}"),
        "memory_snapshot": lambda: found.segments,
        "can_device_access_peer": lambda one, other: (one, other) in found.peers,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared, raising=False)
    return found


def storage(shared: Any = SHARED) -> Any:
    def share() -> Any:
        if isinstance(shared, Exception):
            raise shared
        return shared

    return SimpleNamespace(device=SimpleNamespace(index=1), _share_cuda_=share)


def test_memory_is_opened_with_what_torch_would_open_it_with(gpus, monkeypatch):
    handle = CudaSharing().share(storage())
    assert handle.device == "uuid-1"
    with pytest.raises(CannotShare, match="memory of GPU uuid-1 cannot be opened: invalid resource handle$"):
        CudaSharing().open(handle)
    _, *shared = SHARED
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with pytest.raises(RuntimeError):
        reductions.rebuild_cuda_tensor(
            torch.Tensor, (8,), (1,), 0, torch.UntypedStorage, torch.float32, 0, *shared[:3], False, *shared[3:]
        )
    ours, torchs = gpus.opened
    # Torch's reader waits for an event of the writer's.
    assert ours == (*torchs[:-2], b"", False)


def test_memory_of_a_gpu_without_peer_access_is_not_opened(gpus):
    gpus.peers.clear()
    with pytest.raises(CannotShare, match="GPU uuid-0 has no peer access to uuid-1"):
        CudaSharing().open(CudaSharing().share(storage()))
    assert gpus.opened == []


def test_a_gpu_that_cannot_share_is_named_with_the_reason(gpus):
    assert CudaSharing().find_obstacles() == []
    gpus.name, gpus.segments = "NVIDIA A100-SXM4-40GB MIG 1g.5gb", [{}, {"is_expandable": True}]
    assert CudaSharing().find_obstacles() == [
        "GPU is divided into instances (MIG)",
        "memory has expandable segments (PYTORCH_CUDA_ALLOC_CONF)",
    ]
    with pytest.raises(CannotShare, match=r"the engine's GPU is divided into instances \(MIG\)"):
        CudaSharing().open(CudaSharing().share(storage()))
    with pytest.raises(CannotShare, match="^not supported$"):
        CudaSharing().share(storage(RuntimeError("not supported\nsee the manual")))
