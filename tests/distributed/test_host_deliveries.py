"""A publish to engines on other hosts: ranks send what they own, and a lost host is left out or ends the run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.hosts import DeliveryHost, DeliveryHosts
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights.adapters import AdapterMapping
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.vllm.received import map_file_tensors
from megatron_rl.trainer.mcore.publish import hosts as hosts_module
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.hosts import Deliveries, HostSettings
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from tests import hf_models
from tests.deliveries import Service, change, give_memory, load_arriving
from tests.distributed.layouts import CASES, build, start_session
from tests.distributed.training import training
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change
memory = pytest.fixture(give_memory)


class Hosts(Service):
    """Receivers, and the service that names them and loads each version from every host that is not left out."""

    lease = 7
    num_own_engines = 0

    def __init__(self, folder: Path, count: int) -> None:
        self.receivers: list[Receiver] = []
        for number in range(count):
            own = folder / f"host-{number}"
            own.mkdir(mode=0o700)
            self.receivers.append(Receiver(own, "token", "127.0.0.1"))
        self.lost: list[tuple[str, int, str]] = []
        self.loaded: list[int] = []

    def hosts(self) -> DeliveryHosts:
        named = [
            DeliveryHost(name=f"host-{number}", address="127.0.0.1", port=receiver.port)
            for number, receiver in enumerate(self.receivers)
        ]
        return DeliveryHosts(epoch=1, token="token", hosts=named, num_own_engines=self.num_own_engines)

    def lose_host(self, name: str, version: int, reason: str) -> None:
        self.lost.append((name, version, reason))

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        num_loaded = 0
        for receiver in self.receivers:
            folder = receiver.folder / f"version-{weights.version}"
            num_loaded += folder.is_dir() and load_arriving(folder, weights.fingerprint, weights.base)
        self.loaded.append(num_loaded)
        return PublishAnswer()


@contextlib.contextmanager
def publishing(case: str, model: Path, folder: Path, settings: HostSettings, is_apart: bool = False) -> Iterator[Any]:
    """Build a model and its publisher."""
    with start_session(CASES[case]) as session:
        weights = build(session, CASES[case], model).weights
        with publishing_weights(weights, session, folder, settings, is_apart) as (hosts, publisher):
            yield hosts, weights, publisher


@contextlib.contextmanager
def publishing_weights(
    weights: Any, session: Any, folder: Path, settings: HostSettings, is_apart: bool
) -> Iterator[Any]:
    """Build a publisher; ranks that are apart do not see each other's folders, as on hosts of their own."""
    hosts = Hosts(folder, 2) if session.rank == 0 else None
    own = folder / (f"rank-{session.rank}" if is_apart else "ranks")
    deliveries = Deliveries(weights, session, hosts, "run", settings, deadline_seconds=60)
    publisher = Publisher(weights, session, hosts, "run", FilesTransport(own / "run", hosts=deliveries))
    yield hosts, publisher
    publisher.close()
    session.barrier()
    assert list(own.iterdir()) == []
    for receiver in hosts.receivers if hosts is not None else ():
        receiver.close()


def publish_and_lose_a_host(case: str, model: Path, folder: Path, is_apart: bool) -> Any:
    """Publish while parameters change; the second host dies before the third publish."""
    hosts_module._PATIENCE_SECONDS = 0.5
    with publishing(case, model, folder, HostSettings(), is_apart) as (hosts, weights, publisher):
        for version in range(4):
            if version == 2 and hosts is not None:
                hosts.receivers[1].close()
            publisher.publish(version)
            change(weights)
        return None if hosts is None else (hosts.loaded, hosts.lost)


def publish_past_a_host_that_one_rank_does_not_reach(model: Path, folder: Path) -> Any:
    hosts_module._PATIENCE_SECONDS = 0.5
    with publishing("TP2", model, folder, HostSettings(seconds=20.0), is_apart=True) as (hosts, _, publisher):
        if hosts is None:
            make = hosts_module.Target
            # No process listens at port 1.
            hosts_module.Target = lambda name, address, port: make(name, address, 1 if name == "host-1" else port)
        publisher.publish(0)
        return None if hosts is None else (hosts.loaded, hosts.lost)


def test_a_host_that_one_rank_does_not_reach_is_left_out_with_that_ranks_reason(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    found, _ = run_ranks(publish_past_a_host_that_one_rank_does_not_reach, 2, model, memory)
    loaded, [(name, version, reason)] = found
    assert (loaded, name, version) == ([1], "host-1", 0)
    assert "host-1 was silent for" in reason
    assert "127.0.0.1:1 does not answer" in reason


@pytest.mark.parametrize(("case", "is_apart"), [("TP2", True), ("DP2+distopt", False)])
def test_every_host_loads_what_ranks_send_and_a_lost_host_is_left_out(
    case: str, is_apart: bool, tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    (loaded, lost), _ = run_ranks(publish_and_lose_a_host, 2, case, model, memory, is_apart)
    assert loaded == [2, 2, 1, 1]
    assert [(name, version) for name, version, _ in lost] == [("host-1", 2), ("host-1", 3)]
    assert "host-1 was silent for" in lost[0][2]


def publish_adapters(model: Path, folder: Path) -> Any:
    torch.distributed.init_process_group("gloo")
    with training(model, "--tensor-model-parallel-size 2 --lora-rank 4 --lr 1e-3") as trained:
        base = trained.base
        assert base is not None
        weights, given = base.weights.without_base(base.adapters, None), {}
        with publishing_weights(weights, trained.session, folder, HostSettings(), is_apart=True) as (hosts, publisher):
            for version in range(2):
                publisher.publish(version)
                for shard in base.adapters.shards:
                    shard.parameter.detach().fill_(0.5 + version)
            if hosts is not None:
                given = map_file_tensors(hosts.receivers[0].folder / "version-1")
                given = {name: tensor.clone() for name, tensor in given.items()}
        return None if hosts is None else (hosts.loaded, hosts.lost, given)


@pytest.mark.slow
def test_hosts_get_adapters_and_nothing_of_their_base(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    (loaded, lost, given), _ = run_ranks(publish_adapters, 2, model, memory)
    assert (loaded, lost) == ([2, 2], [])
    wanted = AdapterMapping(Mapping(read_architecture(model)), 4).manifest("float32")
    assert {name: tuple(tensor.shape) for name, tensor in given.items()} == {one.name: one.shape for one in wanted}
    # The default alpha is twice the rank.
    assert all(bool((tensor == (1.0 if "lora_B" in name else 0.5)).all()) for name, tensor in given.items())


def publish_and_wait_for_a_host(model: Path, folder: Path) -> str:
    hosts_module.Deliveries._find_patience = lambda self: 0.5  # type: ignore[method-assign]
    logging.disable()
    with publishing("TP2", model, folder, HostSettings(lost_host="wait")) as (hosts, _, publisher):
        if hosts is not None:
            hosts.receivers[1].close()
        with pytest.raises(MegatronRLError) as caught:
            publisher.publish(0)
        return str(caught.value)


def test_a_host_that_must_not_be_left_out_ends_the_run_by_name_on_every_rank(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    for message in run_ranks(publish_and_wait_for_a_host, 2, model, memory):
        assert "version 0 was not delivered to every host: host-1 was silent for" in message
        assert "--publish-lost-host leave" in message


def publish_with_an_engine_on_the_services_host(model: Path, folder: Path) -> str:
    Hosts.num_own_engines = 1
    with pytest.raises(MegatronRLError) as caught, publishing("TP2", model, folder, HostSettings(), is_apart=True):
        pass
    return str(caught.value)


def test_ranks_on_several_hosts_refuse_engines_that_read_the_folder_of_one_of_them(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    for message in run_ranks(publish_with_an_engine_on_the_services_host, 2, model, tmp_path):
        assert message.startswith("rank 1 on ")
        assert "The engines of the sidecar's own host, 1, read that folder alone: start an agent there" in message
