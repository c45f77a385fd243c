"""Weights that stream from Megatron's ranks into real vLLM engines, through vLLM's own transfer engine at both ends.

The wire alone needs a device: gloo stands in for NCCL (tests/sidecar/gloo_transfer.py).
"""

import asyncio
import contextlib
import dataclasses
import queue
import shutil
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.shared.protocol.wire import ProbeAnswer, PublishAnswer, Weights
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.publication import Steps
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.trainer.mcore.model.gpt import unwrap
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from megatron_rl.trainer.mcore.publish.stream import StreamTransport
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import ROOT, run_ranks
from tests.sidecar import vllm_models

LAYOUTS = ("TP2", "PP2")
NUM_PROMPTS, NUM_TOKENS = 12, 16


class Engines:
    """Two engines, and the sidecar's calls to them at a publish."""

    def __init__(self, engines: list[VllmEngine], loop: asyncio.AbstractEventLoop):
        self._engines = engines
        self._loop = loop
        self._published: Any = None
        self._answers: queue.Queue[ProbeAnswer] = queue.Queue()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def num_workers(self) -> int:
        return sum(engine.num_workers for engine in self._engines)

    def find_engine_hosts(self) -> list[str]:
        return ["127.0.0.1"]

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        places = streams.assign_places([engine.num_workers for engine in self._engines])
        for engine, place in zip(self._engines, places, strict=True):
            engine.stream_place = place
        self._published = self.run(Steps().publish(self._engines, weights, self._published, self._answer))
        # The engines hold every tensor that was streamed, and the log-probs are those that the ranks compute.
        for proof in self._published.proofs:
            assert proof.report.num_compared == proof.report.num_parameters > 0
            assert proof.difference.mean < 1e-4
        return self._published.build_answer()

    def probed(self, answer: ProbeAnswer) -> None:
        self._answers.put(answer)

    async def _answer(self) -> ProbeAnswer:
        return await asyncio.to_thread(self._answers.get, timeout=100)

    def greedy(self) -> list[tuple[Any, Any]]:
        """Return every prompt and its response, from both engines."""
        requests = [
            vllm_models.request(number, temperature=0.0, max_tokens=NUM_TOKENS) for number in range(NUM_PROMPTS)
        ]

        async def all_of_them(engine: VllmEngine) -> list[Any]:
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        groups = [self.run(all_of_them(engine)) for engine in self._engines]
        return [(request, group[0]) for of_engine in groups for request, group in zip(requests, of_engine, strict=True)]


@contextlib.contextmanager
def engines_of(
    model: Path,
) -> Iterator[Engines]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    sockets = make_socket_folder()
    config = dataclasses.replace(
        vllm_models.CONFIG,
        model=str(model),
        transport="nccl",
        flags=(*vllm_models.CONFIG.flags, "--worker-extension-cls", "tests.sidecar.gloo_transfer.Extension"),
        environment={"PYTHONPATH": str(ROOT)},
    )
    factory = VllmFactory(config, sockets, LocalLauncher())
    engines = Engines([factory.create(f"engine-{number}") for number in range(2)], loop)
    try:
        engines.run(_all(engine.start() for engine in engines._engines))
        yield engines
    finally:
        engines.run(_all(engine.close() for engine in engines._engines))
        shutil.rmtree(sockets)


async def _all(coroutines: Any) -> None:
    await asyncio.gather(*coroutines)


def train_ranks(model: Path, out: Path) -> dict[tuple[str, int], int]:
    """Stream weights of each layout's own, twice; count the greedy tokens that transformers would have chosen too."""
    import tests.sidecar.gloo_transfer  # noqa: F401 # rank 0 sends with vLLM, whose wire this replaces

    torch.distributed.init_process_group("gloo")
    found = {}
    is_first = torch.distributed.get_rank() == 0
    with engines_of(model) if is_first else contextlib.nullcontext() as engines:
        for number, layout in enumerate(LAYOUTS):
            with start_session(CASES[layout]) as session:
                built = build(session, CASES[layout], model)
                probe = Probe([unwrap(chunk) for chunk in built.wrapped], session, "run", 64, 2)
                publisher = Publisher(built.weights, session, engines, "run", StreamTransport("nccl"), probe=probe)
                for attempt in range(2):
                    version = 2 * number + attempt
                    with torch.no_grad():
                        for shard in built.weights.shards:
                            shard.parameter.mul_(1 + 0.05 * (version + 1))
                    fingerprint = publisher.publish(version)
                    assert built.weights.save_hf(out / str(version), source=model) == fingerprint
                    if is_first:
                        reference = vllm_models.Reference(out / str(version))
                        found[layout, attempt] = sum(reference.num_greedy(*pair) for pair in engines.greedy())
                    session.barrier()
    return found


@pytest.mark.slow
def test_engines_sample_from_what_was_streamed_to_them(tmp_path):
    model = vllm_models.draw("qwen3", tmp_path / "models").first
    found, _ = run_ranks(train_ranks, 2, model, tmp_path)
    print(found)
    assert found == {(layout, attempt): 2 * NUM_PROMPTS * NUM_TOKENS for layout in LAYOUTS for attempt in range(2)}
