"""Run the demo: a tiny model that pays at random learns to pay an amount exactly, over several turns, with real vLLM.

python -m examples.paying.demo [--layout dp2|tp2|pp2] [--seed 0] [--out FOLDER] [-- flags of pretrain_grpo.py]
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from examples import tiny_run
from examples.arithmetic import model as tiny
from examples.paying.game import AMOUNTS, FEES, MOST_PAYMENTS, write_amount

NUM_HELD_OUT = 16
# A payment and its end, and three characters of what is left before the next one.
RESPONSE_LENGTH = 5 * MOST_PAYMENTS
FLAGS = [
    "--train-iters", "120", "--grpo-prompts-per-step", "32", "--micro-batch-size", "256", "--seq-length", "32",
    "--rollout-max-tokens", str(RESPONSE_LENGTH), "--rollout-env-max-turns", str(MOST_PAYMENTS), "--lr", "1e-3",
    "--eval-num-samples", "16",
]  # fmt: skip


def main() -> None:
    run_demo(__doc__, "paying", ["--rollout-env", f"{Path(__file__).parent / 'game.py'}:Paying"])


def run_demo(
    description: str | None, name: str, own_flags: list[str], prepare: Callable[[Path], None] = lambda folder: None
) -> None:
    """Run the game as the flags say; `prepare` is given the folder of the model before the run."""

    def prepare_all(folder: Path, seed: int) -> None:
        write_rows(folder, seed)
        warm_up(folder / "model", seed)
        prepare(folder / "model")

    tiny_run.run_demo(description, name, prepare_all, [*FLAGS, *own_flags], f"{NUM_HELD_OUT} held-out games")


def write_rows(folder: Path, seed: int) -> None:
    """Write the games to train on and those held out: pairs of an amount and a fee."""
    games = [*itertools.product(AMOUNTS, FEES)]
    random.Random(seed).shuffle(games)
    for name, chosen in (("held_out", games[:NUM_HELD_OUT]), ("train", games[NUM_HELD_OUT:])):
        rows = ({"prompt": write_amount(amount), "amount": amount, "fee": fee} for amount, fee in chosen)
        tiny_run.write_rows(folder / f"{name}.jsonl", rows)


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
