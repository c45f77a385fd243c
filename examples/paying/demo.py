"""Run the demo: a tiny model that pays at random learns to pay an amount exactly, over several turns, with real vLLM.

python -m examples.paying.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch.nn import functional

from examples.arithmetic import model as tiny
from examples.arithmetic.demo import LAYOUTS
from examples.paying.game import AMOUNTS, FEES, MOST_PAYMENTS, write_amount
from megatron_rl.analysis.picture import picture
from megatron_rl.errors import count_noun
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.summary import text_curves
from megatron_rl.shared.records.audit_check import verify

ROOT = Path(__file__).resolve().parents[2]
NUM_HELD_OUT = 16
# A payment and its end, and three characters of what is left before the next one.
RESPONSE_LENGTH = 5 * MOST_PAYMENTS
FLAGS = [
    "--train-iters", "120", "--grpo-prompts-per-step", "32", "--grpo-group-size", "16", "--micro-batch-size", "256",
    "--seq-length", "32", "--rollout-max-tokens", str(RESPONSE_LENGTH), "--rollout-max-num-seqs", "256",
    "--rollout-env-max-turns", str(MOST_PAYMENTS), "--lr", "1e-3", "--lr-warmup-iters", "2", "--weight-decay", "0",
    "--lr-decay-style", "linear", "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--clip-grad", "1.0",
    "--eval-interval", "10", "--eval-num-samples", "16", "--eval-temperature", "1.0",
]  # fmt: skip


def main() -> None:
    run_demo(__doc__, "paying", ["--rollout-env", f"{Path(__file__).parent / 'game.py'}:Paying"])


def run_demo(
    description: str | None, name: str, own_flags: list[str], prepare: Callable[[Path], None] = lambda folder: None
) -> None:
    """Run the game as the flags say; `prepare` is given the folder of the model before the run."""
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
    write_rows(out, arguments.seed)
    warm_up(out / "model", arguments.seed)
    prepare(out / "model")
    run = out / "run"
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "pretrain_grpo.py"), *FLAGS, "--hf-model", str(out / "model"),
            "--prompts", str(out / "train.jsonl"), "--eval-prompts", str(out / "held_out.jsonl"),
            "--seed", str(arguments.seed + 1), "--rollout-folder", str(run),
            *own_flags, *LAYOUTS[arguments.layout], *arguments.flags,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    records = read_metrics(run)
    print(text_curves({name: records}))
    picture({name: run}, out / "picture.png")
    found = [record["evaluation"]["mean"] for record in records if "evaluation" in record]
    report = verify(run)
    print(f"\naudit: {report.num_lines} lines, {count_noun(len(report.breaches), 'breach', 'breaches')}")
    print(
        f"of {NUM_HELD_OUT} held-out games, 16 times each, {found[0]:.1%} were won at the first evaluation and "
        f"{found[-1]:.1%} at the last one; {time.monotonic() - start:.0f} s in all\n"
        f"the picture: {out / 'picture.png'}"
    )
    (out / "result.json").write_text(json.dumps({"before": found[0], "after": found[-1]}) + "\n")


def write_rows(folder: Path, seed: int) -> None:
    """Write the games to train on and those held out: pairs of an amount and a fee."""
    games = [*itertools.product(AMOUNTS, FEES)]
    random.Random(seed).shuffle(games)
    for name, chosen in (("held_out", games[:NUM_HELD_OUT]), ("train", games[NUM_HELD_OUT:])):
        rows = ({"prompt": write_amount(amount), "amount": amount, "fee": fee} for amount, fee in chosen)
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def warm_up(folder: Path, seed: int, num_steps: int = 150) -> None:
    """Save a model that knows the rules by supervision: it pays any digit, whatever is left."""
    model, tokenizer = tiny.draw(seed), tiny.make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 30, 2 * (num_steps - step) / num_steps)
        rows = torch.tensor([tokenizer.encode(play(draw)) for _ in range(128)])
        logits = model(rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tiny.save(model, folder)
    print(f"warm-up: {num_steps} steps, loss {loss.item():.2f}; saved in {folder}", flush=True)


def play(draw: random.Random) -> str:
    """Write a game of random payments."""
    left = draw.choice(AMOUNTS)
    text = write_amount(left)
    for fee in (draw.choice(FEES), *[0] * (MOST_PAYMENTS - 1)):
        paid = draw.randrange(10)
        left = max(left + fee - paid, 0)
        text += f"{paid}{tiny.END}{write_amount(left)}"
    return text


if __name__ == "__main__":
    main()
