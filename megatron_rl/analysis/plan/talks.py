"""Simulated conversations: the turns of a group's responses, which wait for an environment after each of them.

The turns of a conversation are alike, and so are the answers between them. The number of turns of conversations differs
by 1 at most, so that its mean is right.
"""

import dataclasses
import math
from collections.abc import Iterator

from megatron_rl.analysis.plan.costs import Talk
from megatron_rl.analysis.plan.engines import SimulatedGroup


@dataclasses.dataclass(eq=False)
class SimulatedTurn(SimulatedGroup):
    """A turn of a conversation, which an engine samples as a group of one response."""

    whole: SimulatedGroup | None = None
    """The group of the conversation."""
    rest: tuple[int, ...] = ()
    """Tokens of the turns after it."""
    answer: int = 0
    """Tokens of an answer of the environment."""

    def follow(self) -> "SimulatedTurn":
        """Return the next turn, after the answer to this one."""
        cached = self.prompt + self.lengths[0]
        return dataclasses.replace(
            self, prompt=cached + self.answer, cached=cached, lengths=[self.rest[0]], rest=self.rest[1:]
        )


def open_talks(group: SimulatedGroup, talk: Talk, num_before: int) -> Iterator[SimulatedTurn]:
    """Yield the first turn of each of a group's conversations; `num_before` conversations have been opened before."""
    for place, length in enumerate(group.lengths):
        number = num_before + place
        turns = max(1, math.floor((number + 1) * talk.turns) - math.floor(number * talk.turns))
        sampled = max(turns, round(length * (1 - talk.given_share)))
        answer = max(0, length - sampled) // max(1, turns - 1)
        first, *rest = (sampled * (turn + 1) // turns - sampled * turn // turns for turn in range(turns))
        yield SimulatedTurn(
            group.index, group.iteration, group.prompt, [first], cached=group.prompt if place else 0,
            whole=group, rest=tuple(rest), answer=answer,
        )  # fmt: skip
