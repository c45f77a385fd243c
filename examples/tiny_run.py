"""The parts that demos share: the warm-up of a tiny model, and a run with real vLLM, its curve and its audit."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
import transformers
from torch.nn import functional

from examples.arithmetic import model as tiny
from examples.arithmetic.demo import LAYOUTS
from megatron_rl.analysis.picture import picture
from megatron_rl.errors import count_noun
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.summary import text_curves
from megatron_rl.shared.records.audit_check import verify

ROOT = Path(__file__).resolve().parents[1]
CARE = 0.4
"""The share of what the model writes with care, once the warm-up is careless."""
_IGNORED = -100
FLAGS = (
    "--grpo-group-size", "16", "--rollout-max-num-seqs", "256", "--lr-warmup-iters", "2",
    "--lr-decay-style", "linear", "--weight-decay", "0", "--adam-beta1", "0.9", "--adam-beta2", "0.95",
    "--clip-grad", "1.0", "--eval-interval", "10", "--eval-temperature", "1.0",
)  # fmt: skip


def run_demo(
    description: str | None,
    name: str,
    prepare: Callable[[Path, int], None],
    flags: Sequence[str],
    what: str,
    sources: Sequence[str] = ("train.jsonl",),
) -> None:
    """Run a demo; `prepare` writes the sources, files held_out*.jsonl and the folder `model`, with a seed."""
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="dp2", help="of two ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(name))
    parser.add_argument("flags", nargs="*", help="after --: flags for pretrain_grpo.py, which win over the demo's")
    arguments = parser.parse_args()
    out, start = arguments.out, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    prepare(out, arguments.seed)
    run = out / "run"
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "pretrain_grpo.py"), *FLAGS, "--hf-model", str(out / "model"),
            "--prompts", *(str(out / source) for source in sources),
            "--eval-prompts", *map(str, sorted(out.glob("held_out*.jsonl"))),
            "--seed", str(arguments.seed + 1), "--rollout-folder", str(run),
            *flags, *LAYOUTS[arguments.layout], *arguments.flags,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    records = read_metrics(run)
    print(text_curves({name: records}))
    picture({name: run}, out / "picture.png")
    means = [record["evaluation"]["mean"] for record in records if "evaluation" in record]
    report = verify(run)
    print(
        f"\naudit: {report.num_lines} lines, {count_noun(len(report.breaches), 'breach', 'breaches')}\n"
        f"the mean reward of {what} was {means[0]:.1%} at the first evaluation and {means[-1]:.1%} at the last one; "
        f"{time.monotonic() - start:.0f} s in all\nthe picture: {out / 'picture.png'}"
    )
    (out / "result.json").write_text(json.dumps({"before": means[0], "after": means[-1]}) + "\n")


def warm_up(
    folder: Path,
    seed: int,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast,
    write: Callable[[random.Random, float], str],
    num_steps: int,
    num_careful: int,
) -> None:
    """Save the model once it has learned by supervision what `write` returns: with care, then mostly without.

    If none was written with care, the model might not learn what to look at, and rewards would have nothing to
    strengthen.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    drawn = random.Random(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 2 * (num_steps - step) / num_steps)
        care = 1.0 if step < num_careful else CARE
        rows, targets = _pad([tokenizer.encode(write(drawn, care)) for _ in range(64)], tokenizer)
        logits = model(rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tiny.save(model, folder, tokenizer)
    print(f"warm-up: {num_steps} steps, loss {loss.item():.2f}; saved in {folder}", flush=True)


def _pad(rows: list[list[int]], tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one length, and their tokens as targets: those that are not padding."""
    width = max(map(len, rows))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return padded, padded.masked_fill(padded == tokenizer.pad_token_id, _IGNORED)


def write_rows(file: Path, rows: Iterable[object]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
