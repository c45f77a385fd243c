"""The contract of every transport: engines get the announced numbers, and a fault on the way fails the publish by name.

The next publish succeeds after a failed one.
"""

import contextlib
import importlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.shared.protocol.client import RolloutError
from megatron_rl.shared.protocol.hosts import DeliveryHost, DeliveryHosts
from megatron_rl.shared.protocol.wire import PublishAnswer, Transport, Weights
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.folders import Arrival
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import taken
from megatron_rl.shared.weights.shards import Shard
from megatron_rl.sidecar.vllm.in_place import OpenedMemory
from megatron_rl.sidecar.vllm.received import map_file_tensors
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.hosts import Deliveries, HostSettings
from megatron_rl.trainer.mcore.publish.publisher import TRANSPORTS, Publisher
from megatron_rl.trainer.mcore.publish.stream import StreamTransport
from tests import hf_models
from tests.deliveries import give_memory
from tests.distributed.layouts import CASES, build, start_session
from tests.distributed.offer_reader import assemble
from tests.offers import HostSharing
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change
memory = pytest.fixture(give_memory)

KINDS = ("files", "offers", "hosts", "stream")
"""The ways of the transports in `TRANSPORTS`: files are read, or memory in their place, or reach other hosts."""
Tensors = dict[str, torch.Tensor]


class Engines:
    """The sidecar and its engines, which refuse numbers that are not those announced."""

    lease = 1

    def __init__(self, kind: str, folder: Path) -> None:
        self.loaded: list[int] = []
        self.is_closed = False
        self.streamed: queue.Queue[Tensors] = queue.Queue()
        self._kind = kind
        (folder / "host").mkdir(mode=0o700)
        self.receiver = Receiver(folder / "host", "token", "127.0.0.1")

    def num_workers(self) -> int:
        return 1

    def find_engine_hosts(self) -> list[str]:
        return ["127.0.0.1"]

    def hosts(self) -> DeliveryHosts:
        host = DeliveryHost(name="host", address="127.0.0.1", port=self.receiver.port)
        return DeliveryHosts(epoch=1, token="token", hosts=[host])

    def lose_host(self, name: str, version: int, reason: str) -> None:
        raise RolloutError(f"{name} is lost: {reason}")

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        if self.is_closed:
            raise RolloutError("the engines are closed")
        with self._load(weights) as tensors:
            specs = [TensorSpec(name, tuple(tensor.shape), weights.dtype) for name, tensor in tensors.items()]
            found = compute_fingerprint(specs, {name: digest(tensor).tolist() for name, tensor in tensors.items()})
        if found != weights.fingerprint:
            raise RolloutError("other numbers came")
        self.loaded.append(weights.version)
        return PublishAnswer(through="ipc" if self._kind == "offers" else "files")

    @contextlib.contextmanager
    def _load(self, weights: Weights) -> Iterator[Tensors]:
        if self._kind == "stream":
            try:
                yield self.streamed.get(timeout=2)
            except queue.Empty:
                raise RolloutError("the stream broke off") from None
        elif self._kind == "offers":
            with taken(Path(weights.folder)) as offer:
                assert offer is not None
                yield assemble(OpenedMemory(HostSharing()).open(offer))
        else:
            own = Path(weights.folder)
            folder = own if self._kind == "files" else self.receiver.folder / own.name
            tensors = map_file_tensors(folder)
            specs = [TensorSpec(name, tuple(tensor.shape), weights.dtype) for name, tensor in tensors.items()]
            with Arrival(folder, specs) as arrival:
                if not all(map(arrival.wait_for, tensors)):
                    raise RolloutError("the files broke off")
            yield tensors


class Group:
    """A group of engines' workers that takes the tensors instead of sending them."""

    def __init__(self, engines: Engines, model: Any) -> None:
        self._engines, self._model = engines, model

    def send_weights(self) -> None:
        self._engines.streamed.put({name: tensor.clone() for name, tensor in self._model})

    def shutdown(self) -> None: ...


def before_bytes_leave(action: Callable[[Publisher, str], str]) -> Any:
    """Patch the publisher: what `action` does happens when a version is announced, and it may announce another one."""
    announce = Publisher.announce

    def announce_then(publisher: Publisher, version: int, fingerprint: str, source: Any) -> Any:
        return announce(publisher, version, action(publisher, fingerprint), source)

    return mock.patch.object(Publisher, "announce", announce_then)


def change_number(publisher: Publisher, fingerprint: str) -> str:
    with torch.no_grad():
        publisher.weights.shards[-1].parameter.view(-1)[0] += 1
    return fingerprint


@contextlib.contextmanager
def break_off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:

        def cut(_: Publisher, fingerprint: str) -> str:
            stack.enter_context(mock.patch.object(Shard, "values", side_effect=OSError("it broke off")))
            return fingerprint

        stack.enter_context(before_bytes_leave(cut))
        yield


PLANTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number changes on the way": (lambda: before_bytes_leave(change_number), "other numbers came"),
    "another version is meant": (lambda: before_bytes_leave(lambda *_: "0" * 64), "other numbers came"),
    "the bytes break off": (break_off, "broke off"),
}


def publish_with_faults(folder: Path, model: Path) -> dict[str, tuple[list[str], list[int], list[str]]]:
    """Publish by each transport between faults; return the errors, the versions that engines loaded, and the rest."""
    torch.distributed.init_process_group("gloo")
    found = {}
    sharing = mock.patch.object(CpuPlatform, "device_sharing", return_value=HostSharing())
    with start_session(CASES["TP1"]) as session, sharing:
        for kind in KINDS:
            weights = build(session, CASES["TP1"], model).weights
            (folder / kind).mkdir(mode=0o700)
            engines = Engines(kind, folder / kind)
            hosts = Deliveries(weights, session, engines, "run", HostSettings(lost_host="wait"), deadline_seconds=20)
            transport: Any = FilesTransport(
                folder / kind / "run", "auto" if kind == "offers" else "files", hosts if kind == "hosts" else None
            )
            if kind == "stream":
                transport = StreamTransport("nccl", lambda *args, engines=engines: Group(engines, args[-1]))
            publisher = Publisher(weights, session, engines, "run", transport)
            publisher.publish(0)
            errors = []
            for version, (plant, _) in enumerate(PLANTS.values(), start=1):
                with plant(), pytest.raises(MegatronRLError) as caught:
                    publisher.publish(version)
                errors.append(str(caught.value))
            engines.is_closed = True
            with pytest.raises(MegatronRLError) as caught:
                publisher.publish(4)
            errors.append(str(caught.value))
            engines.is_closed = False
            publisher.publish(5)
            publisher.close()
            engines.receiver.close()
            found[kind] = errors, engines.loaded, [path.name for path in (folder / kind).glob("run*")]
    return found


def test_each_transport_fails_by_name_for_each_fault_and_brings_the_next_version(tmp_path: Path, memory: Path) -> None:
    (found,) = run_ranks(publish_with_faults, 1, memory, hf_models.draw("qwen3", tmp_path / "model"))
    assert found.keys() == set(KINDS)
    expected = [text for _, text in PLANTS.values()]
    for kind, (errors, loaded, left) in found.items():
        assert left == [], kind
        # Offered memory has all numbers of the version whose files break off.
        assert [version for version in loaded if (kind, version) != ("offers", 3)] == [0, 5], kind
        for error, text in zip(errors, [*expected, "the engines are closed"], strict=True):
            assert text in error, kind


def test_each_value_of_the_flag_has_a_transport() -> None:
    assert TRANSPORTS.keys() == set(get_args(Transport))
    assert all(callable(importlib.import_module(module).build) for module in TRANSPORTS.values())
