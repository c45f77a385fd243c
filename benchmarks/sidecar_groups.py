"""Measure the cost of a long group for the service's event loop: its own seconds of computing, by its thread's clock.

A stand-in for vLLM's server, in a process of its own, answers every request with the same 16 responses of 4,096 tokens.
The service reads them, checks them, has them decoded and scored, journals and audits them and hands them out, as ever;
one client takes the slots.
"""

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import numpy as np

from benchmarks import random_models
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.chat import build_decoder
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.group_maker import PoolScorer
from megatron_rl.sidecar.http import build_application
from megatron_rl.sidecar.publication import AwaitAnswer, Published
from megatron_rl.sidecar.recorder import RunRecorder
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.serving import serve
from megatron_rl.sidecar.vllm.answers import Limits
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.routes import GroupAnswer, GroupChoice, GroupSpan
from tests.sidecar.scripted_service import Engines, weights

GROUP_SIZE, NUM_TOKENS, NUM_PROMPT_TOKENS, VOCAB_SIZE = 16, 4096, 64, 512
TOKEN = "benchmark"
TAG = f"{weights().version}:{weights().fingerprint}"


def measure(num_groups: int) -> float:
    """Return milliseconds of a group."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        ours, theirs = multiprocessing.Pipe()
        processes = [
            context.Process(target=_answer, args=(place / "engine",)),
            context.Process(target=_service, args=(place, theirs)),
        ]
        for process in processes:
            process.start()
        try:
            assert ours.recv() == "ready"
            before = _ask(ours)
            _pull(place / "socket", num_groups)
            seconds = _ask(ours) - before
            ours.send("end")
        finally:
            processes[1].join(30)
            processes[0].terminate()
    return 1e3 * seconds / num_groups


def _ask(service: Pipe) -> float:
    service.send("seconds?")
    return float(service.recv())


def _answer(socket: Path) -> None:
    """Stand in for vLLM's server."""
    draw = np.random.default_rng(0)
    choices = []
    for index in range(GROUP_SIZE):
        tokens = wire.encode_tokens(draw.integers(0, VOCAB_SIZE, NUM_TOKENS))
        log_probs = wire.encode_log_probs(-4 * draw.random(NUM_TOKENS, dtype=np.float32))
        choices.append(GroupChoice(index, "length", tokens, tokens, log_probs, [GroupSpan(TAG, 0, NUM_TOKENS)]))
    body = msgspec.msgpack.encode(GroupAnswer(choices))
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.read()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(handle, str(socket)) as server:
            await server.serve_forever()

    asyncio.run(run())


class _Held(Engines):
    """Engines that hold the published weights."""

    async def publish(self, weights: wire.Weights, answer: AwaitAnswer | None = None) -> Published:
        return Published(weights, (), (), None, (wire.EngineKind(),))


def _pull(socket: Path, num_groups: int) -> None:
    plan = wire.Plan(num_prompts=num_groups, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
    prompt = wire.encode_tokens(range(NUM_PROMPT_TOKENS))
    with RolloutClient("http://sidecar", TOKEN, transport=httpx.HTTPTransport(uds=str(socket))) as client:
        client.take_lease("run")
        client.publish(weights(), 60)
        client.submit(
            wire.Submission(
                run="run", version=weights().version, fingerprint=weights().fingerprint, plan=plan,
                prompts=[wire.Prompt(index=index, row=str(index), tokens=prompt) for index in range(num_groups)],
                sampling=wire.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True), deadline_seconds=600,
            )
        )  # fmt: skip
        for index in range(num_groups):
            (part,) = client.slot(weights().version, 0, index, 600).parts
            assert [len(response.tokens) for response in part.responses] == [4 * NUM_TOKENS] * GROUP_SIZE


def _service(place: Path, pipe: Pipe) -> None:
    random_models.make_tokenizer(place / "model", VOCAB_SIZE)
    asyncio.run(_serve(place, pipe))


async def _serve(place: Path, pipe: Pipe) -> None:
    engine = VllmEngine("engine-0", str(place / "engine"))
    engine.limits = Limits(NUM_PROMPT_TOKENS + NUM_TOKENS, GROUP_SIZE, VOCAB_SIZE)
    engine._version, engine._tag = weights().version, TAG
    engine.state = EngineState.READY
    pool = RewardPool(parse_specs(["length:8"]))
    await pool.start()
    try:
        scorer = PoolScorer(pool, build_decoder(str(place / "model")))
        service = RolloutService(_Held(cast(Any, engine)), scorer, RunRecorder(place, "run"))
        ended = asyncio.Event()
        app = build_application(service, TOKEN, ended.set)
        server = asyncio.create_task(serve(app, uds=place / "socket", until=ended))
        while not (place / "socket").exists() or not (place / "engine").exists():
            await asyncio.sleep(0.01)
        pipe.send("ready")
        while True:
            await asyncio.sleep(0.02)
            if pipe.poll():
                if pipe.recv() == "end":
                    break
                pipe.send(time.thread_time())
        ended.set()
        await server
    finally:
        await pool.close()
