"""Makes groups: samples each until it is as asked for, scores it and hands it on, or says why that failed."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.observe.trace import GROUPS, Recorder
from megatron_rl.rewards.pool import RewardKind
from megatron_rl.rewards.types import RewardRequest
from megatron_rl.shared.chat import Decode
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import (
    Assignment,
    GroupRefused,
    check_group,
    check_rewards,
    derive_first_seed,
    may_be_cut,
)
from megatron_rl.shared.protocol.turns import list_rewards, mask_sampled
from megatron_rl.sidecar import attempts
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.tool_calls import JSON

if TYPE_CHECKING:
    from megatron_rl.gateway.record import Transcript
    from megatron_rl.sidecar.conversations import EnvironmentClock
    from megatron_rl.sidecar.teachers import Teachers

_log = logging.getLogger(__name__)


class Samplers(Protocol):
    """The engines together, which sample groups."""

    async def generate(self, request: GroupRequest) -> list[wire.Response]: ...

    @property
    def max_in_flight(self) -> int: ...


class GroupHolder(Protocol):
    """Makes responses of several turns, with environments or agents."""

    clock: "EnvironmentClock"

    async def hold_group(self, request: GroupRequest, prompt: wire.Prompt) -> "list[Transcript]": ...


Chats = Sequence[Sequence[JSON]]


class Scorer(Protocol):
    """Gives rewards to the responses of a group."""

    async def score(self, group: wire.Group, chats: Chats | None) -> wire.Group:
        """Return the group with rewards; `chats` are the messages of its responses if they have several turns."""
        ...


class Work(Protocol):
    """Groups to make: an iteration's or an evaluation's."""

    def next_prompt(self) -> wire.Prompt | None:
        """Return the next prompt to sample; None after the last one, and None until another group has finished."""

    def finished(self, group: wire.Group) -> None: ...

    def is_wanted(self, prompt: int) -> bool:
        """Check whether a group that is being made is still needed."""

    def missing(self) -> str:
        """Describe the groups that are missing, once the deadline has passed."""


@dataclasses.dataclass
class Counters:
    """The counters that /metrics shows beside those of the iteration."""

    groups: int = 0
    tokens: int = 0
    retried: int = 0
    called_off: int = 0
    reused: int = 0
    publishes: int = 0
    publish_seconds: float = 0.0
    evaluations: int = 0


class GroupMaker:
    """Makes the groups of iterations and of evaluations."""

    def __init__(
        self,
        engines: Samplers,
        scorer: Scorer,
        counters: Counters,
        recorder: Recorder | None = None,
        conversations: GroupHolder | None = None,
        teachers: "Teachers | None" = None,
    ) -> None:
        """Make it; with `conversations`, each response is one of them, and `teachers` grade those that are scored."""
        self._engines = engines
        self._conversations = conversations
        self._scorer = scorer
        self._counters = counters
        self._recorder = recorder or Recorder(most=0)
        self._teachers = teachers

    async def make_all(self, assignment: Assignment, work: Work) -> str | None:
        """Make the groups and hand over each as soon as it is made; return None, or the reason why some are missing."""
        try:
            async with asyncio.timeout(assignment.deadline_seconds):
                num_lost = await self._make_groups(assignment, work)
        except TimeoutError:
            return f"{work.missing()} after {assignment.deadline_seconds:g} s, its deadline"
        except MegatronRLError as error:
            return str(error)
        except Exception as error:
            _log.exception("version %d", assignment.version)
            return f"the sidecar failed: {error!r}; its log has the traceback"
        return f"the sidecar failed: the making of {num_lost} was cancelled, and {work.missing()}" if num_lost else None

    async def _make_groups(self, assignment: Assignment, work: Work) -> int:
        """Make the groups and return the number of cancelled ones, which a task group does not report."""
        changed = asyncio.Event()
        # The event that cuts off the last groups.
        cut = asyncio.Event() if may_be_cut(assignment) else None
        since = self._recorder.now()
        running: dict[int, asyncio.Task[None]] = {}
        sampling: set[int] = set()
        num_lost = num_finished = 0

        def end_sampling(prompt: int) -> None:
            nonlocal num_finished
            num_finished += 1
            sampling.discard(prompt)
            changed.set()

        def end(prompt: int, task: asyncio.Task[None]) -> None:
            nonlocal num_lost
            # A group that was called off is no longer among the running ones.
            num_lost += running.pop(prompt, None) is task and task.cancelled()
            end_sampling(prompt)

        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    changed.clear()
                    while len(sampling) < self._engines.max_in_flight and (prompt := work.next_prompt()) is not None:
                        index = prompt.index
                        sampling.add(index)
                        running[index] = tasks.create_task(
                            self._make_group(assignment, prompt, work, end_sampling, since, cut)
                        )
                        running[index].add_done_callback(functools.partial(end, index))
                    for index in [index for index in running if not work.is_wanted(index)]:
                        running.pop(index).cancel()
                        self._counters.called_off += 1
                    if not running:
                        break
                    # Only once a group has finished: a restart may leave as few groups to make as the tail has.
                    is_tail = num_finished and len(sampling) <= _count_tail(assignment)
                    if cut is not None and is_tail and len(sampling) < self._engines.max_in_flight:
                        # All have begun.
                        cut.set()
                    await changed.wait()
        except BaseExceptionGroup as group:
            # The first failure is the reason; it cancelled the others.
            raise group.exceptions[0] from None
        return num_lost

    async def _make_group(
        self,
        assignment: Assignment,
        prompt: wire.Prompt,
        work: Work,
        end_sampling: Callable[[int], None],
        since: float,
        cut: asyncio.Event | None,
    ) -> None:
        group, chats = await self._sample(assignment, prompt, since, cut)
        # Scoring overlaps with the next group's sampling.
        end_sampling(prompt.index)
        sampled = self._recorder.now()
        group = await self._scorer.score(group, chats)
        details = {"evaluation": True} if isinstance(assignment, wire.Evaluation) else {}
        self._recorder.add(
            self._recorder.kind(GROUPS, "reward", **details), sampled, self._recorder.now(), prompt.index
        )
        check_rewards(assignment, group)
        if isinstance(assignment, wire.Submission):
            group = _drop_if_alone(group)
            group = group if self._teachers is None else await self._teachers.teach(group)
        try:
            work.finished(group)
        except OSError as error:
            raise MegatronRLError(f"the journal cannot be written: {error}; make room for it") from None
        self._counters.groups += 1
        self._counters.tokens += sum(len(response.tokens) // 4 for response in group.responses)

    async def _sample(
        self, assignment: Assignment, prompt: wire.Prompt, since: float, cut: asyncio.Event | None
    ) -> tuple[wire.Group, Chats | None]:
        is_evaluation = isinstance(assignment, wire.Evaluation)
        request = GroupRequest(
            request_id=f"{assignment.run}-{assignment.version}-{'evaluation-' if is_evaluation else ''}{prompt.index}",
            prompt_tokens=tuple(wire.decode_tokens(prompt.tokens).tolist()),
            group_size=assignment.group_size,
            seed=derive_first_seed(assignment, prompt.index),
            sampling=assignment.sampling,
            can_wait=is_evaluation,
            cut=cut,
            prompt=prompt.index,
            since=since,
        )
        chats: Chats | None = None
        for attempt in range(1, attempts.GROUP + 1):
            if self._conversations is not None:
                held = await self._conversations.hold_group(request, prompt)
                responses, chats = [one.response for one in held], [one.messages for one in held]
            else:
                responses = await self._engines.generate(request)
            if not all(response.tokens or response.cause for response in responses):
                # It was cut off before it had begun.
                responses = await self._engines.generate(dataclasses.replace(request, cut=None))
            group = wire.Group(prompt=prompt, responses=responses)
            try:
                check_group(assignment, group)
                return group, chats
            except GroupRefused as refusal:
                _log.warning("attempt %d: %s", attempt, refusal)
                self._counters.retried += 1
                reason = str(refusal)
        raise MegatronRLError(f"{reason}; sampled {attempts.GROUP} times")


def _drop_if_alone(group: wire.Group) -> wire.Group:
    """Leave a group unscored in which no response is left to compare the only scored one with."""
    if len(list_rewards(group.responses)) != 1 or len(group.responses) == 1:
        return group
    where = f"prompt {group.prompt.index} ({group.prompt.row})"
    _log.warning("the group of %s is dropped: only one of its responses is scored", where)
    reason = "no other response of its group is scored"
    dropped = [
        response
        if response.reward is None
        else msgspec.structs.replace(response, reward=None, turn_rewards=[], cause="dropped", failure=reason)
        for response in group.responses
    ]
    return wire.Group(prompt=group.prompt, responses=dropped)


def _count_tail(assignment: Assignment) -> int:
    return assignment.plan.num_tail if isinstance(assignment, wire.Submission) else 0


class NoScorer:
    """RewardKind nothing: environments have given rewards, or none count."""

    async def score(self, group: wire.Group, chats: Chats | None) -> wire.Group:
        return group


class PoolScorer:
    def __init__(self, pool: RewardKind, decode: Decode):
        self._pool = pool
        self._decode = decode

    async def score(self, group: wire.Group, chats: Chats | None) -> wire.Group:
        # Functions get the responses that did not fail.
        numbers = [number for number, response in enumerate(group.responses) if response.reward is not None]
        if not numbers:
            return group
        # In a thread: decoding a long group takes many milliseconds, and the event loop has other groups to serve.
        result = await self._pool.score(await asyncio.to_thread(self._build_request, group, chats, numbers))
        responses = [*group.responses]
        for place, (number, reward) in enumerate(zip(numbers, result.rewards, strict=True)):
            values = {name: values[place] for name, values in result.components.items()}
            responses[number] = _add_reward(responses[number], reward, values)
        return wire.Group(prompt=group.prompt, responses=responses)

    def _build_request(self, group: wire.Group, chats: Chats | None, numbers: Sequence[int]) -> RewardRequest:
        scored = [group.responses[number] for number in numbers]
        completion_ids = [wire.decode_tokens(one.tokens)[mask_sampled(one)].tolist() for one in scored]
        return RewardRequest(
            index=group.prompt.index,
            prompt=group.prompt.text,
            completions=self._decode(completion_ids) if chats is None else [chats[number] for number in numbers],
            completion_ids=completion_ids,
            columns=group.prompt.columns,
            row=group.prompt.row,
        )


def _add_reward(response: wire.Response, reward: float | None, values: dict[str, float | None]) -> wire.Response:
    """Add the functions' reward to the one that an environment has given."""
    components = response.components | values
    if reward is None and not response.components:
        told = {"cause": "no reward", "failure": "every reward function returned None", "turn_rewards": []}
        return msgspec.structs.replace(response, reward=None, components=components, **told)
    assert response.reward is not None
    return msgspec.structs.replace(response, reward=response.reward + (reward or 0.0), components=components)
