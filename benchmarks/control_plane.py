"""Measure what many engines and replicas cost the rollout service: its processor time, its memory, a publish.

4,096 groups of 16 responses of 256 tokens, journaled and audited, for 64 replicas of 64 ranks. As in a run, one rank of
each replica asks for its slots, by the trainer's own client. The service has its own clients of engines, 1 to 1,024;
the engines' servers are stand-ins (`control_engines.py`), which answer at once. So all seconds are the service's own.

A publish is measured on its own too, with the engines on hosts of eight, and so is the start of all these engines at
once: `--publish-only` measures nothing else.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from benchmarks import report
from benchmarks.control_engines import FACTS, serve_agents, serve_engines
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.hosts import HostList, HostPlace
from megatron_rl.sidecar.hosts.factory import HostsFactory
from megatron_rl.sidecar.hosts.membership import Hosts
from megatron_rl.sidecar.http import build_application
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.recorder import RunRecorder
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.serving import serve
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.sidecar.scripted_service import RewardLength, weights

NUM_REPLICAS, NUM_GROUPS, GROUP_SIZE, NUM_TOKENS, NUM_PROMPT_TOKENS = 64, 4096, 16, 256, 64
NUM_ENGINES = (1, 4, 16, 64, 256, 1024)
ENGINES_OF_HOST = 8
TOKEN = "benchmark"
PICTURE = Path(__file__).with_name("control_plane.svg")


class Cost(NamedTuple):
    """The service's costs with some number of engines."""

    milliseconds: float
    """Processor time of a group, from its submission until its replica has it."""
    gib: float
    """The most memory of the service."""
    idle: float
    """Processor seconds a second while nothing is asked."""
    publish: float
    """Seconds of a publish, without the load: stand-ins load nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=NUM_ENGINES)
    parser.add_argument("--groups", type=int, default=NUM_GROUPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--publish-only", action="store_true", help="measure publishes to hosts alone")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.engines, arguments.groups, arguments.rounds = (1, 4), 2 * NUM_REPLICAS, 1
        arguments.idle_seconds = 0.5
    on_hosts = measure_hosts(arguments.engines[-1], arguments.rounds)
    if arguments.publish_only:
        report.finish(on_hosts)
        return
    measured: dict[int, list[Cost]] = {num_engines: [] for num_engines in arguments.engines}
    for _ in range(arguments.rounds):
        for num_engines, costs in measured.items():
            costs.append(measure(num_engines, arguments.groups, arguments.idle_seconds))
    for field in Cost._fields:
        rows = {f"{num} engines": [getattr(cost, field) for cost in costs] for num, costs in measured.items()}
        report.table(TITLES[field], rows, "")
    if not arguments.tiny:
        draw(measured, PICTURE)
    costs = measured[max(measured)]
    medians = {field: statistics.median(getattr(cost, field) for cost in costs) for field in Cost._fields}
    report.finish(
        {
            "ms_per_group_1024": medians["milliseconds"],
            "gib_1024": medians["gib"],
            "idle_1024": medians["idle"],
            "publish_seconds_1024": medians["publish"],
            **on_hosts,
        }
    )


TITLES = {
    "milliseconds": "the service's processor time of a group, ms",
    "gib": "the service's most memory, GiB",
    "idle": "the service's processor time while nothing is asked, seconds a second",
    "publish": "a publish of no bytes, seconds",
}


def measure(num_engines: int, num_groups: int, idle_seconds: float) -> Cost:
    """Start engines and a service, publish, and pull an iteration."""
    context = multiprocessing.get_context("spawn")
    folder = make_socket_folder()
    ours, theirs = multiprocessing.Pipe()
    sockets = [folder / f"engine-{number}" for number in range(num_engines)]
    processes = [
        context.Process(target=serve_engines, args=(sockets, GROUP_SIZE, NUM_TOKENS), daemon=True),
        context.Process(target=_service, args=(folder, sockets, theirs), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        assert ours.recv() == "ready"
        before = _ask(ours)
        time.sleep(idle_seconds)
        idle = (_ask(ours) - before) / idle_seconds
        publishing, pulling = _pull(folder / "socket", num_groups, lambda: _ask(ours))
        ours.send("end")
        peak = ours.recv()
    finally:
        processes[1].join(30)
        processes[0].terminate()
        shutil.rmtree(folder, ignore_errors=True)
    return Cost(1e3 * pulling / num_groups, peak / 2**30, idle, publishing)


def measure_hosts(num_engines: int, rounds: int) -> dict[str, float]:
    """Measure publishes to engines on hosts of eight: seconds, and the service's processor seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = multiprocessing.Pipe()
    num_hosts = max(1, num_engines // ENGINES_OF_HOST)
    serving = context.Process(target=serve_agents, args=(num_hosts, GROUP_SIZE, NUM_TOKENS, theirs), daemon=True)
    serving.start()
    publishing = context.Process(target=_publish_to_hosts, args=(ours.recv(), rounds, theirs), daemon=True)
    publishing.start()
    # The wait ends with an error if that process does.
    theirs.close()
    try:
        starting, *rows = ours.recv()
    finally:
        publishing.join(30)
        serving.terminate()
    title = f"a publish of no bytes to {num_hosts} hosts of {ENGINES_OF_HOST} engines"
    report.table(title, {"seconds": rows[0], "processor seconds of the service": rows[1]}, "")
    report.table("all these engines are started at once", {"seconds": [starting]}, "")
    return {
        "publish_hosts_seconds_1024": statistics.median(rows[0]),
        "publish_hosts_cpu_1024": statistics.median(rows[1]),
        "start_hosts_seconds_1024": starting,
    }


def _publish_to_hosts(addresses: Sequence[str], rounds: int, pipe: Pipe) -> None:
    asyncio.run(_publish_rounds(addresses, rounds, pipe))


async def _publish_rounds(addresses: Sequence[str], rounds: int, pipe: Pipe) -> None:
    folder = make_socket_folder()
    config = ServerConfig(model=str(folder), max_model_len=FACTS["max_model_len"])
    places = tuple(HostPlace(address, ENGINES_OF_HOST) for address in addresses)
    hosts = Hosts(HostList(places, TOKEN), "run")
    own = VllmFactory(config, folder, LocalLauncher())
    supervisor = Supervisor(HostsFactory(own, 0, hosts.all, config), SupervisorConfig())
    hosts.open()
    try:
        await supervisor.start(0)
        begun = time.monotonic()
        supervisor.add(hosts.num_engines)
        while any(engine["state"] != EngineState.WAITING for engine in supervisor.status()["engines"].values()):
            await asyncio.sleep(0.05)
        starting = time.monotonic() - begun
        assert not any(engine["restarts"] for engine in supervisor.status()["engines"].values())
        rows: tuple[list[float], list[float]] = ([], [])
        for version in range(1, rounds + 1):
            begun, before = time.monotonic(), time.process_time()
            await supervisor.publish(weights(version, str(folder)))
            rows[0].append(time.monotonic() - begun)
            rows[1].append(time.process_time() - before)
        pipe.send((starting, *rows))
    finally:
        await supervisor.close()
        await hosts.close()
        shutil.rmtree(folder)


def _ask(service: Pipe) -> float:
    """Return the processor seconds that the service has used."""
    service.send("seconds?")
    return float(service.recv())


def _pull(place: Path, num_groups: int, count: Callable[[], float]) -> tuple[float, float]:
    """Publish and take all slots; return the seconds of the publish, and the processor seconds of the iteration."""
    plan = wire.Plan(
        num_prompts=num_groups, group_size=GROUP_SIZE, num_replicas=NUM_REPLICAS, micro_batch_size=GROUP_SIZE
    )
    prompt = wire.encode_tokens(range(NUM_PROMPT_TOKENS))
    submission = wire.Submission(
        run="run", version=0, fingerprint=weights().fingerprint, plan=plan, deadline_seconds=600,
        prompts=[wire.Prompt(index=index, row=str(index), tokens=prompt) for index in range(num_groups)],
        sampling=wire.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True),
    )  # fmt: skip
    transport = httpx.HTTPTransport(uds=str(place), limits=httpx.Limits(max_connections=None))
    with (
        RolloutClient("http://sidecar", TOKEN, transport=transport) as client,
        ThreadPoolExecutor(NUM_REPLICAS) as ranks,
    ):
        client.take_lease("run")
        begun = time.monotonic()
        client.publish(weights(), 600)
        publishing = time.monotonic() - begun
        before = count()
        client.submit(submission)

        def pull(replica: int) -> None:
            for index in range(num_groups // NUM_REPLICAS):
                (part,) = client.slot(0, replica, index, 600).parts
                assert [len(response.tokens) for response in part.responses] == [4 * NUM_TOKENS] * GROUP_SIZE

        for _ in ranks.map(pull, range(NUM_REPLICAS)):
            pass
        return publishing, count() - before


def _service(folder: Path, sockets: Sequence[Path], pipe: Pipe) -> None:
    asyncio.run(_serve(folder, sockets, pipe))


async def _serve(folder: Path, sockets: Sequence[Path], pipe: Pipe) -> None:
    config = ServerConfig(model="", max_model_len=FACTS["max_model_len"])
    factory = VllmFactory(config, folder, LocalLauncher())
    supervisor = Supervisor(factory, SupervisorConfig(max_responses=2 * FACTS["max_num_seqs"]))
    while not all(map(Path.exists, sockets)):
        await asyncio.sleep(0.01)
    await supervisor.start(0)
    await asyncio.gather(*(supervisor.adopt(str(place)) for place in sockets))
    service = RolloutService(supervisor, RewardLength(), RunRecorder(folder, "run"))
    ended = asyncio.Event()
    app = build_application(service, TOKEN, ended.set)
    server = asyncio.create_task(serve(app, uds=folder / "socket", until=ended))
    while not (folder / "socket").exists():
        await asyncio.sleep(0.01)
    process, peak = psutil.Process(os.getpid()), 0
    pipe.send("ready")
    while True:
        await asyncio.sleep(0.05)
        peak = max(peak, process.memory_info().rss)
        if pipe.poll():
            if pipe.recv() == "end":
                break
            pipe.send(time.process_time())
    pipe.send(peak)
    ended.set()
    await server
    await supervisor.close()


def draw(measured: Mapping[int, Sequence[Cost]], path: Path) -> None:
    """Draw each cost over the number of engines: medians, with least and greatest."""
    # Its import is slow, and the processes that are measured import this module.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for axes, field in zip(figure.subplots(2, 2).flat, Cost._fields, strict=True):
        figures = [[getattr(cost, field) for cost in costs] for costs in measured.values()]
        medians = [statistics.median(row) for row in figures]
        spread = [
            [m - min(row) for m, row in zip(medians, figures, strict=True)],
            [max(row) - m for m, row in zip(medians, figures, strict=True)],
        ]
        axes.errorbar(list(measured), medians, yerr=spread, marker="o", capsize=3)
        axes.set_xscale("log", base=4)
        axes.set_xticks(list(measured), [str(num) for num in measured])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("engines")
        axes.set_title(TITLES[field], fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    # Under its importable name, where the other processes find the functions that they run.
    from benchmarks.control_plane import main as importable_main

    importable_main()
