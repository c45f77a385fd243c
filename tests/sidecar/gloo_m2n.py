"""vLLM's `nccl_m2n` transfer engines on a CPU: all of them is vLLM's own except the wire and CUDA's streams.

A stand-in has the place of the module `nccl.m2n`. It moves tensors over gloo and follows the contract of NCCL M2N's
header and Python interface (nccl-extensions 0.1): what these refuse, it refuses. Where they demand that all ranks give
the same description, which the library cannot check, it compares them.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import math
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm import _custom_ops
from vllm.distributed.weight_transfer import m2n_engine, m2n_trainer

from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered

_TIMEOUT = datetime.timedelta(seconds=60)
_DTYPES = {
    "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int32", "uint32", "float32", "int64",
    "uint64", "float64",
}  # fmt: skip


class Extension(WorkerExtension):
    @answered
    def megatron_rl_count_direct(self) -> dict[str, Any]:
        """Count the parameters that the latest stream wrote where they lie, and the handles that are left."""
        return {"direct": len(self.megatron_rl_stream_record.direct), "handles": Handle.num_alive}


class Group:
    """The part of a communicator that vLLM and the stand-in use. Its handle is found by its number."""

    by_number: ClassVar[dict[int, "Group"]] = {}
    num_sent: ClassVar[dict[int, int]] = {}
    """The bytes that each rank of this process has sent to others."""

    def __init__(self, address: str, port: int, rank: int, world_size: int):
        assert 0 <= rank < world_size
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=_TIMEOUT)
        self.rank, self.world_size, self.device = rank, world_size, torch.device("cpu")
        # Two ranks with one number would wait for ever.
        assert store.add(f"rank {rank}", 1) == 1, f"two processes have rank {rank}"
        self.gloo = dist.ProcessGroupGloo(store, rank, world_size, _TIMEOUT)
        self.comm = ctypes.c_void_p(len(self.by_number) + 1)
        self.by_number[len(self.by_number) + 1] = self

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self.gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self.gloo


class NcclInvalid(ValueError):
    """The error of a call that breaks the contract."""


@dataclasses.dataclass(frozen=True)
class Replicate:
    pass


@dataclasses.dataclass(frozen=True)
class Shard:
    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"Shard dim must be non-negative, got {self.dim}")


class Mesh:
    """The ranks from `start_rank` on, in one or two dimensions."""

    def __init__(self, dims: Sequence[int], start_rank: int = 0) -> None:
        if not 1 <= len(dims) <= 2 or any(dim <= 0 for dim in dims) or start_rank < 0:
            raise ValueError(f"mesh {dims} at {start_rank}")
        self.dims, self.start_rank = tuple(dims), start_rank

    @property
    def ranks(self) -> range:
        return range(self.start_rank, self.start_rank + math.prod(self.dims))


@dataclasses.dataclass(frozen=True)
class Config:
    max_cta: int | None = None

    def __post_init__(self) -> None:
        if self.max_cta is not None and self.max_cta <= 0:
            raise ValueError(f"max_cta must be positive or None, got {self.max_cta}")


class Handle:
    num_alive: ClassVar[int] = 0

    def __init__(self) -> None:
        self.is_alive = True
        Handle.num_alive += 1

    @classmethod
    def create(cls, config: Config | None = None) -> "Handle":
        if not (config is None or isinstance(config, Config)):
            raise TypeError("config must be nccl.m2n.Config or None")
        return cls()

    def destroy(self) -> None:
        Handle.num_alive -= self.is_alive
        self.is_alive = False


Box = tuple[range, ...]


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side of a reshard, as every rank describes it."""

    mesh: Mesh
    placements: tuple[Replicate | Shard, ...]
    shape: tuple[int, ...]

    @property
    def factors(self) -> list[int]:
        """The number of parts along each dimension of the tensor."""
        factors = [1] * len(self.shape)
        for size, placement in zip(self.mesh.dims, self.placements, strict=True):
            if isinstance(placement, Shard):
                factors[placement.dim] *= size
        return factors

    def box(self, rank: int) -> Box:
        """Find the part of the tensor that a rank has."""
        place, box = rank - self.mesh.start_rank, [range(size) for size in self.shape]
        places = (place // math.prod(self.mesh.dims[1:]), place % math.prod(self.mesh.dims[1:]))
        for index, (size, placement) in enumerate(zip(self.mesh.dims, self.placements, strict=True)):
            if isinstance(placement, Shard):
                length = self.shape[placement.dim] // size
                box[placement.dim] = range(places[index] * length, (places[index] + 1) * length)
        return tuple(box)


def _check_side(mesh: Any, placements: Any, num_dims: int, side: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{side}_mesh must be a Mesh")
    if len(placements) != len(mesh.dims):
        raise ValueError(f"{side}_placements must match the rank of {side}_mesh")
    if not all(isinstance(placement, Replicate | Shard) for placement in placements):
        raise TypeError(f"{side}_placements {placements}")
    divided = [placement for placement in placements if isinstance(placement, Shard)]
    if len(divided) > 1:
        raise NcclInvalid(f"{side}: a sharded layout must have exactly one SHARD axis")
    if any(placement.dim >= num_dims for placement in divided):
        raise ValueError(f"{side}_placements {placements} of a tensor of rank {num_dims}")


def reshard(
    src: torch.Tensor | None,
    dst: torch.Tensor | None,
    comm: int,
    stream: Any = None,
    *,
    src_mesh: Any = None,
    src_placements: Any = None,
    dst_mesh: Any = None,
    dst_placements: Any = None,
    handle: Handle | None = None,
) -> None:
    """Move a tensor from the ranks of one mesh to those of another; all ranks of the group call it."""
    if handle is None or not handle.is_alive:
        raise NcclInvalid("the handle was destroyed")
    group = Group.by_number[comm]
    buffers = [buffer for buffer in (src, dst) if buffer is not None]
    if not buffers:
        raise ValueError("reshard requires src_local_shape or dst_local_shape when both src and dst are None")
    (given,) = buffers
    num_dims, dtype = given.dim(), str(given.dtype).removeprefix("torch.")
    if not 1 <= num_dims <= 3:
        raise ValueError(f"tensor rank must be 1..3, got {tuple(given.shape)}")
    if dtype not in _DTYPES:
        raise NcclInvalid(f"unsupported NCCL Reshard dtype: {dtype}")
    if not given.is_contiguous():
        raise ValueError("the tensor must be contiguous")
    _check_side(src_mesh, src_placements, num_dims, "src")
    _check_side(dst_mesh, dst_placements, num_dims, "dst")
    ranks = {"src": src_mesh.ranks, "dst": dst_mesh.ranks}
    if max(ranks["src"][-1], ranks["dst"][-1]) >= group.world_size:
        raise NcclInvalid("a mesh reaches beyond the communicator")
    if set(ranks["src"]) & set(ranks["dst"]):
        raise NcclInvalid("the rank intervals of the meshes must be disjoint")
    for name, buffer in (("src", src), ("dst", dst)):
        if (buffer is not None) != (group.rank in ranks[name]):
            raise NcclInvalid(f"{name}: the ranks of the mesh, and no others, must give a buffer")
    # The whole shape follows from the part that is given.
    own_mesh, own_placements = (src_mesh, src_placements) if src is not None else (dst_mesh, dst_placements)
    factors = _Side(own_mesh, tuple(own_placements), tuple(given.shape)).factors
    shape = tuple(size * factor for size, factor in zip(given.shape, factors, strict=True))
    sides = [_Side(src_mesh, tuple(src_placements), shape), _Side(dst_mesh, tuple(dst_placements), shape)]
    for side in sides:
        if any(size % factor for size, factor in zip(shape, side.factors, strict=True)):
            raise ValueError(f"{shape} is not divisible by {side.factors}")
    _must_be_the_same(
        group, [shape, dtype, *((side.mesh.dims, side.mesh.start_rank, side.placements) for side in sides)]
    )
    _move(group, src, dst, *sides)


def _must_be_the_same(group: Group, description: list[Any]) -> None:
    """Raise unless every rank describes the same reshard: the library would wait for ever, or mix tensors up."""
    mine = torch.tensor(list(repr(description).encode().ljust(400)[:400]), dtype=torch.uint8)
    everyone = [[torch.empty_like(mine) for _ in range(group.world_size)]]
    group.gloo.allgather(everyone, [mine]).wait()
    assert all(torch.equal(other, mine) for other in everyone[0]), [bytes(one.tolist()) for one in everyone[0]]


def _move(group: Group, src: torch.Tensor | None, dst: torch.Tensor | None, from_: _Side, to: _Side) -> None:
    waiting = []
    for receiver, (sender, box) in _plan(from_, to):
        if group.rank == sender:
            assert src is not None
            part = _cut(src, box, from_.box(sender)).contiguous()
            Group.num_sent[sender] = Group.num_sent.get(sender, 0) + part.numel() * part.element_size()
            waiting.append((group.gloo.send([part], receiver, 0), part, None))
        elif group.rank == receiver:
            assert dst is not None
            target = _cut(dst, box, to.box(receiver))
            part = torch.empty_like(target, memory_format=torch.contiguous_format)
            waiting.append((group.gloo.recv([part], sender, 0), part, target))
    for work, part, target in waiting:
        work.wait()
        if target is not None:
            target.copy_(part)


def _plan(from_: _Side, to: _Side) -> Iterator[tuple[int, tuple[int, Box]]]:
    """Yield, for each receiver, the senders of the parts that it needs: each part from one of those that hold it."""
    for number, receiver in enumerate(to.mesh.ranks):
        holders: dict[Box, list[int]] = {}
        for sender in from_.mesh.ranks:
            holders.setdefault(from_.box(sender), []).append(sender)
        if len(holders) > 16:
            raise NcclInvalid("MAX_SOURCES")
        for box, senders in holders.items():
            shared = tuple(_overlap(*pair) for pair in zip(box, to.box(receiver), strict=True))
            if all(shared):
                yield receiver, (senders[number % len(senders)], shared)


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _cut(tensor: torch.Tensor, box: Box, held: Box) -> torch.Tensor:
    for dim, (wanted, own) in enumerate(zip(box, held, strict=True)):
        tensor = tensor.narrow(dim, wanted.start - own.start, len(wanted))
    return tensor


class _Stream:
    def synchronize(self) -> None: ...


def _of_worker(info: Any, parallel: Any) -> Group:
    worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return Group(info.master_address, info.master_port, info.rank_offset + worker, info.world_size)


def _of_trainer(info: dict[str, Any], rank: int) -> Group:
    return Group(info["master_address"], info["master_port"], rank, info["world_size"])


def put_in_place() -> None:
    """Take the place of NCCL M2N, of NCCL's groups and of CUDA's streams in this process."""
    module = types.ModuleType("nccl.m2n")
    for one in (Config, Handle, Mesh, Replicate, Shard, reshard):
        setattr(module, one.__name__, one)
    sys.modules["nccl"] = types.ModuleType("nccl")
    sys.modules["nccl"].m2n = sys.modules["nccl.m2n"] = module
    m2n_engine.worker_init_process_group, m2n_trainer.trainer_init = _of_worker, _of_trainer
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.accelerator.synchronize = lambda device=None: None
    torch.Tensor.record_stream = lambda tensor, stream: None
    # vLLM packs every linear layer on a CPU with it, and writes no packed parameter where it lies.
    _custom_ops._supports_onednn = False


put_in_place()
