"""The messages to vLLM's nccl_m2n backend, and what senders need, checked at the seams with vLLM's own classes."""

import json
import sys
import types

import msgspec
import pytest
import torch

from megatron_rl.errors import InputError, PlatformError
from megatron_rl.shared.protocol.wire import StageStream, Weights
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.stage_layout import LaidOutTensor
from megatron_rl.sidecar import stage_streams, streams
from megatron_rl.sidecar.vllm.received import Record, Refusal, must_be_proved, must_have_arrived, read_announced

MANIFEST = [("a", "float32", [4, 2]), ("b", "bfloat16", [3]), ("c", "float32", [2, 8])]
STAGES = [StageStream(location="[::1]:7000", dims=[0, None]), StageStream(location="host:7001", dims=[1])]
WEIGHTS = Weights(
    run="run", version=3, fingerprint="f", transport="nccl_m2n", dtype="float32", stages=STAGES, manifest=MANIFEST,
    num_senders=2, world_size=8, digests=[[1], [2], [3]],
)  # fmt: skip


def test_workers_of_every_engine_have_a_rank_of_their_own_as_vllm_counts_them():
    places = streams.assign_places([3, 3], WEIGHTS.num_senders)
    numbers = [stage_streams.find_number(WEIGHTS, place, 3) for place in places]
    # vLLM adds the number of senders, and the workers of the replicas before.
    assert [2 + 3 * number for number in numbers] == [place.first_rank for place in places] == [2, 5]
    assert places[0].world_size == WEIGHTS.world_size


def test_the_calls_of_each_stage_are_those_that_vllm_knows():
    from vllm.distributed.weight_transfer.m2n_engine import M2NWeightTransferInitInfo, M2NWeightTransferUpdateInfo

    (first,), (second,) = (stage_streams.list_join_calls(WEIGHTS, stage, 3) for stage in STAGES)
    info = M2NWeightTransferInitInfo(**json.loads(json.dumps(first.content))["init_info"])
    assert (info.master_address, info.master_port, info.rank_offset, info.world_size) == ("::1", 7000, 2, 8)
    assert (info.src_mesh_dims, info.dst_mesh_dims) == ([2, 1], [2, 3])
    assert (info.names, info.dtype_names, info.shapes) == (["a", "b"], ["float32", "bfloat16"], [[4, 2], [3]])
    assert info.src_placements == [[0, -1], None]
    later = M2NWeightTransferInitInfo(**second.content["init_info"])
    assert (later.master_address, later.names, later.src_placements) == ("host", ["c"], [[1, -1]])
    start, update, finish, leave = stage_streams.list_receive_calls(WEIGHTS, STAGES[1])
    assert M2NWeightTransferUpdateInfo(**update.content["update_info"]).names == ["c"]
    assert [call.route for call in (first, start, update, finish, leave)] == [
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest": MANIFEST[:2]},
        {"stages": [STAGES[0], StageStream(location="host:1", dims=[])], "manifest": MANIFEST[:2]},
    ],
)
def test_stages_without_their_tensors_are_an_error(changes):
    wrong = msgspec.structs.replace(WEIGHTS, **changes)
    with pytest.raises(InputError, match="must have a manifest of the tensors of every stage"):
        list(stage_streams.list_join_calls(wrong, wrong.stages[0], 3))


def test_a_stage_without_an_address_and_tensors_without_digests_are_errors():
    nowhere = StageStream(location="nowhere", dims=[0, None, 1])
    with pytest.raises(InputError, match="must be host:port, not 'nowhere'"):
        list(stage_streams.list_join_calls(msgspec.structs.replace(WEIGHTS, stages=[nowhere]), nowhere, 3))
    with pytest.raises(InputError, match="3 tensors need as many digests, and 1 came"):
        stage_streams.describe_tensors(msgspec.structs.replace(WEIGHTS, digests=[[1]]))


class Stage:
    """A stage of two senders."""

    senders = (4, 5)
    tensors = (
        LaidOutTensor(TensorSpec("a", (4, 2), "float32"), "p", 0),
        LaidOutTensor(TensorSpec("c", (2, 8), "bfloat16"), "q", 1),
        LaidOutTensor(TensorSpec("b", (3,), "float32"), "r"),
    )

    def __iter__(self):
        return iter([("a", torch.ones(2, 2))])


def test_vllms_sender_reads_the_layouts_of_a_stage():
    from vllm.distributed.weight_transfer.m2n_common import resolve_layout, validate_layout
    from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

    source = stage_streams.make_source(Stage())
    assert isinstance(source, M2NWeightSource)
    assert (source.mesh().dims, source.mesh().start_rank) == ((2, 1), 0)
    metas = source.metadata()
    found = [(meta.name, meta.dtype, meta.shape, meta.placements) for meta in metas]
    assert found == [
        ("a", torch.float32, (4, 2), (0, -1)),
        ("c", torch.bfloat16, (2, 8), (1, -1)),
        ("b", torch.float32, (3,), None),
    ]
    for meta in metas:
        validate_layout(*resolve_layout(source.mesh(), meta.placements), meta.shape, "source")
    assert [name for name, _ in source] == [name for name, _ in source] == ["a"]


def test_a_missing_module_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(PlatformError, match=r"pip install nccl-extensions.*2\.30\.5.*VLLM_NCCL_SO_PATH"):
        stage_streams.find_library()
    nccl = types.ModuleType("nccl")
    monkeypatch.setitem(sys.modules, "nccl", nccl)
    monkeypatch.setitem(sys.modules, "nccl.m2n", types.ModuleType("nccl.m2n"))
    info, sender = stage_streams.find_library()
    assert (info.__name__, sender.__name__) == ("M2NTrainerInitInfo", "M2NTrainerWeightTransferEngine")


def test_the_interface_of_vllm_0_33_is_refused_by_name(monkeypatch):
    from vllm.distributed.weight_transfer import m2n_source

    class Listed:
        mesh = None

        @property
        def metadata(self):
            return []

    monkeypatch.setattr(m2n_source, "M2NWeightSource", Listed)
    with pytest.raises(PlatformError, match=r"is written for vLLM 0\.32, and another one is installed"):
        stage_streams.find_library()


def test_what_the_model_did_not_get_must_be_a_parameter_and_be_compared():
    announced = read_announced(stage_streams.describe_tensors(WEIGHTS))
    record = Record({"b", "c"})
    record.note(announced["a"].spec)
    assert record.note_direct(announced) == {"b", "c"}
    assert {spec.name for spec in record.specs} == {"a", "b", "c"}
    record.check_all_loaded()
    with pytest.raises(Refusal, match="1 announced tensors did not arrive: a"):
        Record({"b", "c"}).note_direct(announced)
    must_be_proved({"b"}, {"c"})
    with pytest.raises(Refusal, match="1 parameters were received where they lie and cannot be compared"):
        must_be_proved({"b", "c"}, {"c"})
    must_have_arrived({"a": [1]}, {"a": [1], "b": [2]})
    with pytest.raises(Refusal, match="1 tensors did not arrive as they were sent: a"):
        must_have_arrived({"a": [2]}, {"a": [1], "b": [2]})
