"""Run the demo: a tiny model that calls its calculator carelessly learns to call it right, with real vLLM.

python -m examples.calculator.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from torch.nn import functional

from examples.arithmetic import model as tiny
from examples.arithmetic.demo import LAYOUTS
from examples.calculator.calculator import NUM_DIGITS, OPERATORS, compute
from examples.calculator.model import CALL, CALL_END, END, draw, make_tokenizer
from megatron_rl.analysis.picture import picture
from megatron_rl.errors import count_noun
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.summary import text_curves
from megatron_rl.shared.records.audit_check import verify

ROOT = Path(__file__).resolve().parents[2]
NUM_TRAIN, NUM_HELD_OUT = 4096, 64
CARE = 0.4
"""The share of calls that are sure to have the question's operator, once the warm-up is careless; others have any."""
CAREFUL_STEPS = 300
"""The steps of the warm-up whose calls all have the question's operator.

If some never had it, the model might not learn where it stands, and rewards would have nothing to strengthen.
"""
_IGNORED = -100
FLAGS = [
    "--train-iters", "30", "--grpo-prompts-per-step", "32", "--grpo-group-size", "16", "--micro-batch-size", "256",
    "--seq-length", "64", "--rollout-max-tokens", "40", "--rollout-max-num-seqs", "256",
    "--rollout-env-max-turns", "3", "--rollout-tool-parser", "hermes", "--prompt-chat",
    "--lr", "1e-3", "--lr-warmup-iters", "2", "--lr-decay-style", "linear", "--weight-decay", "0",
    "--adam-beta1", "0.9", "--adam-beta2", "0.95", "--clip-grad", "1.0", "--eval-interval", "10",
    "--eval-num-samples", "4", "--eval-temperature", "1.0",
]  # fmt: skip


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="dp2", help="of two ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("calculator"))
    parser.add_argument("flags", nargs="*", help="after --: flags for pretrain_grpo.py, which win over the demo's")
    arguments = parser.parse_args()
    out, start = arguments.out, time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_rows(out, arguments.seed)
    warm_up(out / "model", arguments.seed)
    run = out / "run"
    subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            str(ROOT / "pretrain_grpo.py"), *FLAGS, "--hf-model", str(out / "model"),
            "--prompts", str(out / "train.jsonl"), "--eval-prompts", str(out / "held_out.jsonl"),
            "--seed", str(arguments.seed + 1), "--rollout-folder", str(run),
            "--rollout-env", f"{Path(__file__).parent / 'calculator.py'}:Calculator",
            *LAYOUTS[arguments.layout], *arguments.flags,
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    records = read_metrics(run)
    print(text_curves({"calculator": records}))
    picture({"calculator": run}, out / "picture.png")
    found = [record["evaluation"]["mean"] for record in records if "evaluation" in record]
    report = verify(run)
    print(
        f"\naudit: {report.num_lines} lines, {count_noun(len(report.breaches), 'breach', 'breaches')}\n"
        f"of {NUM_HELD_OUT} held-out questions, 4 times each, {found[0]:.1%} were answered at the first evaluation and "
        f"{found[-1]:.1%} at the last one; {time.monotonic() - start:.0f} s in all\n"
        f"the picture: {out / 'picture.png'}"
    )
    (out / "result.json").write_text(json.dumps({"before": found[0], "after": found[-1]}) + "\n")


def write_rows(folder: Path, seed: int) -> None:
    """Write the questions to train on and those held out."""
    drawn = random.Random(seed)
    questions = list(dict.fromkeys(ask(drawn) for _ in range(2 * NUM_TRAIN)))[: NUM_TRAIN + NUM_HELD_OUT]
    for name, chosen in (("held_out", questions[:NUM_HELD_OUT]), ("train", questions[NUM_HELD_OUT:])):
        rows = ({"prompt": question, "answer": compute(question)} for question in chosen)
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def ask(drawn: random.Random) -> str:
    """Draw a question, whose answer is not negative."""
    right, left = sorted(drawn.sample(range(100, 1000), 2))
    return f"{left}{drawn.choice([*OPERATORS])}{right}"


def warm_up(folder: Path, seed: int, num_steps: int = 400) -> None:
    """Save a model that can call its tool and copy the result, by supervision.

    Half the time it guesses instead, and at last it learns to be careless: mostly it takes any operator.
    """
    model, tokenizer = draw(seed), make_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    drawn = random.Random(seed)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50, 2 * (num_steps - step) / num_steps)
        care = 1.0 if step < CAREFUL_STEPS else CARE
        rows, targets = _pad([tokenizer.encode(chat(drawn, care)) for _ in range(64)], tokenizer)
        logits = model(rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tiny.save(model, folder, tokenizer)
    print(f"warm-up: {num_steps} steps, loss {loss.item():.2f}; saved in {folder}", flush=True)


def chat(drawn: random.Random, care: float) -> str:
    """Write a conversation: a guess, or a call and its result, with any operator unless it is made with care."""
    question = ask(drawn)
    text = f"<tools>calculate<user>{question}{END}<assistant>"
    if drawn.random() < 0.5:
        return f"{text}{drawn.randrange(10**NUM_DIGITS):0{NUM_DIGITS}}{END}"
    is_careful = drawn.random() < care
    expression = question if is_careful else question[:3] + drawn.choice([*OPERATORS]) + question[4:]
    value = compute(expression)
    call = "".join(CALL) + expression + "".join(CALL_END)
    return f"{text}{call}{END}<tool>{value}{END}<assistant>{value}{END}"


def _pad(rows: list[list[int]], tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of one length, and their tokens as targets: those that are not padding."""
    width = max(map(len, rows))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    return padded, padded.masked_fill(padded == tokenizer.pad_token_id, _IGNORED)


if __name__ == "__main__":
    main()
