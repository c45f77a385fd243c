"""Time a publish, from the trainer's weights to engines that sample again: fingerprints of both sides included.

One rank, one vLLM engine, shared memory. Beside it, alternating, stands the time of writing the same bytes to the same
memory.
"""

import argparse
import contextlib
import dataclasses
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import random_models, report
from megatron_rl.shared.protocol.client import RolloutClient, read_token
from megatron_rl.types import Architecture
from tests.ranks import run_ranks
from tests.sidecar.sidecar_process import sidecar

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.publish.publisher import Publisher

SHARED = Path("/dev/shm")
SMALLEST = "0.1m"
"""A model whose publish takes the least that any does."""
ARCHITECTURES = {
    SMALLEST: Architecture(
        family="llama", num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4, num_query_groups=2,
        kv_channels=32, vocab_size=512, max_position_embeddings=1024,
    ),
    "40m": Architecture(
        family="llama", num_layers=8, hidden_size=512, ffn_hidden_size=2048, num_attention_heads=16,
        num_query_groups=16, kv_channels=32, vocab_size=8192, max_position_embeddings=1024,
    ),
    "400m_bf16": Architecture(
        family="llama", num_layers=24, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
        num_query_groups=16, kv_channels=64, vocab_size=32768, max_position_embeddings=1024, dtype="bfloat16",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds = 1
    figures = {}
    for name in [SMALLEST] if arguments.tiny else ARCHITECTURES:
        architecture = ARCHITECTURES[name]
        with tempfile.TemporaryDirectory() as folder:
            model, run = Path(folder) / "model", Path(folder) / f"publish-{name}-{os.getpid()}"
            num_bytes = random_models.make(model, architecture)
            print(f"\n{name}: {num_bytes / 1e6:.0f} MB")
            words = ["--hf-model", str(model), "--seq-length", "256", "--reward", "length:8"]
            words += ["--platform", "cpu", "--rollout-num-threads", "1"]
            with sidecar(run, *words):
                times = run_ranks(_measure, 1, model, run, arguments.rounds)[0]
        report.table(name, times, "s")
        ratios = [a / b for a, b in zip(times["publish"], times["copy"], strict=True)]
        report.table("ratio", {"publish / copy": ratios}, "")
        if name == SMALLEST:
            figures["fixed_ms"] = 1e3 * statistics.median(times["publish"])
        else:
            figures[f"seconds_{name}"] = statistics.median(times["publish"])
            figures[f"vs_copy_{name.removesuffix('_bf16')}"] = statistics.median(ratios)
    report.finish(figures)


@dataclasses.dataclass(frozen=True)
class Publishing:
    """A trainer's half of a publish, without the rest of the trainer."""

    weights: "ModelWeights"
    publisher: "Publisher"
    client: RolloutClient

    def change(self) -> None:
        """Change every weight a little, as an update would."""
        with torch.no_grad():
            for shard in self.weights.shards:
                shard.parameter.mul_(1.001)


@contextlib.contextmanager
def publishing(model: Path, run: Path, platform_name: str = "cpu") -> Iterator[Publishing]:
    """Load a model as the only rank, and get ready to publish to the sidecar of the run's folder."""
    from megatron_rl import platforms
    from megatron_rl.command_line.resolve import build_transformer_config
    from megatron_rl.shared.weights.families import read_architecture
    from megatron_rl.trainer.mcore.model.gpt import build_chunks
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.publish.files import FilesTransport
    from megatron_rl.trainer.mcore.publish.probe import Probe
    from megatron_rl.trainer.mcore.publish.publisher import Publisher
    from megatron_rl.trainer.mcore.session import ParallelSizes, Session

    platform, architecture = platforms.select(platform_name), read_architecture(model)
    overrides: dict[str, Any] = {"bf16": True} if architecture.dtype == "bfloat16" else {}
    with (
        Session(ParallelSizes(), platform, seed=1, timeout=datetime.timedelta(minutes=5)) as session,
        RolloutClient((run / "address").read_text().strip(), read_token(run / "token")) as client,
    ):
        config = build_transformer_config(architecture, overrides, platform)
        chunks = build_chunks(config, architecture, device=session.device)
        weights = ModelWeights(chunks, session)
        weights.load_hf(model)
        client.take_lease(run.name)
        shared = SHARED / f"megatron-rl-{os.getuid()}" / run.name
        probe = Probe(chunks, session, run.name, 64)
        publisher = Publisher(weights, session, client, run.name, FilesTransport(shared), probe=probe)
        try:
            yield Publishing(weights, publisher, client)
        finally:
            publisher.close()


def _measure(model: Path, run: Path, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"publish": [], "write, digest": [], "copy": []}
    with publishing(model, run) as trainer:
        num_bytes = sum(shard.parameter.nbytes for shard in trainer.weights.shards)
        for version in range(rounds + 1):
            start = time.perf_counter()
            trainer.publisher.publish(version)
            middle = time.perf_counter()
            with trainer.weights.begin_files(SHARED / f"benchmark-{os.getpid()}") as begun:
                begun.write()
            written = time.perf_counter()
            _remove(SHARED / f"benchmark-{os.getpid()}")
            copied = _copy(num_bytes)
            # The first one starts what the others find running.
            if version:
                for name, seconds in (
                    ("publish", middle - start),
                    ("write, digest", written - middle),
                    ("copy", copied),
                ):
                    times[name].append(seconds)
            trainer.change()
    return times


def _copy(num_bytes: int) -> float:
    path, data = SHARED / f"copy-{os.getpid()}", memoryview(torch.ones(num_bytes, dtype=torch.uint8).numpy().data)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while data:
            data = data[os.write(file.fileno(), data[: 1 << 24]) :]
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.publish import main as importable_main

    importable_main()
