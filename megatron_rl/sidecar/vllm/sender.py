"""The trainer's end of a stream of weights: the transfer engine whose other end the engines have.

The engines are told to join and to receive by the sidecar, so vLLM's client of them has nothing to do here.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.weights.fingerprint import DTYPES
from megatron_rl.weights.mapping import TensorSpec

# The module of each transport, and its classes of the trainer's end.
_LIBRARIES = {
    "nccl": ("vllm.distributed.weight_transfer.nccl_engine", "NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine"),
    "hccl": (
        "vllm_ascend.distributed.weight_transfer.hccl_engine",
        "HCCLTrainerInitInfo",
        "HCCLTrainerWeightTransferEngine",
    ),
}


class Tensors(Protocol):
    """What is sent, in the order of its manifest."""

    @property
    def manifest(self) -> list[TensorSpec]: ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def library(transport: str) -> tuple[Any, Any]:
    """What opens a sender is made of; a PlatformError where it is not installed."""
    module, info, sender = _LIBRARIES[transport]
    try:
        found = importlib.import_module(module)
        return getattr(found, info), getattr(found, sender)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0].replace("_", "-")
        raise PlatformError(
            f"--rollout-transport {transport} sends with {package}, which the trainer's environment does not have "
            f"({error}): install the version that the engines run there too, or write --rollout-transport shm"
        ) from None


def open_sender(transport: str, host: str, port: int, world_size: int, tensors: Tensors) -> Any:
    """Wait for all workers at that address; what this returns has `send_weights` and `shutdown`."""
    make_info, make_sender = library(transport)
    # Rank 0 is the one that sends.
    info = make_info(master_address=host, master_port=port, world_size=world_size, packed=True, rank=0)
    return make_sender.trainer_init(info, client=_ToldBySidecar(), source=_source_of(tensors))


class _ToldBySidecar:
    """vLLM's client of the engines."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _source_of(tensors: Tensors) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(spec.name, DTYPES[spec.dtype], tuple(spec.shape)) for spec in tensors.manifest]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(tensors)

    return Source()
