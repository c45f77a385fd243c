"""A publish that streams: the messages of rank 0, and the errors when the engines do not take them.

Stand-ins have the places of the sidecar and of the group that devices would be in.
"""

import datetime
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import PlatformError
from megatron_rl.shared.protocol.client import RolloutError, WorkersChanged
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights.fingerprint import DTYPES, compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from megatron_rl.trainer.mcore.publish.senders import find_library, open_sender
from megatron_rl.trainer.mcore.publish.stream import StreamTransport, WholeModel
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

MODELS = ("qwen3", "qwen3_moe")
LAYOUTS = {1: ("TP1",), 2: ("TP2", "PP2", "PP2xVPP2", "CP2"), 4: ("TP2xPP2", "CP2xPP2")}
EXPERT_LAYOUTS = {1: (), 2: ("EP2", "EP2xCP2"), 4: ("EP2xPP2",)}


class Sidecar:
    """Two workers that take all tensors that are sent, as engines do."""

    def __init__(self, refusals: list[Exception] = ()):
        self.refusals = list(refusals)
        self.told: list[Weights] = []
        self.is_sent = threading.Event()

    def num_workers(self) -> int:
        return 2 if self.told else 1

    def find_engine_hosts(self) -> list[str]:
        return ["127.0.0.1"]

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.told.append(weights)
        if weights.stream.world_size != 3:
            raise WorkersChanged("two workers")
        if self.refusals:
            raise self.refusals.pop()
        assert self.is_sent.wait(60)
        return PublishAnswer()


class Group:
    """A group that takes the tensors instead of sending them."""

    def __init__(self, sidecar: Sidecar, model: WholeModel, bites: bool = True):
        self.tensors: dict[str, torch.Tensor] = {}
        self._sidecar, self._model, self._bites = sidecar, model, bites

    def send_weights(self) -> None:
        if not self._bites:
            threading.Event().wait()
        self.tensors = {name: tensor.clone() for name, tensor in self._model}
        self._sidecar.is_sent.set()

    def shutdown(self) -> None:
        self._sidecar.is_sent.clear()


def stream(session: Any, weights: Any, dtype: str | None) -> dict[str, Any]:
    """Publish version 7 to a stand-in, and return the tensors that arrived on rank 0."""
    sidecar = Sidecar()
    groups: list[Group] = []

    def make(transport: str, host: str, port: int, world_size: int, model: WholeModel) -> Group:
        if world_size != 3:
            # No worker joins a group that was opened for the wrong number.
            threading.Event().wait()
        groups.append(Group(sidecar, model))
        return groups[-1]

    publisher = Publisher(weights, session, sidecar, "run", StreamTransport("nccl", make), dtype)
    found = publisher.publish(7)
    return {
        "fingerprint": found,
        "own": weights.fingerprint(dtype),
        "told": sidecar.told,
        "tensors": groups[0].tensors if groups else {},
    }


def streams(world_size: int, folders: dict[str, Path]) -> dict[tuple[str, str, str | None], dict[str, Any]]:
    torch.distributed.init_process_group("gloo")
    results = {}
    for model, folder in folders.items():
        layouts = EXPERT_LAYOUTS if model in hf_models.WITH_EXPERTS else LAYOUTS
        for layout in layouts[world_size]:
            with start_session(CASES[layout]) as session:
                built = build(session, CASES[layout], folder)
                for dtype in (None, "bfloat16"):
                    results[layout, model, dtype] = stream(session, built.weights, dtype)
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in MODELS}


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_a_stream_sends_the_announced_tensors_in_the_announced_order(world_size, folders):
    for (layout, model, dtype), sent in run_ranks(streams, world_size, world_size, folders)[0].items():
        given = load_file(folders[model] / "model.safetensors")
        assert sent["fingerprint"] == sent["own"]
        # The first time one worker was counted, and two exist.
        assert [message.stream.world_size for message in sent["told"]] == [2, 3]
        message = sent["told"][-1]
        assert (message.version, message.fingerprint, message.stream.transport) == (7, sent["fingerprint"], "nccl")
        assert [name for name, _, _ in message.stream.manifest] == list(sent["tensors"]), (layout, model)
        assert sorted(sent["tensors"]) == sorted(given)
        specs = []
        for name, named_dtype, shape in message.stream.manifest:
            tensor = sent["tensors"][name]
            assert (tensor.dtype, list(tensor.shape)) == (DTYPES[named_dtype], shape)
            assert torch.equal(tensor, given[name].to(tensor.dtype)), (layout, model, dtype, name)
            specs.append(TensorSpec(name, tuple(shape), named_dtype))
        digests = {name: digest(tensor).tolist() for name, tensor in sent["tensors"].items()}
        assert compute_fingerprint(specs, digests) == sent["fingerprint"]


def faults(folder: Path) -> dict[str, str]:
    """Return the errors if engines refuse before a tensor is sent, refuse after some, or never connect."""
    torch.distributed.init_process_group("gloo")
    said = {}
    with start_session(CASES["TP1"]) as session:
        weights = build(session, CASES["TP1"], folder).weights

        def attempt(name: str, sidecar: Sidecar, make: Any) -> None:
            deadline = datetime.timedelta(seconds=2)
            publisher = Publisher(weights, session, sidecar, "run", StreamTransport("nccl", make), None, deadline)
            with pytest.raises(RolloutError) as error:
                publisher.publish(3)
            said[name] = str(error.value)

        def never(*_: object) -> Group:
            threading.Event().wait()
            raise AssertionError

        refused = Sidecar([RolloutError("engine e1 is gone")])
        attempt("refused", refused, never)
        broken = Sidecar([RolloutError("engine e2 is gone")])
        attempt("broken off", broken, lambda *args: Group(broken, args[-1], bites=False))
        absent = Sidecar()
        attempt("absent", absent, never)
        silent = Sidecar()
        attempt("silent", silent, lambda *args: Group(silent, args[-1], bites=False))
        return said


def test_a_stream_that_engines_do_not_take_is_an_error_by_name_within_its_deadline(folders):
    (said,) = run_ranks(faults, 1, folders["qwen3"])
    assert said["refused"] == "engine e1 is gone"
    assert said["broken off"] == "engine e2 is gone"
    assert "2 workers of engines did not connect to 127.0.0.1:" in said["absent"]
    assert said["silent"] == "the engines did not receive version 3 within 2 s"


def through_vllm(folder: Path) -> tuple[dict[str, torch.Tensor], list[tuple]]:
    """Send the whole model with vLLM's own sender, whose group is a stand-in."""
    from vllm.distributed.weight_transfer import nccl_engine

    opened, sent = [], {}

    class Communicator:
        def destroy(self) -> None:
            opened.append("destroyed")

    def open_endpoint(info: Any) -> Communicator:
        opened.append((info.master_address, info.master_port, info.world_size))
        return Communicator()

    def producer(iterator: Any, group: Any, src: int, post_iter_func: Any, **_: Any) -> None:
        assert isinstance(group, Communicator)
        assert src == 0
        sent.update((name, post_iter_func((name, tensor)).clone()) for name, tensor in iterator)

    nccl_engine.open_trainer_endpoint = open_endpoint
    nccl_engine.packed_nccl_broadcast_producer = producer
    torch.distributed.init_process_group("gloo")
    with start_session(CASES["TP1"]) as session:
        model = WholeModel(build(session, CASES["TP1"], folder).weights, session, None)
        opened_sender = open_sender("nccl", "127.0.0.1", 7000, 3, model)
        opened_sender.send_weights()
        opened_sender.shutdown()
    return sent, opened


def test_vllms_sender_sends_every_tensor_unchanged(folders):
    ((sent, opened),) = run_ranks(through_vllm, 1, folders["qwen3"])
    given = load_file(folders["qwen3"] / "model.safetensors")
    assert opened == [("127.0.0.1", 7000, 3), "destroyed"]
    assert sent.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in sent.items())


def test_without_the_library_of_the_engines_the_error_says_what_to_install():
    with pytest.raises(PlatformError, match="--rollout-transport hccl needs vllm-ascend"):
        find_library("hccl")
