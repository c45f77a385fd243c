"""vLLM's `nccl` transfer engine on a CPU: all of it is vLLM's own except the wire (gloo) and CUDA's streams."""

import contextlib
import datetime
import socket
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import nccl_engine, packed_tensor

from megatron_rl.sidecar.vllm.worker import WorkerExtension as Extension

__all__ = ["Extension"]
_TIMEOUT = datetime.timedelta(seconds=60)


class Group:
    """The part of a communicator that vLLM uses."""

    def __init__(self, address: str, port: int, rank: int, world_size: int):
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=_TIMEOUT)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _TIMEOUT
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_find_source(address))]
        self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self._group


def _find_source(address: str) -> str:
    """Return the address from which this host connects to that one: an engine's own variables name the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


class _Stream:
    def synchronize(self) -> None: ...


def _of_trainer(info: Any) -> Group:
    return Group(info.master_address, info.master_port, 0, info.world_size)


def _of_worker(info: Any, parallel: Any) -> Group:
    return Group(info.master_address, info.master_port, info.rank_offset + parallel.rank, info.world_size)


nccl_engine.open_trainer_endpoint = _of_trainer
nccl_engine.worker_init_process_group = _of_worker
packed_tensor._get_streams = lambda device, count: (_Stream(),) * count
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.accelerator.current_device_index = lambda: 0
