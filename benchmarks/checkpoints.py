"""Measure a rank's memory during saves and loads with `--use-distributed-optimizer`, in bf16, by numbers of replicas.

A rank's own state is its weights and its part of the optimizer's state: 2 + 12 / replicas bytes a parameter. Gradients
are not counted, and have no memory here. The peak is the own state plus the rise of the process's resident memory,
files that it maps included. All ranks together take 10 GB with two replicas and 12 GB with four, and 7 GB of disk;
`--size 1b` takes twice as much. `--saves-only` takes a fifth less.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from megatron_rl.types import Architecture
from tests.ranks import run_ranks


def _draw_up(num_layers: int, hidden_size: int, vocab_size: int) -> Architecture:
    return Architecture(
        family="llama", num_layers=num_layers, hidden_size=hidden_size, ffn_hidden_size=4 * hidden_size,
        num_attention_heads=hidden_size // 64, num_query_groups=hidden_size // 128, kv_channels=64,
        vocab_size=vocab_size, max_position_embeddings=4096,
    )  # fmt: skip


# The elements of a bucket: Megatron's default is 40 million, a 24th of the largest.
SIZES = {
    "1b": (_draw_up(14, 2048, 16000), 40_000_000),
    "500m": (_draw_up(7, 2048, 8000), 20_000_000),
    "100m": (_draw_up(12, 768, 8000), 4_000_000),
    "30m": (_draw_up(8, 512, 4000), 1_400_000),
}
TINY = _draw_up(2, 128, 512), 20_000
SAVES, LOAD = ("first save", "second save"), "load"
FLAGS = (
    "--platform cpu --bf16 --lr 1e-5 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--grad-reduce-in-bf16"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="500m")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    parser.add_argument("--saves-only", action="store_true", help="save, and do not load")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else SIZES[arguments.size]
    names = SAVES if arguments.saves_only else (*SAVES, LOAD)
    peaks: dict[str, list[float]] = {name: [] for name in names}
    for replicas in arguments.replicas:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            ranks = run_ranks(_measure, replicas, *size, Path(folder), names, timeout=3600)
        own = ranks[0]["own"][0]
        title = f"{replicas} replicas, {ranks[0]['parameters'][0] / 1e9:.3f} B parameters, own state {own / 1e9:.3f} GB"
        rows = {name: [(one["own"][0] + used) / one["own"][0] for one in ranks for used in one[name]] for name in names}
        report.table(title, rows, "own states, of all ranks")
        for name in names:
            peaks[name] += rows[name]
    figures = {"save_peak_vs_state": max(peak for name in SAVES for peak in peaks[name])}
    if LOAD in peaks:
        figures["load_peak_vs_state"] = max(peaks[LOAD])
    report.finish(figures)


def _measure(architecture: Architecture, bucket: int, folder: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the bytes that this rank takes, by action."""
    from megatron_rl.command_line import parse as command_line
    from megatron_rl.platforms.megatron_patches import allocate_adam_state
    from megatron_rl.trainer.mcore.checkpoint.checkpointer import Checkpointer
    from megatron_rl.trainer.mcore.model import gpt
    from megatron_rl.trainer.mcore.model.weights import ModelWeights
    from megatron_rl.trainer.mcore.session import start_session
    from megatron_rl.trainer.mcore.step.optimizer import build_optimizer, build_scheduler
    from megatron_rl.trainer.mcore.step.policy import Policy

    words = f"{FLAGS} --ddp-bucket-size {bucket} {_describe(architecture)} --save {folder} --load {folder}"
    settings = command_line.parse(words.split())
    taken: dict[str, list[float]] = {}
    with start_session(settings) as session:
        chunks = gpt.build_model(settings)
        wrapped = gpt.wrap(chunks, settings.ddp)
        optimizer = build_optimizer(settings, wrapped)
        for buffer in wrapped[0].buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        scheduler = build_scheduler(settings, optimizer, 10)
        for one in optimizer.chained_optimizers:
            allocate_adam_state(one.optimizer)
            for values in one.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    values[name].uniform_()
        state = [values for one in optimizer.chained_optimizers for values in one.optimizer.state.values()]
        weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
        # The master copy has the size of a moment.
        own = sum(3 * values["exp_avg"].nbytes for values in state) + sum(weight.nbytes for weight in weights)
        taken["own"], taken["parameters"] = [own], [sum(weight.numel() for weight in weights)]
        policy = Policy(chunks, wrapped, optimizer, scheduler, ModelWeights(chunks, session))
        checkpointer = Checkpointer(settings, session, policy)

        def take(name: str, action) -> None:
            session.barrier()
            session.platform.reset_peak_memory()
            before = session.platform.memory().peak
            action()
            taken[name] = [session.platform.memory().peak - before]
            session.barrier()

        for version, name in enumerate(SAVES, start=1):
            take(name, lambda version=version: checkpointer.save(version, {}))
            session.barrier()
            if session.rank == 0 and version == 1:
                shutil.rmtree(folder / "iter_0000001")
        if LOAD in names:
            take(LOAD, checkpointer.load)
    return taken


def _describe(architecture: Architecture) -> str:
    return (
        f"--num-layers {architecture.num_layers} --hidden-size {architecture.hidden_size} "
        f"--ffn-hidden-size {architecture.ffn_hidden_size} --num-attention-heads {architecture.num_attention_heads} "
        f"--group-query-attention --num-query-groups {architecture.num_query_groups} "
        f"--vocab-size {architecture.vocab_size} --max-position-embeddings {architecture.max_position_embeddings} "
        f"--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        f"--position-embedding-type rope"
    )


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.checkpoints import main as importable_main

    importable_main()
