"""Which rows are held out for evaluation, and which of the others are trained on."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from megatron_rl.config.settings import DataConfig
from megatron_rl.data.order import digest_text
from megatron_rl.errors import InputError


class Prompted(Protocol):
    """A row of any kind of data."""

    @property
    def row(self) -> str:
        """Its identity."""

    @property
    def tokens(self) -> bytes:
        """Those of its prompt: rows of the same prompt count as one."""


P = TypeVar("P", bound=Prompted)


def draw(rows: Sequence[P], count: int, seed: int) -> list[P]:
    """Draw `count` rows by seed and identity alone: filters and other rows hardly change which are drawn."""
    return sorted(rows, key=lambda row: digest_text(f"held out\0{seed}\0{row.row}"))[:count]


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
