"""The values that all parts of a run are made from, on one rank."""

import contextlib
import dataclasses
import sys

from megatron_rl.command_line.run import RunSettings
from megatron_rl.observe.startup import Startup
from megatron_rl.trainer.mcore.recipe_parts import Recipe
from megatron_rl.trainer.mcore.session import Session


@dataclasses.dataclass(frozen=True)
class Rank:
    """The process whose parts are made."""

    settings: RunSettings
    session: Session
    recipe: Recipe
    startup: Startup
    stack: contextlib.ExitStack
    """Closes the parts that stay open until the run ends."""

    def say(self, text: str) -> None:
        """Print a note, on rank 0 alone."""
        if self.session.rank == 0:
            print_note(text)


def print_note(text: str) -> None:
    """Print a line for people on standard error."""
    print(f"note: {text}", file=sys.stderr)
