"""Rank 0's end of a stream: the address at which it is reached, and the engines' libraries that send.

If all engines are on rank 0's own host, the address is the loopback address. Otherwise it is the one from which rank
0's host connects to all other hosts that have engines; engines of its own host reach that one too.

vllm-ascend's sender has the interface of an older vLLM. None of this has run on NCCL or HCCL.
"""

import functools
import importlib
import inspect
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.shared.protocol.wire import STREAM_BUFFERS
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9
# The module of each transport, the class of its sender's settings, and the class of its sender.
_LIBRARIES = {
    "nccl": ("vllm.distributed.weight_transfer.nccl_engine", "NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine"),
    "hccl": (
        "vllm_ascend.distributed.weight_transfer.hccl_engine",
        "HCCLTrainerSendWeightsArgs",
        "HCCLWeightTransferEngine",
    ),
}


def find_own_address(hosts: Sequence[str]) -> str:
    """Return the address at which all of these hosts, given by name or address, reach this one.

    Raise a UsageError if no single address of IPv4 is known to do so.
    """
    sources: dict[str, list[str]] = {}
    for host in dict.fromkeys(hosts):
        source = _find_source(host)
        if not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
            sources.setdefault(source, []).append(host)
    if not sources:
        return _LOOPBACK
    if len(sources) > 1:
        named = "; ".join(f"{', '.join(reached)} from {source}" for source, reached in sources.items())
        raise UsageError(
            f"a stream needs one address of rank 0's host that the hosts of all engines reach, and it connects to "
            f"{named}: name these hosts by addresses of one network (--rollout-hosts, --rollout-endpoint), or write "
            "--rollout-transport shm"
        )
    (source,) = sources
    if ":" in source:
        raise UsageError(
            f"rank 0's host connects to {', '.join(sources[source])} from {source}, and a stream needs IPv4: name "
            "these hosts by addresses of IPv4 (--rollout-hosts, --rollout-endpoint), or write --rollout-transport shm"
        )
    return source


def find_free_port(address: str) -> int:
    """Return a port that is free at an address of this host."""
    with socket.socket(socket.AF_INET) as listener:
        listener.bind((address, 0))
        return listener.getsockname()[1]


def _find_source(host: str) -> str:
    """Return the address from which this host connects to another one."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This chooses a route and sends nothing.
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as error:
        raise UsageError(
            f"rank 0's host finds no way to {host}, which has engines ({error}): fix its name or route, or write "
            "--rollout-transport shm"
        ) from None


class Tensors(Protocol):
    """The tensors to send, in the order of their manifest."""

    @property
    def manifest(self) -> list[TensorSpec]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class Sender(Protocol):
    """Rank 0 of the group that the engines' workers are in."""

    def send_weights(self) -> None: ...

    def shutdown(self) -> None: ...


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


def open_sender(transport: str, host: str, port: int, world_size: int, tensors: Tensors) -> Sender:
    """Wait for all workers at this address."""
    if transport == "hccl":
        return HcclSender(host, port, world_size, tensors)
    make_info, make_sender = find_library(transport)
    # Rank 0 is the sender.
    info = make_info(master_address=host, master_port=port, world_size=world_size, rank=0, **STREAM_BUFFERS)
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
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    # Without owners, because the sender has all of each tensor.
    described = [ParamMeta(spec.name, DTYPES[spec.dtype], tuple(spec.shape)) for spec in tensors.manifest]
    if not isinstance(inspect.getattr_static(WeightSource, "metadata"), property):

        class CalledSource(WeightSource):
            def metadata(self) -> list[Any]:
                return described

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(tensors)

        return CalledSource()

    class ListedSource(WeightSource):
        @functools.cached_property
        def metadata(self) -> list[Any]:
            return described

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(tensors)

    return ListedSource()
