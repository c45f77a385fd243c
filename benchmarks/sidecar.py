"""Measure the cost of the rollout service: over scripted engines, and over a real one beside a bare client of the same.

Scripted: 4,096 groups of 16 responses of 256 tokens, journaled and audited, for 64 replicas of 8 ranks that all pull,
from submission until every rank has its slot. The ranks are connections of one other process, which does nothing but
ask and count bytes. Real: see `benchmarks/sidecar_tokens.py`.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil

from benchmarks import report
from benchmarks.connection import Connection
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.engines.scripted import Script, ScriptedEngine
from megatron_rl.sidecar.http import build_application
from megatron_rl.sidecar.recorder import RunRecorder
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.serving import serve
from tests.sidecar.scripted_service import Engines, RewardLength, weights

NUM_REPLICAS, RANKS_OF_A_REPLICA = 64, 8
GROUP_SIZE, NUM_TOKENS = 16, 256
TOKEN = "benchmark"
AUTHORIZATION = f"Authorization: Bearer {TOKEN}"


def main() -> None:
    # Imported here, because the service's process imports this module too and its memory is measured.
    from benchmarks import sidecar_groups, sidecar_tokens
    from benchmarks.publish import ARCHITECTURES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--token-rounds", type=int, default=9, help="with a real engine; 0 leaves it out")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.groups, arguments.rounds, arguments.token_rounds = NUM_REPLICAS, 1, 1
    rounds = [_measure(arguments.groups) for _ in range(arguments.rounds)]
    milliseconds = [1e3 * seconds / arguments.groups for seconds, _ in rounds]
    memory = [peak / 2**30 for _, peak in rounds]
    print(
        f"{arguments.groups} groups of {GROUP_SIZE} responses of {NUM_TOKENS} tokens, "
        f"{NUM_REPLICAS} replicas of {RANKS_OF_A_REPLICA} ranks"
    )
    report.table("scripted engines", {"ms a group": milliseconds, "peak memory of the service, GiB": memory}, "")
    figures = {"ms_per_group_scripted": statistics.median(milliseconds), "gib_scripted": max(memory)}
    of_loop = [sidecar_groups.measure(4 if arguments.tiny else 64) for _ in range(arguments.rounds)]
    report.table("a group of 16 responses of 4,096 tokens", {"the event loop's own time": of_loop}, "ms")
    figures["loop_ms_per_group_4096"] = statistics.median(of_loop)
    if arguments.token_rounds:
        if arguments.tiny:
            tokens = sidecar_tokens.measure(1, 1, concurrencies=(1,), is_tiny=True)
        else:
            tokens = sidecar_tokens.measure(arguments.token_rounds)
        bare, alone = sidecar_tokens.compare_to_bare(tokens), sidecar_tokens.compare_to_alone(tokens)
        report.table("one vLLM engine", tokens, "tokens/s")
        ratios = {"service / bare client at its best": bare, "service / vLLM alone": alone}
        report.table("in the same round", ratios, "")
        figures["service_vs_raw_tokens"] = statistics.median(bare)
        figures["service_vs_offline_tiny"] = statistics.median(alone)
    if arguments.token_rounds and not arguments.tiny:
        tokens = sidecar_tokens.measure(arguments.token_rounds, 8, ARCHITECTURES["40m"], concurrencies=())
        alone = sidecar_tokens.compare_to_alone(tokens)
        report.table("one vLLM engine, 40 M parameters", tokens, "tokens/s")
        report.table("in the same round", {"service / vLLM alone": alone}, "")
        figures["service_vs_offline_40m"] = statistics.median(alone)
    report.finish(figures)


def _measure(num_groups: int) -> tuple[float, float]:
    """Return seconds from submission until the last rank has its last slot, and the service's peak memory in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "socket"
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_service, args=(socket, theirs), daemon=True)
        process.start()
        try:
            assert ours.recv() == "ready"
            seconds = asyncio.run(_pull(socket, num_groups))
            ours.send("end")
            peak = ours.recv()
        finally:
            process.join(30)
    return seconds, peak


def _service(socket: Path, connection: Pipe) -> None:
    script = Script(lengths=(NUM_TOKENS, NUM_TOKENS))
    engines = Engines(*(ScriptedEngine(str(number), script) for number in range(4)))
    engines.max_in_flight = 64
    asyncio.run(_serve(RolloutService(engines, RewardLength(), RunRecorder(socket.parent, "run")), socket, connection))


async def _serve(service: RolloutService, socket: Path, connection: Pipe) -> None:
    ended = asyncio.Event()
    server = asyncio.create_task(serve(build_application(service, TOKEN, ended.set), uds=socket, until=ended))
    while not socket.exists():
        await asyncio.sleep(0.01)
    connection.send("ready")
    process, peak = psutil.Process(os.getpid()), 0
    while not connection.poll():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.05)
    connection.send(peak)
    ended.set()
    await server


async def _pull(socket: Path, num_groups: int) -> float:
    plan = wire.Plan(
        num_prompts=num_groups, group_size=GROUP_SIZE, num_replicas=NUM_REPLICAS, micro_batch_size=GROUP_SIZE
    )
    prompts = [
        wire.Prompt(index=index, row=str(index), tokens=wire.encode_tokens(range(index, index + 64)))
        for index in range(num_groups)
    ]
    submission = wire.Submission(
        run="run", version=0, fingerprint="weights-0", plan=plan, prompts=prompts, deadline_seconds=600,
        sampling=wire.Sampling(max_tokens=NUM_TOKENS),
    )  # fmt: skip
    control = await Connection.to(socket)
    path = f"/v1/lease?run=run&wire={wire.WIRE_VERSION}"
    lease = json.loads(await control.ask("POST", path, b"", AUTHORIZATION))["lease"]
    headers = (AUTHORIZATION, f"X-Lease: {lease}")
    await control.ask("POST", "/v1/publish", wire.encode(weights()), *headers)
    ranks = [
        (replica, await Connection.to(socket)) for replica in range(NUM_REPLICAS) for _ in range(RANKS_OF_A_REPLICA)
    ]
    start = time.monotonic()
    await control.ask("POST", "/v1/iterations", wire.encode(submission), *headers)
    num_slots = num_groups // NUM_REPLICAS
    await asyncio.gather(*(_pull_slots(rank, replica, num_slots, headers) for replica, rank in ranks))
    return time.monotonic() - start


async def _pull_slots(connection: Connection, replica: int, num_slots: int, headers: tuple[str, ...]) -> None:
    for index in range(num_slots):
        path = f"/v1/iterations/0/slots/{replica}/{index}?patience=30"
        while not await connection.ask("GET", path, b"", *headers):
            pass


if __name__ == "__main__":
    # Under its importable name, where the other process finds the function it runs.
    from benchmarks.sidecar import main as importable_main

    importable_main()
