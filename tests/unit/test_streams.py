"""The messages to vLLM's nccl backend, checked at the seams with stand-ins."""

import abc
import dataclasses
import functools
import sys
import types
from typing import ClassVar

import msgspec
import pytest
import torch

from benchmarks.gpu.models import SIZES
from megatron_rl.errors import InputError
from megatron_rl.shared.device_memory import count_streamed
from megatron_rl.shared.protocol.wire import STREAM_BUFFERS, StreamSource, Weights
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar import streams
from megatron_rl.trainer.mcore.publish import senders

TENSORS = {"b.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(5, dtype=torch.bfloat16)}
MANIFEST = [("b.weight", "float32", [3, 4]), ("a.bias", "bfloat16", [5])]
SPECS = [TensorSpec(name, tuple(shape), dtype) for name, dtype, shape in MANIFEST]
DIGESTS = {name: digest(tensor).tolist() for name, tensor in TENSORS.items()}
FINGERPRINT = compute_fingerprint(SPECS, DIGESTS)
COMPARED = {
    "fingerprint": FINGERPRINT,
    "compared": 2,
    "parameters": 2,
    "uncompared": (),
    "shares": {},
    "unheld": [],
}
FROM_FILES = COMPARED | {"through": "files", "reasons": []}
LOADED = FROM_FILES | {"obstacles": ["the order of its parameters was not learned at its start"]}
# A stream does not say what it brings before it does: the order is learned from the engine's checkpoint, or not at all.
NOT_COMPARED = COMPARED | {"compared": 0, "uncompared": ("a.bias", "b.weight")}
STREAM = StreamSource(transport="nccl", address="[::1]:7000", manifest=MANIFEST, world_size=8)
WEIGHTS = Weights(run="run", version=3, fingerprint=FINGERPRINT, source=STREAM, dtype="float32")


def test_the_workers_of_all_engines_follow_the_trainer_in_one_group():
    assert streams.assign_places([2, 1, 4]) == [
        streams.StreamPlace(1, 8),
        streams.StreamPlace(3, 8),
        streams.StreamPlace(4, 8),
    ]


def test_the_calls_are_those_that_vllm_knows():
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerInitInfo,
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    (join,) = streams.list_join_calls(STREAM, streams.StreamPlace(3, 8))
    start, update, finish, leave = streams.list_receive_calls(STREAM)
    init = NCCLWeightTransferInitInfo(**join.content["init_info"])
    assert (init.master_address, init.master_port, init.rank_offset, init.world_size) == ("::1", 7000, 3, 8)
    assert init.packed
    # Both sides fill the same buffers, and the memory of a rank is counted with these.
    sender = NCCLTrainerInitInfo(master_address="::1", master_port=7000, world_size=8, rank=0, **STREAM_BUFFERS)
    sizes = (init.packed_buffer_size_bytes, init.packed_num_buffers)
    assert sizes == (sender.packed_buffer_size_bytes, sender.packed_num_buffers)
    tiny = dataclasses.replace(SIZES["0.6b"], hidden_size=1, vocab_size=1, ffn_hidden_size=1)
    assert sizes[0] * (sizes[1] + 1) <= count_streamed(tiny, 2) < 1 << 30
    info = NCCLWeightTransferUpdateInfo(**update.content["update_info"])
    assert (info.names, info.dtype_names) == (["b.weight", "a.bias"], ["float32", "bfloat16"])
    assert info.shapes == [[3, 4], [5]]
    assert [call.route for call in (join, start, update, finish, leave)] == [
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ]  # fmt: skip


def test_the_routes_are_those_that_vllm_has():
    from vllm.entrypoints.rl.online.api_router import router

    known = {route.path for route in router.routes}
    calls = [
        *streams.list_join_calls(STREAM, streams.StreamPlace(1, 2)),
        *streams.list_receive_calls(STREAM),
    ]
    assert {call.route for call in calls} <= known


HCCL_STREAM = msgspec.structs.replace(STREAM, transport="hccl")


@dataclasses.dataclass
class SendSettings:
    """vllm-ascend's settings of a send, as its 0.23 has them."""

    group: object
    src: int = 0
    post_iter_func: object = None
    packed: bool = False
    stream: object = None
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


class AscendEngine:
    """vllm-ascend's functions for a trainer, which belong to its engine's class."""

    opened: ClassVar[list[dict]] = []
    sent: ClassVar[list] = []

    @staticmethod
    def trainer_init(init_info):
        AscendEngine.opened.append(init_info)
        return "group"

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        AscendEngine.sent.append((trainer_args, dict(iterator)))


def test_vllm_ascend_is_told_with_the_update_that_tensors_are_packed():
    (join,) = streams.list_join_calls(HCCL_STREAM, streams.StreamPlace(1, 2))
    assert join.content["init_info"].keys() == {"master_address", "master_port", "rank_offset", "world_size"}
    assert list(streams.list_receive_calls(HCCL_STREAM))[1].content["update_info"]["packed"] is True


def test_vllm_ascends_functions_for_a_trainer_send_all_tensors_packed(monkeypatch):
    module = types.ModuleType("vllm_ascend.distributed.weight_transfer.hccl_engine")
    module.HCCLTrainerSendWeightsArgs, module.HCCLWeightTransferEngine = SendSettings, AscendEngine
    for name in ("vllm_ascend", "vllm_ascend.distributed", "vllm_ascend.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sender = senders.open_sender("hccl", "10.0.0.1", 7000, 3, list(TENSORS.items()))
    sender.send_weights()
    sender.shutdown()
    assert AscendEngine.opened == [{"master_address": "10.0.0.1", "master_port": 7000, "world_size": 3}]
    ((settings, sent),) = AscendEngine.sent
    assert settings == SendSettings("group", packed=True)
    assert sent.keys() == TENSORS.keys()
    assert all(sent[name] is tensor for name, tensor in TENSORS.items())


class Sent:
    """The tensors that a trainer sends."""

    manifest = SPECS

    def __iter__(self):
        return iter(TENSORS.items())


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """A tensor's description in vLLM 0.33."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = dataclasses.field(default=None, kw_only=True)
    placements: tuple[object, ...] | None = dataclasses.field(default=None, kw_only=True)


class WeightSource(abc.ABC):
    """A source of weights in vLLM 0.33, with the parts that its senders over NCCL use."""

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        if not isinstance(cls.__dict__.get("metadata"), functools.cached_property):
            raise TypeError("metadata must be a functools.cached_property")

    @property
    @abc.abstractmethod
    def metadata(self): ...

    def implements_iter_full(self):
        return type(self).iter_full is not WeightSource.iter_full

    def iter_full(self):
        raise NotImplementedError


DESCRIBED = [("b.weight", torch.float32, (3, 4)), ("a.bias", torch.bfloat16, (5,))]


def test_vllm_0_33_reads_what_is_sent_as_a_list_and_iterates_over_whole_tensors(monkeypatch):
    from vllm.distributed.weight_transfer import base

    monkeypatch.setattr(base, "WeightSource", WeightSource)
    monkeypatch.setattr(base, "ParamMeta", ParamMeta)
    source = senders._make_source(Sent())
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata] == DESCRIBED
    assert source.metadata is source.metadata
    # Without owners the sender has all of each tensor.
    assert all((meta.owners, meta.mesh_shape, meta.placements) == (None, None, None) for meta in source.metadata)
    assert source.implements_iter_full()
    for _ in range(2):
        assert [(name, id(tensor)) for name, tensor in source.iter_full()] == [
            (name, id(tensor)) for name, tensor in TENSORS.items()
        ]


def test_the_vllm_that_is_installed_reads_what_is_sent():
    source = senders._make_source(Sent())
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == DESCRIBED
    assert [name for name, _ in source] == [name for name, _ in source] == list(TENSORS)


@pytest.mark.parametrize("changes", [{"address": "nowhere"}, {"address": "host:x"}, {"manifest": []}])
def test_a_stream_without_an_address_or_a_manifest_is_an_error(changes):
    with pytest.raises(InputError, match="nccl weights"):
        list(streams.list_join_calls(msgspec.structs.replace(STREAM, **changes), streams.StreamPlace(1, 2)))
