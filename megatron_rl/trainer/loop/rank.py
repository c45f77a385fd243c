"""The values that all parts of a run are made from, on one rank."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_rl.command_line.run import RunSettings
from megatron_rl.observe.startup import Startup
from megatron_rl.sidecar.child import SIDECAR, OwnSidecar
from megatron_rl.trainer.mcore.model.gpt import BuildModel, build_model
from megatron_rl.trainer.mcore.session import Session

if TYPE_CHECKING:
    from megatron_rl.trainer.loop.stop import StopRequest
    from megatron_rl.trainer.loop.watch import Loop


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The parts in which a run of a Megatron recipe, or a service, differs from a run that stands alone."""

    build_model: BuildModel = build_model
    saved: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The recipe's arguments, which Megatron expects in a checkpoint next to model and optimizer."""
    open_sinks: Callable[[], Sequence[Any]] | None = None
    """The opener of the recipe's own writers, which get rank 0's metrics in place of our flags' writers."""
    finish_iteration: Callable[[int], None] = lambda version: None
    """A function that every rank calls at the end of a version's iteration."""
    build_loop: "Callable[[Rank, OwnSidecar | None, StopRequest], Loop] | None" = None
    """The builder of the loop, in place of a run's."""
    sidecar: str = SIDECAR
    """The module of the sidecar that rank 0 starts."""


STAND_ALONE = Recipe()


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
