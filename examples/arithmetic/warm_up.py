"""Train on careless solutions by supervision, after which the model is right about a third of the time.

It has learned to add, and to forget carries: its likeliest answer is mostly wrong, and right answers are among its
samples. Reinforcement learning begins there.

python -m examples.arithmetic.warm_up FOLDER --seed 0
"""

import argparse
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch.nn import functional

from examples.arithmetic import model as tiny
from examples.arithmetic import task
from examples.arithmetic.task import Problem

PROMPT_LENGTH = 8
NUM_ANSWER_TOKENS = 5
"""Tokens of the longest answer, its end included."""
_IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of the model's warm-up."""

    num_steps: int = 400
    batch_size: int = 128
    learning_rate: float = 2e-3
    num_ramp_steps: int = 50
    """Steps of a rising rate; the rate falls to zero over the second half of the steps."""
    steps_between_checks: int = 20
    forgotten: float = task.FORGOTTEN
    """The share of carries that the solutions forget."""


def warm_up(
    model: transformers.PreTrainedModel, sets: task.Split, seed: int, recipe: Recipe = Recipe()
) -> Iterator[tuple[int, float, float]]:
    """Train in place; yield step, loss and accuracy at every check."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = random.Random(seed)
    solved = encode(sets.warm_up, [task.careless(problem, draw, recipe.forgotten) for problem in sets.warm_up])
    for step, batch in zip(range(1, recipe.num_steps + 1), _batches(solved, recipe.batch_size, seed), strict=False):
        left = recipe.num_steps - step
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, step / recipe.num_ramp_steps, 2 * left / recipe.num_steps)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % recipe.steps_between_checks == 0:
            yield step, loss.item(), accuracy(model, sets.validation)


def encode(problems: Sequence[Problem], solutions: Sequence[str] | None = None) -> torch.Tensor:
    """Return a row of tokens for each problem: prompt, solution (by default the answer), its end, and padding."""
    ids = {token: index for index, token in enumerate(tiny.TOKENS)}
    solutions = [problem.answer for problem in problems] if solutions is None else solutions
    rows = [[*problem.prompt, *text, tiny.END] for problem, text in zip(problems, solutions, strict=True)]
    width = PROMPT_LENGTH + NUM_ANSWER_TOKENS
    return torch.tensor([[ids[token] for token in (*row, *[tiny.PAD] * (width - len(row)))] for row in rows])


def compute_logits(model: transformers.PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Compute the logits of the answers' tokens."""
    # Linear layers pad rows to a multiple of their chunks, by default of 64 tokens.
    is_linear = "linear_attention" in (getattr(model.config, "layer_types", None) or ())
    options = {"chunk_size": 16} if is_linear else {}
    return model(rows[:, :-1], **options).logits[:, PROMPT_LENGTH - 1 :]


def loss_of(model: transformers.PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the answers, a mean over their tokens."""
    answers = batch[:, PROMPT_LENGTH:]
    targets = answers.masked_fill(answers == model.config.pad_token_id, _IGNORED)
    logits = compute_logits(model, batch)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


@torch.no_grad()
def accuracy(model: transformers.PreTrainedModel, problems: Sequence[Problem]) -> float:
    """Return the share of problems that the most likely tokens answer."""
    rows = encode(problems)
    # The likeliest continuation is right if and only if each token of the answer is the likeliest after those before.
    guesses = compute_logits(model, rows).argmax(-1)
    answers = rows[:, PROMPT_LENGTH:]
    right = (guesses == answers) | (answers == model.config.pad_token_id)
    return right.all(-1).float().mean().item()


def _batches(rows: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield batches without end; each row comes once before any comes again, except those that fill no batch."""
    draw = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        yield from rows[torch.randperm(len(rows), generator=draw)].split(size)[: len(rows) // size]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the prompts, and the model that GRPO starts from.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    task.write_files(arguments.folder, arguments.seed)
    make(arguments.folder / "model", arguments.seed)


def make(
    folder: Path, seed: int, recipe: Recipe = Recipe(), family: str = "qwen3", hidden_size: int = tiny.HIDDEN_SIZE
) -> float:
    """Save a model that has been warmed up; return its accuracy on the held-out problems."""
    start = said = time.monotonic()
    sets = task.split(seed)
    model = tiny.draw(seed, family, hidden_size=hidden_size)
    for step, loss, right in warm_up(model, sets, seed, recipe):
        if time.monotonic() - said > 3:
            said = time.monotonic()
            print(f"warm-up: step {step}, loss {loss:.2f}, {right:.0%} right, {said - start:.0f} s", flush=True)
    held_out = accuracy(model, sets.held_out)
    tiny.save(model, folder)
    took = f"{recipe.num_steps} steps in {time.monotonic() - start:.0f} s"
    print(f"warm-up: {took}, {held_out:.1%} of the held-out problems right; saved in {folder}")
    return held_out


if __name__ == "__main__":
    main()
