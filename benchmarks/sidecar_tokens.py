"""Tokens per second through the service over a real vLLM engine, and of a bare client of the same server.

The service decodes, checks, scores, journals, audits and hands out; the bare client sends requests over the engine's
socket and counts the bytes of the answers. Both ask for groups of the same sizes, in turn, in an order that rotates,
and each after a publish: an engine samples more slowly just after it has taken weights, whoever asks.
"""

import asyncio
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks import checkpoints
from benchmarks.connection import Connection
from megatron_rl.protocol import wire
from megatron_rl.protocol.client import RolloutClient
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.vllm.answers import Limits, build_request
from megatron_rl.types import Architecture
from tests.sidecar.sidecar_process import SidecarProcess, sidecar
from tests.sidecar.vllm_models import in_shared_memory

TINY = Architecture(
    family="qwen3", num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=512, max_position_embeddings=1024,
    qk_layernorm=True,
)  # fmt: skip
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS, NUM_PROMPT_TOKENS = 64, 8, 128, 32
CONCURRENCIES = (8, 16, 32)
SERVICE = "service"
SAMPLING = wire.Sampling(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
PLAN = wire.Plan(num_prompts=NUM_GROUPS, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
Asker = Callable[[wire.Weights], float]
_LIMITS = Limits(max_model_len=256, max_num_seqs=64, vocab_size=TINY.vocab_size)


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each run, by what asked."""
    figures: dict[str, list[float]] = {}
    versions = itertools.count()
    with _serving() as (process, client, model):
        socket, run = _socket(process), process.folder.name
        askers: dict[str, Asker] = {SERVICE: functools.partial(_service, client, run)}
        askers |= {f"bare, {c} groups in flight": functools.partial(_bare, socket, c) for c in CONCURRENCIES}
        names = list(askers)
        for number in range(num_rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with _published(client, run, model, next(versions)) as weights:
                    tokens_per_second = askers[name](weights)
                # The first round warms up.
                if number:
                    figures.setdefault(name, []).append(tokens_per_second)
    return figures


def ratios(figures: dict[str, list[float]]) -> list[float]:
    """The service over the bare client at the concurrency that is best for it, round by round."""
    bare = max((runs for name, runs in figures.items() if name != SERVICE), key=statistics.median)
    return [ours / theirs for ours, theirs in zip(figures[SERVICE], bare, strict=True)]


@contextmanager
def _serving() -> Iterator[tuple[SidecarProcess, RolloutClient, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        model, run = Path(folder) / "model", Path(folder) / "run"
        checkpoints.make(model, TINY)
        words = ("--hf-model", str(model), "--seq-length", str(_LIMITS.max_model_len), "--reward", "length:8")
        with sidecar(run, *words, "--platform", "cpu", seconds=180) as process, process.client() as client:
            client.take_lease(run.name)
            yield process, client, model


def _socket(process: SidecarProcess) -> Path:
    """Where the one engine listens."""
    for started in process.tree():
        words = started.cmdline()
        if "--uds" in words:
            return Path(words[words.index("--uds") + 1])
    raise RuntimeError("the sidecar has started no engine")


@contextmanager
def _published(client: RolloutClient, run: str, model: Path, version: int) -> Iterator[wire.Weights]:
    with in_shared_memory(model, version) as weights:
        weights = msgspec.structs.replace(weights, run=run)
        client.publish(weights, 60)
        yield weights


def _service(client: RolloutClient, run: str, weights: wire.Weights) -> float:
    version = weights.version
    prompts = [
        wire.Prompt(index=index, row=str(index), tokens=wire.encode_tokens(_prompt(version, index)))
        for index in range(NUM_GROUPS)
    ]
    submission = wire.Submission(
        run=run, version=version, fingerprint=weights.fingerprint, plan=PLAN, prompts=prompts, sampling=SAMPLING,
        deadline_seconds=300,
    )  # fmt: skip
    start = time.perf_counter()
    client.submit(submission)
    slots = [client.slot(version, 0, index, 300) for index in range(NUM_GROUPS)]
    seconds = time.perf_counter() - start
    client.complete(version)
    num_bytes = sum(len(response.tokens) for slot in slots for part in slot.parts for response in part.responses)
    assert num_bytes == 4 * NUM_GROUPS * GROUP_SIZE * NUM_TOKENS
    return num_bytes / 4 / seconds


def _bare(socket: Path, concurrency: int, weights: wire.Weights) -> float:
    number = weights.version
    bodies = []
    for index in range(NUM_GROUPS):
        request = GroupRequest(
            request_id=f"bare-{number}-{concurrency}-{index}",
            prompt_tokens=tuple(_prompt(number, index)),
            group_size=GROUP_SIZE,
            seed=1 + GROUP_SIZE * (index + NUM_GROUPS * number),
            sampling=SAMPLING,
        )
        bodies.append(msgspec.json.encode(build_request(request, _LIMITS, "bare")))
    return asyncio.run(_ask_all(socket, concurrency, bodies))


async def _ask_all(socket: Path, concurrency: int, bodies: list[bytes]) -> float:
    connections = [await Connection.to(socket) for _ in range(concurrency)]
    left = iter(bodies)

    async def ask(connection: Connection) -> None:
        for content in left:
            answer = await connection.ask("POST", "/inference/v1/generate", content, "Content-Type: application/json")
            assert answer.count(b'"finish_reason":"length"') == GROUP_SIZE, answer[:300]

    start = time.perf_counter()
    await asyncio.gather(*(ask(connection) for connection in connections))
    seconds = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return len(bodies) * GROUP_SIZE * NUM_TOKENS / seconds


def _prompt(number: int, index: int) -> list[int]:
    start = number * 31 + index * 17
    return [1 + (start + position * 7) % (TINY.vocab_size - 1) for position in range(NUM_PROMPT_TOKENS)]
