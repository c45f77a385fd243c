"""Which groups are trained on where the last ones are put off; the same in the sidecar and in the audit.

With `--rollout-tail carry` more prompts are submitted than are trained on. Invariants:

1. Those whose groups finish first are trained on, as many as there is room for. The rest is put off.
2. Prompts that were put off are gathered until an iteration is full of them (`Plan.count_carried`). It has no others,
   and puts none off: all long responses are sampled side by side, whole, from its version.
3. A prompt that was put off is trained on before any that is put off later.
"""

import math
from collections.abc import Iterable

from megatron_rl.protocol.slots import Claim, Division

# With several updates groups belong to updates by number, and short responses would have the first ones.
_UPDATE = 0


class Arrivals:
    """What is known of the groups, in the order in which they finished. Answers as `places.Places` does."""

    def __init__(self, division: Division, num_carried: int) -> None:
        self._division = division
        self._num_carried = num_carried
        self._room = division.plan.num_prompts - num_carried
        self._arrived: set[int] = set()

    def learn(self, prompt: int, has_signal: bool) -> None:
        """Take in that a group has finished."""
        if prompt >= self._num_carried:
            if not self._room:
                return
            self._room -= 1
        self._arrived.add(prompt)

    @property
    def num_prompts(self) -> int:
        return self._division.plan.count_submitted(self._num_carried)

    @property
    def num_considered(self) -> int:
        return self.num_prompts

    @property
    def num_open(self) -> int:
        """Groups that are trained on and have not finished."""
        return self._division.plan.num_prompts - len(self._arrived)

    def chosen(self) -> list[int]:
        """What is trained on; once all is settled."""
        return sorted(self._arrived)

    def put_off(self) -> list[int]:
        """What is not trained on; once all is settled."""
        return [prompt for prompt in range(self.num_prompts) if prompt not in self._arrived]

    def is_wanted(self, prompt: int, num_ahead: int | float = math.inf) -> bool:
        """Whether the prompt can still be trained on. All are begun at once: nobody knows which will be last."""
        return self._room > 0 or prompt < self._num_carried or prompt in self._arrived

    def find_pool(self, prompt: int) -> int | None:
        """Return the update that the group is bound to; None for what is not trained on."""
        return _UPDATE if prompt in self._arrived else None

    def sort(self, prompts: Iterable[int]) -> list[int]:
        return sorted(prompts)

    def find_problem(self, claim: Claim) -> str | None:
        """Say why a claim does not fit what is known; None if it does."""
        problem = self._division.find_problem(claim)
        strangers = [prompt for prompt in claim.prompts if prompt not in self._arrived]
        if problem or not strangers:
            return problem
        return (
            f"slot ({claim.replica}, {claim.index}) takes prompt {strangers[0]}, which is not among the "
            f"{len(self._arrived)} that came first"
        )
