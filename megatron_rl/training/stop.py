"""SIGTERM: the iteration that runs is finished and saved, or given up after a time of grace.

Python runs its handlers in the main thread, which may be in a collective for minutes; the number of the signal is read
by a thread of its own.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from megatron_rl.errors import ExitCode, MegatronRLError


class OutOfGrace(MegatronRLError):
    """Why the other ranks end with one that was asked to, and could not end in time."""

    exit_code = ExitCode.OUT_OF_GRACE

    def __init__(self) -> None:
        super().__init__("it was asked to stop, and its grace is over")


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self, grace_seconds: float):
        self._grace_seconds = grace_seconds
        self.tidy: Callable[[], object] = lambda: None
        """What is done last where the grace runs out; not more than some seconds' work."""
        self._asked = threading.Event()
        self._over = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def install(self) -> "StopRequest":
        """Listen from now on; from the main thread."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="stop", daemon=True).start()
        return self

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def over(self) -> None:
        """All that had to be finished is."""
        self._over.set()

    def _listen(self) -> None:
        while signal.SIGTERM not in self._reader.recv(64):
            pass
        self._asked.set()
        print(
            f"megatron_rl: asked to stop: the iteration is finished and saved within {self._grace_seconds:g} s",
            file=sys.stderr,
            flush=True,
        )
        if not self._over.wait(self._grace_seconds):
            print(
                f"megatron_rl: {self._grace_seconds:g} s of grace are over (--exit-grace-seconds): the checkpoint and "
                "the journal stay as they are",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(Exception):
                self.tidy()
            os._exit(ExitCode.OUT_OF_GRACE)
