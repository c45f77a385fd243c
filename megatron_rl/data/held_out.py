"""Which rows are held out for evaluation, and which of the others are trained on."""

import os
from collections.abc import Sequence
from typing import Protocol, TypeVar

from megatron_rl.config.settings import DataConfig
from megatron_rl.data.order import digest
from megatron_rl.errors import InputError, UsageError


class Prompted(Protocol):
    """A row of any kind of data."""

    @property
    def row(self) -> str:
        """Its identity."""

    @property
    def tokens(self) -> bytes:
        """Those of its prompt: rows of the same prompt count as one."""


P = TypeVar("P", bound=Prompted)


def check_files(config: DataConfig) -> None:
    """Raise a UsageError if the flags contradict each other about files of data."""
    if not config.prompts:
        raise UsageError("no prompts are given: write --prompts FILE.jsonl")
    if config.held_out < 0:
        raise UsageError(f"--prompts-held-out {config.held_out} is below 0: write how many to hold out")
    if config.held_out and config.eval_prompts:
        raise UsageError(
            f"--prompts-held-out {config.held_out} and --eval-prompts both say what is evaluated: leave one out"
        )
    trained = {os.path.realpath(path) for path in config.prompts}
    for path in config.eval_prompts or ():
        if os.path.realpath(path) in trained:
            raise UsageError(
                f"{path} is in --prompts and in --eval-prompts: leave it out of one, or use --prompts-held-out"
            )


def draw(rows: Sequence[P], count: int, seed: int) -> list[P]:
    """Draw `count` rows by seed and identity alone: filters and other rows hardly change which are drawn."""
    return sorted(rows, key=lambda row: digest(f"held out\0{seed}\0{row.row}"))[:count]


def leave_out(rows: Sequence[P], held_out: Sequence[P], config: DataConfig, notes: list[str]) -> list[P]:
    """Return the rows to train on: those whose prompts differ from every held-out one's."""
    tokens = {row.tokens for row in held_out}
    kept = [row for row in rows if row.tokens not in tokens]
    num_drawn = 0 if config.eval_prompts else len(held_out)
    num_same = len(rows) - num_drawn - len(kept)
    if not kept:
        split = "--eval-prompts" if config.eval_prompts else f"--prompts-held-out {config.held_out}"
        raise InputError(
            f"{split} of {len(rows)} prompts leaves none to train on, where prompts of the same tokens count as "
            f"one; hold out fewer"
        )
    if num_same:
        are = "is" if num_same == 1 else "are"
        notes.append(f"{num_same} of {len(rows)} prompts {are} the same as held-out ones and left out")
    return kept
