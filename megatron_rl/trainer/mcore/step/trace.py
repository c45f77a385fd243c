"""The times of a rank's forward and backward passes, taken as marks in the device's queue.

Nothing here waits for the device until `settle`, which an iteration calls once, at its end.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_rl.observe.trace import COMPUTE, MAIN, POLICY, Kind, Recorder
from megatron_rl.platforms import Platform

_FORWARD, _BACKWARD = "forward-compute", "backward-compute"
# Megatron's timer of a whole schedule. The loop times schedules itself.
_SCHEDULE = "forward-backward"


@dataclasses.dataclass
class Timer:
    """A timer that Megatron starts and stops."""

    start: Callable[..., None]
    """Megatron's own timers let all ranks wait for each other if an argument says so; ours never wait."""
    stop: Callable[..., None]


class StepTrace:
    """The passes of one rank. Megatron's schedules call `timer`; a step says which forward pass begins."""

    def __init__(self, recorder: Recorder, platform: Platform) -> None:
        self._recorder = recorder
        self._platform = platform
        self._timers: dict[str, Timer] = {}
        self._open: tuple[Kind, int, int, Any] | None = None
        self._passes: list[tuple[Kind, int, int, Any, Any]] = []
        # The policy's forward passes in this run of the schedule, in order: chunk, slot, tokens.
        self._forward: list[tuple[int, int, int]] = []
        self._num_backward = 0
        self._num_chunks = 1

    def begin_schedule(self, num_chunks: int) -> None:
        """Expect passes through `num_chunks` chunks."""
        self._num_chunks, self._forward, self._num_backward = num_chunks, [], 0

    def begin_forward(self, role: str, chunk: int, slot: int, num_tokens: int) -> None:
        """Record that a forward pass begins, and that the one before it ends, if it has not ended yet."""
        mark = self._end()
        self._begin("forward", role, chunk, slot, num_tokens, mark)
        if role == POLICY:
            self._forward.append((chunk, slot, num_tokens))

    def timer(self, name: str, *_: Any, **__: Any) -> Timer:
        """Return the timer of that name, as Megatron's `config.timers` does."""
        found = self._timers.get(name)
        if found is None:
            found = self._timers[name] = self._make(name)
        return found

    def combine_with(self, timers: Callable[..., Any]) -> Callable[..., Timer]:
        """Return a function like `timer`, whose timers also start and stop those of one of Megatron's scripts."""

        def both(name: str, *level: Any, **others: Any) -> Timer:
            ours, theirs = self.timer(name), timers(name, *level, **others)

            def begin(**barrier: Any) -> None:
                theirs.start(**barrier)
                ours.start()

            def end(**barrier: Any) -> None:
                ours.stop()
                theirs.stop(**barrier)

            return Timer(begin, end)

        return both

    def settle(self) -> None:
        """Record the passes of the iteration; wait until the device has finished them."""
        if not self._passes:
            return
        last, before = self._platform.mark(), self._platform.seconds_between
        # This call waits until the device passes the last mark. That moment is now.
        before(last, last)
        now = self._recorder.now()
        for kind, slot, num_tokens, begin, end in self._passes:
            self._recorder.add(kind, now - before(begin, last), now - before(end, last), slot, num_tokens)
        self._passes = []

    def _make(self, name: str) -> Timer:
        if name == _SCHEDULE:
            return Timer(_nothing, _nothing)
        if name == _FORWARD:
            return Timer(_nothing, self._end_forward)
        if name == _BACKWARD:
            return Timer(self._begin_backward, self._end_forward)
        kind, begun = self._recorder.kind(MAIN, name), [0.0]

        def begin(**_: Any) -> None:
            begun[0] = self._recorder.now()

        return Timer(begin, lambda **_: self._recorder.add(kind, begun[0], self._recorder.now()))

    def _begin_backward(self, **_: Any) -> None:
        # Backward pass k has forward pass k's micro-batch and the mirrored chunk, num_chunks - 1 - chunk.
        chunk, slot, num_tokens = self._forward[self._num_backward]
        self._num_backward += 1
        self._begin("backward", POLICY, self._num_chunks - 1 - chunk, slot, num_tokens, self._platform.mark())

    def _begin(self, name: str, role: str, chunk: int, slot: int, num_tokens: int, mark: Any) -> None:
        self._open = (self._recorder.kind(COMPUTE, name, role=role, chunk=chunk), slot, num_tokens, mark)

    def _end_forward(self, **_: Any) -> None:
        self._end()

    def _end(self) -> Any:
        mark = self._platform.mark()
        if self._open is not None:
            self._passes.append((*self._open, mark))
            self._open = None
        return mark


def _nothing(**_: Any) -> None:
    pass
