"""Weights that stream from the trainer's devices to the engines': the trainer's sender, and the calls to engines.

The trainer is rank 0 of one group. The workers of the engines follow, engine after engine. The sidecar tells the
engines to join and to receive, so the trainer needs no vLLM client that calls them.

vllm-ascend registers its HCCL backend under the same name and takes the same calls. Its sender has the interface of an
older vLLM. None of this has run on NCCL or HCCL.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.device_memory import BUFFER_BYTES, NUM_BUFFERS
from megatron_rl.shared.protocol.wire import Weights

if TYPE_CHECKING:
    import torch

    from megatron_rl.shared.weights.mapping import TensorSpec


RECEIVE = "/update_weights"
"""The call that ends when an engine has received all tensors."""


PACKING: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": BUFFER_BYTES, "packed_num_buffers": NUM_BUFFERS}
"""The settings of both sides with nccl."""


@dataclasses.dataclass(frozen=True)
class StreamPlace:
    """The ranks of an engine's workers in the group."""

    first_rank: int
    world_size: int
    """The size of the group: the trainer's rank 0 and all workers."""


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A POST to an engine."""

    route: str
    content: dict[str, object] | None = None


def assign_places(num_workers: Sequence[int]) -> list[StreamPlace]:
    """Assign places to engines with these numbers of workers."""
    world_size = 1 + sum(num_workers)
    firsts = [1 + sum(num_workers[:index]) for index in range(len(num_workers))]
    return [StreamPlace(first, world_size) for first in firsts]


def split_address(location: str, transport: str) -> tuple[str, int]:
    """Split the host:port at which a sender opens a group."""
    host, _, port = location.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"the location of {transport} weights must be host:port, not {location!r}")
    return host.strip("[]"), int(port)


def list_join_calls(weights: Weights, place: StreamPlace) -> Iterator[EngineCall]:
    """Yield the calls that join the group.

    Each publish makes a new group, because a restarted engine does not belong to an old one.
    """
    host, port = split_address(weights.location, weights.transport)
    if not weights.manifest:
        raise InputError(f"{weights.transport} weights must have a manifest: names, dtypes and shapes in their order")
    init: dict[str, object] = {
        "master_address": host,
        "master_port": port,
        "rank_offset": place.first_rank,
        "world_size": place.world_size,
    }
    if not _is_packed_by_update(weights):
        init |= PACKING
    yield EngineCall("/init_weight_transfer_engine", {"init_info": init})


def list_receive_calls(weights: Weights) -> Iterator[EngineCall]:
    """Yield the calls that receive the tensors while the trainer sends them, and then leave the group."""
    names, dtypes, shapes = [list(column) for column in zip(*weights.manifest, strict=True)]
    update: dict[str, object] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    if _is_packed_by_update(weights):
        update["packed"] = True
    yield EngineCall("/start_weight_update")
    yield EngineCall(RECEIVE, {"update_info": update})
    yield EngineCall("/finish_weight_update")
    yield EngineCall("/shutdown_weight_transfer_engine")


def _is_packed_by_update(weights: Weights) -> bool:
    """Check whether engines are told with each update that tensors are packed (vllm-ascend), or with the group."""
    return weights.transport == "hccl"


# The module of each transport, the class of its sender's settings, and the class of its sender.
_LIBRARIES = {
    "nccl": ("vllm.distributed.weight_transfer.nccl_engine", "NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine"),
    "hccl": (
        "vllm_ascend.distributed.weight_transfer.hccl_engine",
        "HCCLTrainerSendWeightsArgs",
        "HCCLWeightTransferEngine",
    ),
}


class Tensors(Protocol):
    """The tensors to send, in the order of their manifest."""

    @property
    def manifest(self) -> list["TensorSpec"]: ...

    def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]: ...


def find_library(transport: str) -> tuple[Any, Any]:
    """Return the classes of vLLM or vllm-ascend that open a sender; raise PlatformError if they are not installed."""
    module, info, sender = _LIBRARIES[transport]
    try:
        found = importlib.import_module(module)
        return getattr(found, info), getattr(found, sender)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0].replace("_", "-")
        raise PlatformError(
            f"--rollout-transport {transport} needs {package} in the trainer's environment ({error}): install the "
            f"version that the engines run, or write --rollout-transport shm"
        ) from None


def open_sender(transport: str, host: str, port: int, world_size: int, tensors: Tensors) -> Any:
    """Wait for all workers at this address; return a sender with `send_weights` and `shutdown`."""
    if transport == "hccl":
        return HcclSender(host, port, world_size, tensors)
    make_info, make_sender = find_library(transport)
    # Rank 0 is the sender.
    info = make_info(master_address=host, master_port=port, world_size=world_size, rank=0, **PACKING)
    return make_sender.trainer_init(info, client=ToldBySidecar(), source=_make_source(tensors))


class HcclSender:
    """Sends with vllm-ascend's functions for a trainer, which keep no state themselves."""

    def __init__(self, host: str, port: int, world_size: int, tensors: Tensors) -> None:
        self._make_settings, self._engine = find_library("hccl")
        self._tensors = tensors
        place = {"master_address": host, "master_port": port, "world_size": world_size}
        self._group = self._engine.trainer_init(place)

    def send_weights(self) -> None:
        # Buffers have vllm-ascend's default size on both ends.
        settings = self._make_settings(group=self._group, packed=True)
        self._engine.trainer_send_weights(iter(self._tensors), settings)

    def shutdown(self) -> None:
        self._group = None


class ToldBySidecar:
    """A replacement for vLLM's client of the engines that does nothing: the sidecar makes these calls."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _make_source(tensors: Tensors) -> Any:
    """Wrap the tensors for vLLM's sender, which reads a list from 0.33 on, and makes calls before."""
    # Imported here: the sidecar runs without torch.
    from vllm.distributed.weight_transfer.base import WeightSource

    is_listed = isinstance(inspect.getattr_static(WeightSource, "metadata"), property)
    return _make_listed_source(tensors) if is_listed else _make_called_source(tensors)


def _make_listed_source(tensors: Tensors) -> Any:
    from vllm.distributed.weight_transfer.base import WeightSource

    class ListedSource(WeightSource):
        @functools.cached_property
        def metadata(self) -> list[Any]:
            return _describe(tensors)

        def iter_full(self) -> Iterator[tuple[str, "torch.Tensor"]]:
            return iter(tensors)

    return ListedSource()


def _make_called_source(tensors: Tensors) -> Any:
    from vllm.distributed.weight_transfer.base import WeightSource

    class CalledSource(WeightSource):
        def metadata(self) -> list[Any]:
            return _describe(tensors)

        def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]:
            return iter(tensors)

    return CalledSource()


def _describe(tensors: Tensors) -> list[Any]:
    """Describe each tensor to vLLM; without owners, because the sender has all of them whole."""
    from vllm.distributed.weight_transfer.base import ParamMeta

    from megatron_rl.shared.weights.fingerprint import DTYPES

    return [ParamMeta(spec.name, DTYPES[spec.dtype], tuple(spec.shape)) for spec in tensors.manifest]
