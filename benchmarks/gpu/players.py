"""Processes that take turns on one device: each does one iteration when it is told to, and says how long it took.

A process has two pipes: a line of the first is a request for an iteration, and the seconds are a line of the second.
Rivals import this in environments of their own, so it needs no packages.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
# Seconds in which a process that is told to end ends what it has started.
END_SECONDS = 20.0


class Player:
    """The side of the process that is told to play; `pipes` are the numbers of its pipes, as READ,WRITE."""

    def __init__(self, pipes: str, synchronize: Callable[[], object] = lambda: None):
        reading, writing = map(int, pipes.split(","))
        self._requests, self._answers = os.fdopen(reading), os.fdopen(writing, "w")
        self._synchronize = synchronize
        self._begun: float | None = None

    def begin(self) -> None:
        """End the iteration before, if there was one, and wait for the next request; exit if none will come."""
        self.end()
        if not self._requests.readline():
            sys.exit("no further iteration is asked for")
        self._begun = time.monotonic()

    def end(self) -> None:
        """Say how long the iteration took, once the device has done it."""
        if self._begun is None:
            return
        self._synchronize()
        self._answers.write(f"{time.monotonic() - self._begun}\n")
        self._answers.flush()
        self._begun = None


class Opponent:
    """The other side: a process that is started at once, and ended with this context."""

    def __init__(
        self, make_command: Callable[[str], Sequence[str]], output: Path, environment: Mapping[str, str] | None = None
    ):
        self._output = output
        reading, self._requests = os.pipe()
        self._answers, writing = os.pipe()
        with output.open("w") as file:
            self._process = subprocess.Popen(
                make_command(f"{reading},{writing}"), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}, pass_fds=(reading, writing),
            )  # fmt: skip
        os.close(reading)
        os.close(writing)

    def play(self, seconds: float) -> float:
        """Ask for an iteration and return the seconds that it took.

        Raise TimeoutError if it takes longer than `seconds`, and RuntimeError if the process ends instead.
        """
        try:
            os.write(self._requests, b"\n")
        except BrokenPipeError:
            raise self._describe_end() from None
        if not select.select([self._answers], [], [], max(0.0, seconds))[0]:
            raise TimeoutError(f"an iteration took longer than the {seconds:.0f} s that were left")
        answer = os.read(self._answers, 4096).decode()
        if not answer:
            raise self._describe_end()
        return float(answer)

    def _describe_end(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(f"it ended with {code}:\n{self._output.read_text(errors='replace')[-3000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._requests)
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
