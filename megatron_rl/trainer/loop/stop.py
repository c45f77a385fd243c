"""Early ends of a run. On SIGTERM the running iteration is finished and saved, or given up after a grace period.

Before the first iteration there is nothing to finish: the process ends at once.

Python runs signal handlers in the main thread, which may be in a collective for minutes. So a separate thread reads the
signal's number from the wakeup descriptor.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, MegatronRLError


class Stopped(MegatronRLError):
    """Raised on a rank that was asked to stop and ends within an iteration; the other ranks end with it."""

    exit_code = ExitCode.OUT_OF_GRACE


_OUT_OF_GRACE = "it was asked to stop, and its grace is over"
_NOT_BEGUN = "it was asked to stop before its first iteration"


class StopRequest:
    """SIGTERM, as a request to stop."""

    def __init__(self, grace_seconds: float, leave: Callable[[MegatronRLError], object]):
        """`leave` is called last if the process has to end at once; it must take no more than a few seconds."""
        self._grace_seconds = grace_seconds
        self._leave = leave
        self._asked = threading.Event()
        self._has_begun = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> "StopRequest":
        """Listen from now on; the main thread must call it."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop", daemon=True).start()
        return self

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def begin(self) -> None:
        """Note that iterations begin, which a request lets finish. Does not return if the process is already ending."""
        with self._lock:
            self._has_begun = True

    def over(self) -> None:
        """Note that everything is finished, so that the grace period ends nothing."""
        self._over.set()

    def _listen(self) -> None:
        while signal.SIGTERM not in self._reader.recv(64):
            pass
        self._asked.set()
        with self._lock:
            if not self._has_begun:
                _say("asked to stop before the first iteration began: it ends now, and there is nothing to save")
                self._end(Stopped(_NOT_BEGUN))
        _say(f"asked to stop: the iteration is finished and saved within {self._grace_seconds:g} s")
        if not self._over.wait(self._grace_seconds):
            _say(
                f"{self._grace_seconds:g} s of grace are over (--exit-grace-seconds): the checkpoint and the journal "
                "stay as they are"
            )
            self._end(Stopped(_OUT_OF_GRACE))

    def _end(self, reason: Stopped) -> NoReturn:
        with contextlib.suppress(Exception):
            self._leave(reason)
        os._exit(reason.exit_code)


class ExitLimits:
    """Limits at which a run ends early, as Megatron's scripts do: saved, and with exit code 0.

    An iteration is never left half done.
    """

    def __init__(self, interval: int | None, minutes: int | None, count_seconds: Callable[[], float]):
        """`count_seconds` returns the run's seconds so far."""
        self._interval = interval
        self._minutes = minutes
        self._count_seconds = count_seconds

    def find_reason(self, version: int) -> str | None:
        """Return the limit that `version` finished iterations reach; None if they reach none."""
        if self._interval is not None and version % self._interval == 0:
            return f"--exit-interval {self._interval}"
        if self._minutes is not None and self._count_seconds() > self._minutes * 60:
            return f"--exit-duration-in-mins {self._minutes}"
        return None


def build_exit_limits(settings: Settings, count_seconds: Callable[[], float]) -> ExitLimits:
    """Build the limits that flags set; `count_seconds` returns the run's seconds so far."""
    return ExitLimits(settings.loop.exit_interval, settings.loop.exit_minutes, count_seconds)


@dataclasses.dataclass(frozen=True)
class Course:
    """The first and the last iteration of a loop, and the reasons to end earlier."""

    version: int
    """The number of finished iterations when the loop starts."""
    num_iterations: int
    """The number of finished iterations when the run is complete."""
    stop: StopRequest
    limits: ExitLimits

    def is_over(self, version: int) -> bool:
        """Return whether this rank was asked to stop, or has reached a limit, after `version` iterations."""
        return self.stop.is_asked or self.limits.find_reason(version) is not None


def _say(text: str) -> None:
    print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
