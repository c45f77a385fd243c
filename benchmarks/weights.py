"""Time import and export of a 1 B parameter model on two tensor-parallel ranks, against plain copies of the same bytes.

Import is compared with as many processes that copy the same cached bytes into fresh memory; export, fingerprint
included, with as many that write them to the same file system. Both sides alternate, round after round.
"""

import argparse
import dataclasses
import datetime
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import random_models, report
from megatron_rl.types import Architecture
from tests.ranks import run_ranks

NUM_RANKS = 2
ARCHITECTURE = Architecture(
    family="llama", num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32, num_query_groups=8,
    kv_channels=64, vocab_size=65000, max_position_embeddings=4096,
)  # fmt: skip
TINY = dataclasses.replace(ARCHITECTURE, num_layers=2, hidden_size=64, ffn_hidden_size=128, vocab_size=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written; default: a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    architecture, rounds = (TINY, 1) if arguments.tiny else (ARCHITECTURE, arguments.rounds)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(folder) / "source"
        num_bytes = random_models.make(source, architecture)
        num_parameters = num_bytes / 4
        print(f"{num_parameters / 1e9:.2f} B parameters, {num_bytes / 1e9:.2f} GB in fp32, {NUM_RANKS} ranks, TP2")
        ranks = run_ranks(_measure, NUM_RANKS, architecture, source, Path(folder), rounds, timeout=900)
    names = ("copy", "import", "write", "export")
    # A step is over when its slowest rank is done.
    times = {name: [max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in names}
    report.table("weights", times, "s")
    import_ratios = [a / b for a, b in zip(times["import"], times["copy"], strict=True)]
    export_ratios = [a / b for a, b in zip(times["export"], times["write"], strict=True)]
    memory = [max(rank["memory"]) / rank["shard_bytes"] for rank in ranks]
    report.table("ratios", {"import / copy": import_ratios, "export / write": export_ratios}, "")
    report.table("anonymous memory", {"rise in import / own shard": memory}, "of each rank")
    report.finish(
        {
            "import_vs_copy": statistics.median(import_ratios),
            "export_vs_copy": statistics.median(export_ratios),
            "import_peak_vs_shard": max(memory),
        }
    )


def _measure(architecture: Architecture, source: Path, out: Path, rounds: int) -> dict:
    from megatron_rl import platforms
    from megatron_rl.command_line.resolve import build_transformer_config
    from megatron_rl.trainer.mcore.model import gpt
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.session import ParallelSizes, Session

    platform = platforms.select("cpu")
    sizes = ParallelSizes(tensor=NUM_RANKS)
    results: dict = {name: [] for name in ("copy", "import", "write", "export", "memory")}
    with Session(sizes, platform, seed=1, timeout=datetime.timedelta(minutes=10)) as session:
        config = build_transformer_config(architecture, {"tensor_model_parallel_size": NUM_RANKS}, platform)

        def timed(name: str, action: Callable, *action_arguments: Any) -> Any:
            session.barrier()
            start = time.perf_counter()
            result = action(*action_arguments)
            results[name].append(time.perf_counter() - start)
            session.barrier()
            return result

        for round_number in range(rounds + 1):
            copied = timed("copy", _copy, source, session.rank)
            timed("write", _write, out / f"plain-{session.rank}", copied)
            (out / f"plain-{session.rank}").unlink()
            del copied
            chunks = gpt.build_chunks(config, architecture)
            weights = ModelWeights(chunks, session)
            before = platform.memory().allocated
            timed("import", weights.load_hf, source)
            results["memory"].append(platform.memory().allocated - before)
            timed("export", weights.save_hf, out / "exported", source)
            if session.rank == 0:
                shutil.rmtree(out / "exported")
            results["shard_bytes"] = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
            del chunks, weights
            if round_number == 0:
                # The first round faults in what the others find warm.
                for name in ("copy", "write", "import", "export", "memory"):
                    results[name].clear()
    return results


def _copy(source: Path, rank: int) -> list[torch.Tensor]:
    """Copy this process's share of the bytes from the page cache into new memory."""
    copies = []
    for path in sorted(source.glob("*.safetensors")):
        size = path.stat().st_size // NUM_RANKS
        mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
        copies.append(torch.empty(size, dtype=torch.uint8).copy_(mapped[rank * size : (rank + 1) * size]))
    return copies


def _write(path: Path, copies: list[torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for copied in copies:
            data = memoryview(copied.numpy().data)
            while data:
                data = data[os.write(file.fileno(), data[: 1 << 24]) :]


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.weights import main as importable_main

    importable_main()
