"""Weights that stream from every rank of the trainer, each of which sends its own parts (vLLM's `nccl_m2n` backend).

vLLM describes all tensors of a transfer over one mesh of senders, so each pipeline stage has a transfer of its own. In
the group of a stage its senders come first. The workers of all engines follow, engine after engine, in a mesh of
engines by workers. The workers join, receive and leave stage after stage. A part that maps to a live parameter is
received in its place; any other tensor is received whole, and loaded by the model.

vLLM counts a worker's rank over the replicas of one engine. Each engine is told that it is the replica of its number
(`worker.WorkerExtension.megatron_rl_take_place`).

None of this has run on NCCL.
"""

import importlib
import inspect
import itertools
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.protocol.stage_group import TRANSPORT, StageGroup
from megatron_rl.shared.protocol.wire import StageStream, Weights
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.streams import EngineCall, StreamPlace

if TYPE_CHECKING:
    import torch

    from megatron_rl.shared.weights.stage_layout import LaidOutTensor

MOST_PARTS = 64
"""The most workers of an engine that NCCL M2N divides a sender's part over."""
PACKAGES = (
    "the package nccl-extensions (`pip install nccl-extensions`), NCCL 2.30.5 or newer, and VLLM_NCCL_SO_PATH with the "
    "libnccl.so that it is linked to"
)
"""The packages that trainer and engines need."""
_FOLDER = "vllm.distributed.weight_transfer"


def find_number(weights: Weights, place: StreamPlace, num_workers: int) -> int:
    """Return the number of the engine that has this place: all engines have as many workers."""
    return (place.first_rank - weights.num_senders) // num_workers


def describe_tensors(weights: Weights) -> str:
    """Describe the tensors and their digests to workers, which may receive parts of them alone."""
    if len(weights.digests) != len(weights.manifest):
        raise InputError(f"{len(weights.manifest)} tensors need as many digests, and {len(weights.digests)} came")
    return json.dumps([[*spec, lanes] for spec, lanes in zip(weights.manifest, weights.digests, strict=True)])


def list_join_calls(weights: Weights, stage: StageStream, num_workers: int) -> Iterator[EngineCall]:
    """Yield the calls with which an engine of this many workers joins the group of a stage."""
    names, dtypes, shapes = _list_columns(weights, stage)
    host, port = streams.split_address(stage.location, weights.transport)
    num_engines = (weights.world_size - weights.num_senders) // num_workers
    init: dict[str, object] = {
        "master_address": host,
        "master_port": port,
        "rank_offset": weights.num_senders,
        "world_size": weights.world_size,
        "src_mesh_dims": [weights.num_senders, 1],
        "dst_mesh_dims": [num_engines, num_workers],
        "names": names,
        "dtype_names": dtypes,
        "shapes": shapes,
        "src_placements": [_encode(dim) for dim in stage.dims],
    }
    yield EngineCall("/init_weight_transfer_engine", {"init_info": init})


def list_receive_calls(weights: Weights, stage: StageStream) -> Iterator[EngineCall]:
    """Yield the calls that receive the tensors of a stage while its senders send them, and then leave the group."""
    names, _, _ = _list_columns(weights, stage)
    yield EngineCall("/start_weight_update")
    yield EngineCall(streams.RECEIVE, {"update_info": {"names": names}})
    yield EngineCall("/finish_weight_update")
    yield EngineCall("/shutdown_weight_transfer_engine")


def _list_columns(weights: Weights, stage: StageStream) -> tuple[list[str], list[str], list[list[int]]]:
    """List the names, dtypes and shapes of a stage's tensors."""
    sizes = [len(one.dims) for one in weights.stages]
    if sum(sizes) != len(weights.manifest) or not all(sizes):
        raise InputError(
            f"{weights.transport} weights must have a manifest of the tensors of every stage: it has "
            f"{len(weights.manifest)}, and the stages have {', '.join(map(str, sizes))}"
        )
    first = sum(sizes[: weights.stages.index(stage)])
    names, dtypes, shapes = zip(*itertools.islice(weights.manifest, first, first + len(stage.dims)), strict=True)
    return list(names), list(dtypes), list(shapes)


def _encode(dim: int | None) -> list[int] | None:
    """Encode a layout over the mesh (senders, 1) as vLLM does: -1 for an axis that divides nothing."""
    return None if dim is None else [dim, -1]


class StageTensors(Protocol):
    """The tensors of a stage: their layouts, and this sender's parts in the same order."""

    @property
    def tensors(self) -> "tuple[LaidOutTensor, ...]": ...

    @property
    def senders(self) -> tuple[int, ...]: ...

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]": ...


def find_library() -> tuple[Any, Any]:
    """Return vLLM's classes that open a sender; raise PlatformError if this environment cannot send."""
    try:
        module = importlib.import_module(f"{_FOLDER}.m2n_trainer")
        found = module.M2NTrainerInitInfo, module.M2NTrainerWeightTransferEngine
        source = importlib.import_module(f"{_FOLDER}.m2n_source").M2NWeightSource
    except (ImportError, AttributeError) as error:
        raise PlatformError(
            f"--rollout-transport {TRANSPORT} needs vLLM 0.32 in the trainer's environment ({error}): install it, or "
            "write --rollout-transport nccl or shm"
        ) from None
    if isinstance(inspect.getattr_static(source, "metadata"), property) or not hasattr(source, "mesh"):
        raise PlatformError(
            f"--rollout-transport {TRANSPORT} is written for vLLM 0.32, and another one is installed in the trainer's "
            "environment: install that, or write --rollout-transport nccl"
        )
    must_have_extensions("the trainer's environment")
    return found


def must_have_extensions(where: str) -> None:
    """Raise PlatformError unless `nccl.m2n` can be imported here."""
    try:
        importlib.import_module("nccl.m2n")
    except (ImportError, OSError, RuntimeError) as error:
        raise PlatformError(
            f"--rollout-transport {TRANSPORT} needs {PACKAGES}, in {where} ({error}): install them, or write "
            "--rollout-transport nccl or shm"
        ) from None


def open_sender(group: StageGroup, stage: StageTensors) -> Any:
    """Join the group of a stage with the other senders and all workers; return a sender for this rank."""
    make_info, make_sender = find_library()
    num_senders = len(stage.senders)
    info = make_info(
        rank=group.rank,
        master_address=group.host,
        master_port=group.port,
        world_size=num_senders + group.num_engines * group.num_workers,
        num_trainer_ranks=num_senders,
        dst_mesh_dims=(group.num_engines, group.num_workers),
    )
    return make_sender.trainer_init(info, client=streams.ToldBySidecar(), source=make_source(stage))


def make_source(stage: StageTensors) -> Any:
    """Wrap a stage's tensors for vLLM's sender."""
    common = importlib.import_module(f"{_FOLDER}.m2n_common")
    base = importlib.import_module(f"{_FOLDER}.m2n_source").M2NWeightSource
    # Imported here: the sidecar runs without torch.
    from megatron_rl.shared.weights.fingerprint import DTYPES

    metas = [
        common.M2NParamMeta(
            tensor.spec.name,
            DTYPES[tensor.spec.dtype],
            tuple(tensor.spec.shape),
            common.REPLICATED if tensor.dim is None else (tensor.dim, common.REPLICATE),
        )
        for tensor in stage.tensors
    ]

    class StageSource(base):  # type: ignore[misc, valid-type]
        def mesh(self) -> Any:
            return common.M2NMesh((len(stage.senders), 1), 0)

        def metadata(self) -> list[Any]:
            return metas

        def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
            return iter(stage)

    return StageSource()
