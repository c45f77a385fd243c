"""The times of conversations beside the engines' work: spans of the trace, and the seconds that environments take."""

from collections.abc import Callable

import numpy as np

from megatron_rl.environments.pool import Note
from megatron_rl.observe.trace import GROUPS, Recorder
from megatron_rl.shared.protocol.wire import EnvironmentTimes
from megatron_rl.sidecar.engines import GroupRequest

# The calls that answer no turn of the policy.
_BESIDE_TURNS = ("place", "open", "reward", "close")


class EnvironmentClock:
    """Takes the times of the calls of environments."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(most=0)
        self._seconds: list[float] = []

    def begin_group(self, request: GroupRequest) -> None:
        """Note that a group has waited until now for its conversations to begin."""
        now = self._recorder.now()
        since = now if request.since is None else request.since
        self._recorder.add(self._kind("queue", request), since, now, request.prompt)

    def note(self, request: GroupRequest) -> Note:
        """Return the function that notes the calls of a group's environments."""
        recorder = self._recorder

        def begin(call: str) -> Callable[[], None]:
            begun = recorder.now()

            def end() -> None:
                now = recorder.now()
                recorder.add(self._kind("environment", request, call=call), begun, now, request.prompt)
                if call not in _BESIDE_TURNS and not request.can_wait:
                    self._seconds.append(now - begun)

            return end

        return begin

    def end_iteration(self) -> EnvironmentTimes | None:
        """Return the seconds of the answers to turns since the last iteration; None without any."""
        seconds, self._seconds = self._seconds, []
        if not seconds:
            return None
        return EnvironmentTimes(mean=float(np.mean(seconds)), p95=float(np.quantile(seconds, 0.95)))

    def _kind(self, name: str, request: GroupRequest, **details: str) -> int:
        evaluation = {"evaluation": True} if request.can_wait else {}
        return self._recorder.kind(GROUPS, name, **details, **evaluation)
