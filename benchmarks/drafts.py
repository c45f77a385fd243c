"""Measure tokens per second of an engine that drafts by n-grams, beside the same engine without drafts.

The weights are random, but for those that make the policy say the tokens of a cycle of eight again and again. At a low
temperature it does, and n-grams find what it says next. At a high one hardly a draft is accepted: then a step computes
with more tokens for nothing. Both engines run all the time, with one thread each, and take turns.
"""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks import random_models, report
from benchmarks.publish import ARCHITECTURES, SMALLEST
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.shared.protocol.wire import Drafts
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig
from megatron_rl.sidecar.vllm.speculation import describe_for_vllm
from tests.sidecar import vllm_models

WAYS = {"plain": None, "ngram": "ngram"}
# The task's name, its temperature, and the responses that an engine samples at once.
TASKS = (("repetitive", 0.01, 1), ("repetitive_16", 0.01, 16), ("random", 2.0, 1))
_NUM_PROMPT_TOKENS = 32
_CYCLE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    name, rounds, num_tokens = (SMALLEST, 1, 8) if arguments.tiny else ("40m", arguments.rounds, 192)
    speeds, drafts = asyncio.run(_measure(name, rounds, num_tokens))
    report.table(f"{name}, responses of {num_tokens} tokens", speeds, "tokens/s")
    figures: dict[str, float] = {}
    for task, _, _ in TASKS:
        ratios = [a / b for a, b in zip(speeds[f"{task}, ngram"], speeds[f"{task}, plain"], strict=True)]
        report.table(f"{task}: with drafts / without", {"ratio": ratios}, "")
        counts = drafts[task]
        length = 1 + counts.accepted / max(1, counts.count)
        print(f"{counts.accepted} of {counts.drafted} drafted tokens were accepted; accepted length {length:.2f}")
        figures |= {f"ngram_{task}": statistics.median(ratios), f"length_{task}": length}
    report.finish(figures)


async def _measure(name: str, rounds: int, num_tokens: int) -> tuple[dict[str, list[float]], dict[str, Drafts]]:
    """Return tokens per second by task and way, and the drafts of each task."""
    speeds: dict[str, list[float]] = {f"{task}, {way}": [] for task, _, _ in TASKS for way in WAYS}
    drafts = {task: Drafts() for task, _, _ in TASKS}
    async with _engines(name) as engines:
        # The first round warms up.
        for number in range(rounds + 1):
            for task, temperature, group_size in TASKS:
                for way in WAYS if number % 2 else reversed(WAYS):
                    engine = engines[way]
                    before = await engine.count_drafts()
                    start = time.perf_counter()
                    await engine.generate(
                        vllm_models.request(
                            number, group_size, _NUM_PROMPT_TOKENS,
                            temperature=temperature, max_tokens=num_tokens, ignore_eos=True,
                        )
                    )  # fmt: skip
                    seconds = time.perf_counter() - start
                    after = await engine.count_drafts()
                    if number:
                        speeds[f"{task}, {way}"].append(group_size * num_tokens / seconds)
                    if number and before is not None and after is not None:
                        drafts[task] += after - before
    return speeds, drafts


def _make_repetitive(model: Path) -> None:
    """Have the next token follow from the last one alone; the layers compute as before, and add nothing."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    embedding = tensors["model.embed_tokens.weight"]
    places = torch.arange(len(embedding))
    tensors["lm_head.weight"][places // _CYCLE * _CYCLE + (places + 1) % _CYCLE] = embedding
    save_file(tensors, path, {"format": "pt"})


@contextlib.asynccontextmanager
async def _engines(name: str) -> AsyncIterator[dict[str, VllmEngine]]:
    """Start an engine for each way; both hold the same version."""
    async with contextlib.AsyncExitStack() as stack:
        sockets = make_socket_folder()
        stack.callback(shutil.rmtree, sockets)
        model = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        random_models.make(model, ARCHITECTURES[name])
        _make_repetitive(model)
        engines = {}
        for way, speculative in WAYS.items():
            config = ServerConfig(
                model=str(model),
                max_model_len=256,
                speculation=describe_for_vllm(RolloutConfig(speculative=speculative)),
            )
            engines[way] = VllmFactory(config, sockets, LocalLauncher()).create(way)
            stack.push_async_callback(engines[way].close)
        await asyncio.gather(*(engine.start() for engine in engines.values()))
        weights = stack.enter_context(vllm_models.in_shared_memory(model, 0))
        for engine in engines.values():
            await vllm_models.publish(engine, weights)
        yield engines


if __name__ == "__main__":
    main()
