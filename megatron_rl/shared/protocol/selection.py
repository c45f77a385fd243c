"""The selection of the groups that an iteration trains on, and of their updates; the same in sidecar and audit.

Without spare prompts the plan decides: all groups are trained on, that of prompt i with number i.

With spare prompts (`SelectionBySignal`), groups without a signal teach nothing, and later prompts take their numbers.
Invariants:

1. The groups that are trained on are the first `num_prompts` with a signal, in the order of the prompts, and their
   numbers count them in that order. It does not matter which of them were sampled first, or faster: short responses
   have no advantage.
2. If the prompts end before that many are found, those without a signal take the numbers that are left, in order.
3. A group is bound to an update (or, with order "prompt", to a unit) as soon as every number that it can still get
   belongs there. It is never bound elsewhere later.
4. A prompt is wanted while it can still get a number. The others need not be sampled.

With `--rollout-tail carry` (`SelectionByArrival`), more prompts are submitted than are trained on. Invariants:

1. The groups that finish first are trained on, until the iteration is full. The rest is put off.
2. Prompts that were put off are gathered until an iteration is full of them (`Plan.count_carried`). It has no others,
   and puts none off: all long responses are sampled side by side, whole, from its version.
3. A prompt that was put off is trained on before any that is put off later.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.shared.protocol.slots import Claim, Division, Place
from megatron_rl.shared.protocol.turns import list_rewards
from megatron_rl.shared.protocol.wire import Plan

Binding = int | Place
"""The update that a group is bound to, or, with order "prompt", the unit."""

_UNKNOWN, _WITHOUT, _WITH = 0, 1, 2
# With several updates groups belong to updates by number, and short responses would have the first ones.
_UPDATE = 0


class ScoredResponse(Protocol):
    """A response's weighted sum of rewards, and the reward of each function; None where a function does not apply."""

    @property
    def reward(self) -> float | None: ...

    @property
    def components(self) -> Mapping[str, float | None]: ...


class SelectionBySignal:
    """The groups' numbers, as far as they follow from the groups that have finished."""

    def __init__(self, division: Division) -> None:
        self._division = division
        self._num_wanted = division.plan.num_prompts
        num_spare = division.plan.num_spare
        self._known = np.full(self._num_wanted + num_spare, _UNKNOWN if num_spare else _WITH, dtype=np.int8)
        self._count()

    def learn(self, prompt: int, has_signal: bool) -> None:
        if self._division.plan.num_spare:
            self._known[prompt] = _WITH if has_signal else _WITHOUT
            self._count()

    @property
    def num_prompts(self) -> int:
        """The number of prompts, the spare ones included."""
        return len(self._known)

    @property
    def num_considered(self) -> int:
        """The number of first prompts that decided the selection, once all is settled."""
        if not self._division.plan.num_spare:
            return self._num_wanted
        ends = np.flatnonzero(np.cumsum(self._known == _WITH) >= self._num_wanted)
        return int(ends[0]) + 1 if ends.size else len(self._known)

    @property
    def num_open(self) -> int:
        """The number of unfinished prompts that are trained on if they and all other open ones have a signal."""
        return int(np.count_nonzero(self._is_open & (self._most < self._num_wanted)))

    def put_off(self) -> list[int]:
        """Return no prompts: those without a number were considered, and are over."""
        return []

    def chosen(self) -> list[int]:
        """List the prompts that are trained on, in the order of their numbers, once all is settled."""
        numbered = np.flatnonzero(self._most < self._num_wanted)
        return [int(prompt) for prompt in numbered[np.argsort(self._most[numbered], kind="stable")]]

    def is_wanted(self, prompt: int, num_ahead: int | float = math.inf) -> bool:
        """Check whether the prompt can still get a number, and gets one if `num_ahead` open ones have no signal."""
        return bool(self._least[prompt] < self._num_wanted and self._most[prompt] < self._num_wanted + num_ahead)

    def find_binding(self, prompt: int) -> Binding | None:
        """Return the binding of a group; None while it is open, and for a group that is not trained on."""
        least, most = int(self._least[prompt]), int(self._most[prompt])
        if most >= self._num_wanted:
            return None
        binding = self._bind(least)
        return binding if least == most or binding == self._bind(most) else None

    def sort(self, prompts: Iterable[int]) -> list[int]:
        return sorted(prompts, key=lambda prompt: int(self._most[prompt]))

    def find_problem(self, claim: Claim) -> str | None:
        """Say why a claim does not fit the selection so far; None if it fits."""
        problem = self._division.find_problem(claim)
        if problem:
            return problem
        name = f"slot ({claim.replica}, {claim.index})"
        foreign = [prompt for prompt in claim.prompts if not 0 <= prompt < len(self._known)]
        if foreign:
            return f"{name} takes prompt {foreign[0]}, which is not among the {len(self._known)} of the iteration"
        if self._division.plan.order == "prompt":
            pools = {self.find_binding(prompt) for prompt in claim.prompts}
            if pools == {claim.place} and claim.prompts == self.sort(claim.prompts):
                return None
            numbers = list(self._division.bound_numbers(claim.place))
            bound = "groups with the numbers " if self._division.plan.num_spare else ""
            return f"{name} takes prompts {claim.prompts}, and {bound}{numbers} are bound to it"
        update = self._division.update_of_slot(claim.index)
        foreign = [prompt for prompt in claim.prompts if self.find_binding(prompt) != update]
        return f"{name} belongs to update {update}, and prompt {foreign[0]} does not" if foreign else None

    def _bind(self, number: int) -> Binding:
        is_bound = self._division.plan.order == "prompt"
        return self._division.bound_unit(number) if is_bound else self._division.update_of_number(number)

    def _count(self) -> None:
        """Find the least and the most number that each group can get."""
        is_with = self._known == _WITH
        self._is_open = self._known == _UNKNOWN
        self._least = np.cumsum(is_with) - is_with
        num_open_before = np.cumsum(self._is_open) - self._is_open
        self._most = self._least + num_open_before
        # Groups without a signal come after all that have one. An earlier open one goes before them either way.
        is_without = self._known == _WITHOUT
        behind = np.count_nonzero(is_with) + np.cumsum(is_without) - is_without
        self._least[is_without] = (behind + num_open_before)[is_without]
        self._most[is_without] = (behind + np.count_nonzero(self._is_open))[is_without]


class SelectionByArrival:
    """The groups in the order in which they finished. Has the methods of `SelectionBySignal`."""

    def __init__(self, division: Division, num_carried: int) -> None:
        self._division = division
        self._num_carried = num_carried
        self._room = division.plan.num_prompts - num_carried
        self._arrived: set[int] = set()

    def learn(self, prompt: int, has_signal: bool) -> None:
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
        """The number of groups that are trained on and have not finished."""
        return self._division.plan.num_prompts - len(self._arrived)

    def chosen(self) -> list[int]:
        """List the prompts that are trained on, once all is settled."""
        return sorted(self._arrived)

    def put_off(self) -> list[int]:
        """List the prompts that are not trained on, once all is settled."""
        return [prompt for prompt in range(self.num_prompts) if prompt not in self._arrived]

    def is_wanted(self, prompt: int, num_ahead: int | float = math.inf) -> bool:
        """Check whether the prompt can still be trained on. All begin at once: which will be last is unknown."""
        return self._room > 0 or prompt < self._num_carried or prompt in self._arrived

    def find_binding(self, prompt: int) -> int | None:
        """Return the update that the group is bound to; None for a group that is not trained on."""
        return _UPDATE if prompt in self._arrived else None

    def sort(self, prompts: Iterable[int]) -> list[int]:
        return sorted(prompts)

    def find_problem(self, claim: Claim) -> str | None:
        """Say why a claim does not fit the selection so far; None if it fits."""
        problem = self._division.find_problem(claim)
        foreign = [prompt for prompt in claim.prompts if prompt not in self._arrived]
        if problem or not foreign:
            return problem
        return (
            f"slot ({claim.replica}, {claim.index}) takes prompt {foreign[0]}, which is not among the "
            f"{len(self._arrived)} that came first"
        )


def open_selection(division: Division, num_carried: int = 0) -> SelectionBySignal | SelectionByArrival:
    """Return the selection of the plan's groups, before any has finished."""
    return SelectionByArrival(division, num_carried) if division.plan.tail == "carry" else SelectionBySignal(division)


def clip_rewards(rewards: Sequence[float], plan: Plan) -> list[float]:
    least = -math.inf if plan.least_reward is None else plan.least_reward
    largest = math.inf if plan.largest_reward is None else plan.largest_reward
    return [min(max(reward, least), largest) for reward in rewards]


def has_signal(responses: Sequence[ScoredResponse], plan: Plan) -> bool:
    """Check whether the deciding rewards differ in a group: those of a function in the plan, or the clipped sum.

    A function's values are compared only among the responses that it applies to.
    """
    if not plan.deciding_rewards:
        return _is_varied(clip_rewards(list_rewards(responses), plan))
    scored = [response for response in responses if response.reward is not None]
    return any(_is_varied([response.components.get(name) for response in scored]) for name in plan.deciding_rewards)


def _is_varied(values: Iterable[float | None]) -> bool:
    return len({value for value in values if value is not None}) > 1
