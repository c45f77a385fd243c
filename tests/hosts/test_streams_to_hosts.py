"""Weights that stream from a run's ranks to vLLM engines on two other hosts, over vLLM's own transfer engine.

The wire alone needs a device: gloo stands in for NCCL (tests/sidecar/gloo_transfer.py). The sidecar listens at the
loopback address of the ranks' host, which other hosts do not reach.
"""

import json
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.errors import ExitCode
from tests.e2e import loop
from tests.hosts.namespaces import OWN_ADDRESS, network
from tests.hosts.real_agents import RealAgent
from tests.hosts.worlds import running, write_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OVER_GLOO = """
    import time
    from pathlib import Path
    import tests.sidecar.gloo_transfer
    from megatron_rl.platforms.cpu import CpuPlatform
    from megatron_rl.sidecar import settings
    from megatron_rl.trainer.mcore.publish import stream

    CpuPlatform.weight_transports = ("shm", "nccl")
    settings._STREAMS["cpu"] = ("nccl",)
    folder = Path({folder!r})
"""
"""Has ranks on CPUs stream."""
MEETINGS = """
    def meet(moment):
        (folder / moment).touch()
        while not (folder / f"{moment}-done").exists():
            time.sleep(0.05)

    publish, iterate = stream.StreamTransport.send, stream.WholeModel.__iter__
    current = []

    def publish_with_meetings(self, version):
        current[:] = [version]
        if version == 2:
            meet("before-2")
        while version == 3 and self._publisher.receiver.num_workers() < 2:
            time.sleep(0.2)
        return publish(self, version)

    def iterate_with_meetings(self):
        for number, found in enumerate(iterate(self)):
            if number == 1 and current == [4]:
                meet("within-4")
            yield found

    stream.StreamTransport.send = publish_with_meetings
    stream.WholeModel.__iter__ = iterate_with_meetings
"""
"""Has rank 0 wait for the test before version 2, for both engines before version 3, and in the stream of version 4."""


class GlooAgent(RealAgent):
    """An agent whose engines receive streams over gloo."""

    program = ("-m", "tests.hosts.gloo_agent")


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[GlooAgent]]:
    """Start agents on two hosts."""
    with network(2) as hosts:
        made = [GlooAgent(host, tmp_path / f"host-{number}") for number, host in enumerate(hosts)]
        with running(made):
            yield made


def list_words(world: loop.World, agents: list[GlooAgent], *together: str, **changes: object) -> list[str]:
    hosts = write_hosts(world.folder, agents, *together)
    return world.words(
        "run", tensor_model_parallel_size=2, rollout_engine="vllm", rollout_num_engines=0, rollout_max_num_seqs=8,
        rollout_transport="nccl", rollout_hosts=f"static:{hosts}", **changes,
    )  # fmt: skip


def list_publishes(run: Path) -> list[tuple[int, list[str]]]:
    """List the versions that were published, each with the engines that were proved to hold all of it."""
    found = []
    for event in map(json.loads, (run / "audit.jsonl").read_text().splitlines()):
        if event["event"] == "publish":
            for engine in event["engines"]:
                assert engine["compared"] == engine["parameters"] > 0
                assert engine["probe"]["mean"] < 1e-4
            found.append((event["version"], sorted(engine["engine"] for engine in event["engines"])))
    return found


def read_log(run: Path) -> str:
    """Return the sidecar's log, which a run that ended early does not have."""
    log = run / "sidecar.log"
    return log.read_text() if log.exists() else ""


def await_file(path: Path, is_over: Callable[[], bool], seconds: float = 1800.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline
        assert not is_over(), f"{path.name} never came"
        time.sleep(0.05)


def test_versions_are_published_without_a_lost_host_which_joins_again_until_one_is_lost_in_the_stream(
    tmp_path, agents, capsys
):
    world = loop.make_world(tmp_path, head_dim=32)
    run = tmp_path / "runs" / "run"
    over_gloo = textwrap.dedent(OVER_GLOO).format(folder=str(tmp_path))
    faults = {0: over_gloo + textwrap.dedent(MEETINGS), 1: over_gloo}
    words = list_words(world, agents, train_iters=6)
    with loop.running(tmp_path / "outputs", 2, words, faults, OMP_NUM_THREADS="1") as ranks:
        try:

            def is_over() -> bool:
                return any(process.poll() is not None for process in ranks.processes)

            await_file(tmp_path / "before-2", is_over)
            agents[1].kill()
            (tmp_path / "before-2-done").touch()
            await_file(tmp_path / "runs" / "run" / "metrics.jsonl", is_over)
            while len((run / "metrics.jsonl").read_text().splitlines()) < 3:
                assert not is_over()
                time.sleep(0.05)
            agents[1].start()
            await_file(tmp_path / "within-4", is_over)
            agents[1].kill()
            killed = time.monotonic()
            codes = ranks.wait(300)
            seconds = time.monotonic() - killed
        finally:
            print(ranks.text())
            print(read_log(run))
    assert codes == [ExitCode.RUN] * 2
    agents[0].await_no_engines(60)
    publishes = list_publishes(run)
    assert publishes == [(version, ["engine-0", "engine-1"][: 1 if version == 2 else 2]) for version in range(4)]
    lost = f"host {agents[1].address} is lost"
    assert lost in ranks.text()
    said = (run / "sidecar.log").read_text()
    assert "engine-0: its load was cut off, because engine engine-1 had left the stream" in said
    assert f"its workers waited in the group at {OWN_ADDRESS}" in said or f"from the group at {OWN_ADDRESS}" in said
    assert "engine engine-1 waits for the next publish" in said
    assert megatron_rl(["audit", str(run)]) == 0
    with capsys.disabled():
        print(f"\nthe run ended {seconds:.1f} s after the loss in the stream; {json.dumps(publishes)}")
    assert "0 breaches" in capsys.readouterr().out


def test_an_engine_over_two_hosts_receives_its_parts_of_a_stream(tmp_path, agents, capsys):
    world = loop.make_world(tmp_path, head_dim=32)
    run = tmp_path / "runs" / "run"
    over_gloo = textwrap.dedent(OVER_GLOO).format(folder=str(tmp_path))
    words = list_words(world, agents, 'together = "both"', train_iters=2, rollout_tensor_parallel_size=2)
    with loop.running(tmp_path / "outputs", 2, words, {0: over_gloo, 1: over_gloo}, OMP_NUM_THREADS="1") as ranks:
        codes = ranks.wait(1800)
        print(ranks.text())
        print(read_log(run))
    assert codes == [0, 0]
    assert list_publishes(run) == [(version, ["engine-0"]) for version in range(2)]
    assert megatron_rl(["audit", str(run)]) == 0
    assert "2 of 2 iterations complete, 0 breaches" in capsys.readouterr().out
