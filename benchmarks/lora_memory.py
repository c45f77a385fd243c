"""Measure the memory of a rank that trains adapters, beside that of one that trains all weights, with a KL term.

Each is a run of one update with few tokens, in bfloat16, over a scripted engine. The model has the shape of Qwen3-0.6B
and random weights, and the adapters have rank 32. The peak is the rank's anonymous memory: imports are in it, and files
that it maps are not. Beside it stands what `megatron-rl doctor --fit` counts. All weights take 13 GB.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import random_models, report
from megatron_rl.types import Architecture, Rope
from tests.e2e import loop
from tests.ranks import ROOT

FULL = Architecture(
    family="qwen3", num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16, num_query_groups=8,
    kv_channels=128, vocab_size=151936, max_position_embeddings=4096, norm_epsilon=1e-6, tied_embeddings=True,
    qk_layernorm=True, dtype="bfloat16", rope=Rope(base=1e6),
)  # fmt: skip
RUN: dict[str, Any] = {
    "platform": "cpu", "bf16": True, "train_iters": 1, "grpo_prompts_per_step": 2, "grpo_group_size": 2,
    "micro_batch_size": 2, "grpo_kl_beta": 0.1, "rollout_num_engines": 1,
}  # fmt: skip
_GIB = 1 << 30
_SECONDS = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    is_tiny = parser.parse_args().tiny
    with tempfile.TemporaryDirectory(prefix="lora-memory-") as name:
        folder = Path(name)
        world = loop.make_world(folder) if is_tiny else draw_world(folder)
        measured, counted = {}, {}
        for trained, changes in (("all weights", {}), ("adapters", {"lora_rank": 4 if is_tiny else 32})):
            words = world.words(trained.replace(" ", "-"), **RUN, **changes)
            counted[trained] = count(words)
            measured[trained] = measure(folder / "ranks" / trained, words, is_forked=is_tiny)
    report.table("peak of a rank", {trained: [size / _GIB] for trained, size in measured.items()}, "GiB")
    report.table("counted by doctor --fit", {trained: [size / _GIB] for trained, size in counted.items()}, "GiB")
    report.finish(
        {
            "adapters_vs_all": measured["adapters"] / measured["all weights"],
            "all_gib": measured["all weights"] / _GIB,
            "adapters_gib": measured["adapters"] / _GIB,
        }
    )


def draw_world(folder: Path) -> loop.World:
    """Draw the large model, and write prompts and reward."""
    random_models.make(folder / "model", FULL)
    prompts, reward = loop.write_prompts(folder / "prompts.jsonl", 8), loop.write_reward(folder / "reward.py")
    return loop.World(folder, folder / "model", prompts, reward)


def count(words: list[str]) -> int:
    """Count the bytes of the rank's memory, as `megatron-rl doctor --fit` does."""
    command = [sys.executable, "-m", "megatron_rl.trainer.loop.rank_memory", "1", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.splitlines()[-1])


def measure(folder: Path, words: list[str], is_forked: bool) -> int:
    """Run the rank to its end, and return the most bytes of anonymous memory that it had."""
    ranks, most = loop.start(folder, 1, words, is_forked=is_forked), 0
    process, end = ranks.processes[0], time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < end:
        most = max(most, read_anonymous(process.pid))
        time.sleep(0.01)
    if ranks.wait(1.0) != [0]:
        raise RuntimeError(ranks.text())
    return most


def read_anonymous(pid: int) -> int:
    """Return the bytes of a process's anonymous memory; 0 if it has ended."""
    try:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
