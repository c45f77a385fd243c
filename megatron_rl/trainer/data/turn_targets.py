"""The advantages of a slot's targets where each turn of a conversation has one of its own."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_rl.shared.protocol.turns import list_turns
from megatron_rl.shared.protocol.wire import GroupPart

TurnAdvantage = Callable[[GroupPart], list[np.ndarray]]
"""Function from a part to the advantages of all turns of its whole group."""


def spread_turn_advantages(parts: Sequence[GroupPart], advantage: TurnAdvantage) -> np.ndarray:
    """Return the advantage of each target, in the order of responses and their tokens."""
    found = [np.zeros(0)]
    for part in parts:
        of_group = advantage(part)
        for number, response in enumerate(part.responses, part.first_response):
            turns = list_turns(response)
            lengths = [turn.end - turn.start for turn in turns if not turn.is_given]
            found.append(np.repeat(of_group[number], lengths))
    return np.concatenate(found)
