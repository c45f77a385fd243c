"""Measure tokens per second through the service over a real vLLM engine, of a bare client of it, and of vLLM alone.

The service decodes, checks, scores, journals, audits and hands out. The bare client sends requests over the engine's
socket and counts the bytes of the answers. Alone, vLLM is given the same prompts with the same sampling by its own
`LLM.generate`. They take turns, in an order that rotates. The first two ask after a publish: an engine samples more
slowly just after it has taken weights, whoever asks. All processes of vLLM are on one core, all others not.
"""

import asyncio
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import psutil

from benchmarks import random_models, vllm_offline
from benchmarks.connection import Connection
from benchmarks.pinning import pin
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.vllm.answers import Limits, build_call
from megatron_rl.sidecar.vllm.routes import GENERATE, GroupAnswer, GroupCall
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
SERVICE, ALONE = "service", "vLLM alone"
SAMPLING = wire.Sampling(max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
Asker = Callable[[wire.Weights], float]
_LIMITS = Limits(max_model_len=256, max_num_seqs=64, vocab_size=TINY.vocab_size)


def measure(
    num_rounds: int,
    num_groups: int = NUM_GROUPS,
    architecture: Architecture = TINY,
    concurrencies: Sequence[int] = CONCURRENCIES,
    is_tiny: bool = False,
) -> dict[str, list[float]]:
    """Return tokens per second of each run, by client."""
    figures: dict[str, list[float]] = {}
    versions = itertools.count()
    with _serving(architecture) as (process, client, model), _alone(model, is_tiny) as generate:
        socket, run = _socket(process), process.folder.name
        askers: dict[str, Asker] = {SERVICE: functools.partial(_service, client, run, num_groups)}
        askers |= {
            f"bare, {c} groups in flight": functools.partial(_bare, socket, c, num_groups) for c in concurrencies
        }
        askers[ALONE] = functools.partial(_ask_alone, generate, num_groups)
        names = list(askers)
        for number in range(num_rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with _published(client, run, model, next(versions)) as weights:
                    tokens_per_second = askers[name](weights)
                # The first round warms up.
                if number:
                    figures.setdefault(name, []).append(tokens_per_second)
    return figures


def compare_to_bare(figures: dict[str, list[float]]) -> list[float]:
    """Return the service over the bare client at the concurrency that is best for it, round by round."""
    bare = max((runs for name, runs in figures.items() if name not in (SERVICE, ALONE)), key=statistics.median)
    return [ours / theirs for ours, theirs in zip(figures[SERVICE], bare, strict=True)]


def compare_to_alone(figures: dict[str, list[float]]) -> list[float]:
    """Return the service over vLLM alone, round by round."""
    return [ours / theirs for ours, theirs in zip(figures[SERVICE], figures[ALONE], strict=True)]


@contextmanager
def _serving(architecture: Architecture) -> Iterator[tuple[SidecarProcess, RolloutClient, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        model, run = Path(folder) / "model", Path(folder) / "run"
        random_models.make(model, architecture)
        words = ["--hf-model", str(model), "--seq-length", str(_LIMITS.max_model_len), "--reward", "length:8"]
        words += ["--platform", "cpu", "--rollout-num-threads", "1"]
        with sidecar(run, *words) as process, process.client() as client:
            client.take_lease(run.name)
            _place(process)
            yield process, client, model


def _place(process: SidecarProcess) -> None:
    """Put the engine's processes on one core, and this one and the sidecar's on the others."""
    *others, core = sorted(os.sched_getaffinity(0))
    engine = _find_engine(process)
    inner = [engine, *engine.children(recursive=True)]
    for one in [psutil.Process(), *process.tree()]:
        pin(one, [core] if one in inner else others or [core])


def _alone(model: Path, is_tiny: bool) -> AbstractContextManager[vllm_offline.Generate]:
    core = max(os.sched_getaffinity(0))
    return vllm_offline.start(model, core, _LIMITS.max_model_len, _LIMITS.max_num_seqs, is_tiny)


def _find_engine(process: SidecarProcess) -> psutil.Process:
    """Return the server of the one engine."""
    for started in process.tree():
        if "--uds" in started.cmdline():
            return started
    raise RuntimeError("the sidecar has started no engine")


def _socket(process: SidecarProcess) -> Path:
    """Return the socket that the one engine listens on."""
    words = _find_engine(process).cmdline()
    return Path(words[words.index("--uds") + 1])


@contextmanager
def _published(client: RolloutClient, run: str, model: Path, version: int) -> Iterator[wire.Weights]:
    with in_shared_memory(model, version) as weights:
        weights = msgspec.structs.replace(weights, run=run)
        client.publish(weights, 60)
        yield weights


def _service(client: RolloutClient, run: str, num_groups: int, weights: wire.Weights) -> float:
    version = weights.version
    prompts = [
        wire.Prompt(index=index, row=str(index), tokens=wire.encode_tokens(_prompt(version, index)))
        for index in range(num_groups)
    ]
    plan = wire.Plan(num_prompts=num_groups, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
    submission = wire.Submission(
        run=run, version=version, fingerprint=weights.fingerprint, plan=plan, prompts=prompts, sampling=SAMPLING,
        deadline_seconds=300,
    )  # fmt: skip
    start = time.perf_counter()
    client.submit(submission)
    slots = [client.slot(version, 0, index, 300) for index in range(num_groups)]
    seconds = time.perf_counter() - start
    client.complete(version)
    num_bytes = sum(len(response.tokens) for slot in slots for part in slot.parts for response in part.responses)
    assert num_bytes == 4 * num_groups * GROUP_SIZE * NUM_TOKENS
    return num_bytes / 4 / seconds


def _bare(socket: Path, concurrency: int, num_groups: int, weights: wire.Weights) -> float:
    calls = [msgspec.msgpack.encode(call) for call in _calls(weights.version, f"bare-{concurrency}", num_groups)]
    return asyncio.run(_ask_all(socket, concurrency, calls))


def _ask_alone(generate: vllm_offline.Generate, num_groups: int, weights: wire.Weights) -> float:
    calls = _calls(weights.version, "alone", num_groups)
    return generate([wire.decode_tokens(call.prompt).tolist() for call in calls], [call.sampling for call in calls])


def _calls(number: int, name: str, num_groups: int) -> list[GroupCall]:
    """Return the calls, which are the same for every client."""
    requests = [
        GroupRequest(
            request_id=f"{name}-{number}-{index}",
            prompt_tokens=tuple(_prompt(number, index)),
            group_size=GROUP_SIZE,
            seed=1 + GROUP_SIZE * (index + num_groups * number),
            sampling=SAMPLING,
        )
        for index in range(num_groups)
    ]
    return [build_call(request, _LIMITS, "bare") for request in requests]


async def _ask_all(socket: Path, concurrency: int, bodies: list[bytes]) -> float:
    connections = [await Connection.to(socket) for _ in range(concurrency)]
    left = iter(bodies)

    async def ask(connection: Connection) -> None:
        for content in left:
            answer = await connection.ask("POST", GENERATE, content, "Content-Type: application/msgpack")
            choices = msgspec.msgpack.decode(answer, type=GroupAnswer).choices
            assert [len(choice.tokens) for choice in choices] == [4 * NUM_TOKENS] * GROUP_SIZE

    start = time.perf_counter()
    await asyncio.gather(*(ask(connection) for connection in connections))
    seconds = time.perf_counter() - start
    for connection in connections:
        connection.close()
    return len(bodies) * GROUP_SIZE * NUM_TOKENS / seconds


def _prompt(number: int, index: int) -> list[int]:
    start = number * 31 + index * 17
    return [1 + (start + position * 7) % (TINY.vocab_size - 1) for position in range(NUM_PROMPT_TOKENS)]
