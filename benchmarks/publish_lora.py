"""Time publishes of a policy with adapters in turn: merged into its weights, and alone to an engine that has the base.

One rank and two vLLM engines, which get every version; shared memory. The bytes that each publish writes are counted.
Beside whole publishes stand their parts that depend on the form: the trainer's writing, and the engine's load. The
steps of the engine are listed too.
"""

import argparse
import contextlib
import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import random_models, report
from benchmarks.publish import ARCHITECTURES, SHARED, SMALLEST
from tests.ranks import run_ranks
from tests.sidecar.sidecar_process import sidecar

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.model.weights import ModelWeights

FORMS = ("merged", "adapter")
# The sidecar's line about each publish, and the steps in it, in milliseconds.
STEPS = re.compile(r"version \d+ is published; milliseconds of each step: (.*)")
STEP = re.compile(r"(\w+) (\d+)")
# The first version starts what the others find running, and the first two have no files of an earlier one to overwrite.
_NUM_NOT_TIMED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    name, rounds = (SMALLEST, 1) if arguments.tiny else ("40m", arguments.rounds)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        random_models.make(model, ARCHITECTURES[name])
        runs = [Path(folder) / f"lora-{form}-{os.getpid()}" for form in FORMS]
        for run, form in zip(runs, FORMS, strict=True):
            words = ["--hf-model", str(model), "--seq-length", "256", "--reward", "length:8", "--platform", "cpu"]
            words += ["--rollout-num-threads", "1"]
            words += ["--rollout-lora-rank", str(arguments.rank)] if form == "adapter" else []
            stack.enter_context(sidecar(run, *words))
        times, sizes = run_ranks(_measure, 1, model, runs, arguments.rank, rounds)[0]
        for run, form in zip(runs, FORMS, strict=True):
            output = run.with_name(f"{run.name}.output").read_text()
            versions = [dict(STEP.findall(line)) for line in STEPS.findall(output)][_NUM_NOT_TIMED:]
            for step in versions[0]:
                times[f"{form}, {step}"] = [float(version[step]) / 1e3 for version in versions]
    for form in FORMS:
        pairs = zip(times[f"{form}, write"], times[f"{form}, load"], strict=True)
        times[f"{form}, write and load"] = [write + load for write, load in pairs]
    report.table(f"{name}, rank {arguments.rank}", times, "s")
    whole, moved = (
        [a / b for a, b in zip(times[f"adapter{part}"], times[f"merged{part}"], strict=True)]
        for part in ("", ", write and load")
    )
    report.table("ratio", {"adapter / merged": whole, "of write and load": moved}, "")
    print("bytes:", ", ".join(f"{form} {sizes[form]:,}" for form in FORMS))
    of_bytes = sizes["adapter"] / sizes["merged"]
    medians = {"lora_vs_merged": statistics.median(whole), "moved_vs_merged": statistics.median(moved)}
    report.finish({**medians, "bytes_vs_merged": of_bytes})


def _measure(model: Path, runs: list[Path], rank: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    from megatron_rl.shared.protocol.client import RolloutClient, read_token
    from megatron_rl.trainer.mcore.publish.files import FilesTransport
    from megatron_rl.trainer.mcore.publish.probe import Probe
    from megatron_rl.trainer.mcore.publish.publisher import Publisher
    from tests.distributed.training import training

    times: dict[str, list[float]] = {f"{form}{part}": [] for part in ("", ", write") for form in FORMS}
    sizes: dict[str, int] = {}
    torch.distributed.init_process_group("gloo")
    with training(model, f"--lora-rank {rank} --lr 1e-3") as trained, contextlib.ExitStack() as stack:
        base = trained.base
        assert base is not None
        publishers, exported = {}, {}
        for run, form in zip(runs, FORMS, strict=True):
            address = (run / "address").read_text().strip()
            client = stack.enter_context(RolloutClient(address, read_token(run / "token")))
            client.use_lease(client.take_lease(run.name))
            weights = trained.weights if form == "merged" else base.weights.without_base(base.adapters, None)
            exported[form] = weights
            folder = SHARED / f"megatron-rl-{os.getuid()}" / run.name
            probe = Probe(trained.chunks, trained.session, run.name, 64, is_base_proved=form == "adapter")
            publishers[form] = Publisher(
                weights, trained.session, client, run.name, FilesTransport(folder), probe=probe
            )
            stack.callback(publishers[form].close)
        for version in range(rounds + _NUM_NOT_TIMED):
            for form in FORMS if version % 2 else FORMS[::-1]:
                start = time.perf_counter()
                publishers[form].publish(version)
                seconds = time.perf_counter() - start
                written = SHARED / f"megatron-rl-{os.getuid()}" / runs[FORMS.index(form)].name / f"version-{version}"
                sizes[form] = sum(path.stat().st_size for path in written.iterdir())
                if version >= _NUM_NOT_TIMED:
                    times[form].append(seconds)
                    times[f"{form}, write"].append(_write(exported[form]))
            for shard in base.adapters.shards:
                shard.parameter.detach().add_(1e-3)
    return times, sizes


def _write(weights: "ModelWeights") -> float:
    folder = SHARED / f"benchmark-{os.getpid()}"
    start = time.perf_counter()
    with weights.begin_files(folder) as begun:
        begun.write()
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


if __name__ == "__main__":
    # Under its importable name, where the ranks find the function they run.
    from benchmarks.publish_lora import main as importable_main

    importable_main()
