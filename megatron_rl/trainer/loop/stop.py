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

from megatron_rl.config.settings import LoopConfig
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
        self._is_asked = False
        self._has_begun = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> "StopRequest":
        """Listen from now on; the main thread must call it."""
        signal.signal(signal.SIGTERM, self._note)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop", daemon=True).start()
        return self

    @property
    def is_asked(self) -> bool:
        return self._is_asked

    def _note(self, *_: object) -> None:
        # An event would have a lock, for which a second signal would wait in the middle of the first.
        self._is_asked = True

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
        self._note()
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


@dataclasses.dataclass(frozen=True)
class Course:
    """The first and the last iteration of a loop, and the reasons to end earlier.

    At the limits that flags set, a run ends as Megatron's scripts do: saved, and with exit code 0. An iteration is
    never left half done.
    """

    version: int
    """The number of finished iterations when the loop starts."""
    num_iterations: int
    """The number of finished iterations when the run is complete."""
    stop: StopRequest
    limits: LoopConfig
    count_seconds: Callable[[], float]
    """Returns the run's seconds so far."""

    def is_over(self, version: int) -> bool:
        """Return whether this rank was asked to stop, or has reached a limit, after `version` iterations."""
        interval, minutes = self.limits.exit_interval, self.limits.exit_minutes
        is_at_interval = interval is not None and version % interval == 0
        return self.stop.is_asked or is_at_interval or (minutes is not None and self.count_seconds() > minutes * 60)


def _say(text: str) -> None:
    print(f"megatron_rl: {text}", file=sys.stderr, flush=True)
