"""A confined process as its parent has it: its start, its calls, the ways in which it can fail, and its end.

Invariants:

- many calls may be open at once, each with its own deadline and answer;
- after a call that took too long, or was broken off, a process is worn: it is given nothing new;
- a process that ends, or sends what is not an answer, ends all its calls with ProcessEnded;
- `end` leaves no process that the user's code started, and no open pipe.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from megatron_rl.errors import MegatronRLError

_LONGEST_ANSWER = 1 << 20
_PIECE = 1 << 16
_END_SECONDS = 5.0
_LAST_LOOK_SECONDS = 0.5
# A question whether the process lives is asked after each of these shares of a call's time.
_ASKED_EACH = 1 / 8
_LOGGER = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20
_PACKAGE = Path(__file__).resolve().parents[1]
# Runs a module of this package alone: the folder that the package is in may have packages for another interpreter.
RUN_MODULE = """
import importlib.util, runpy, sys
folder, module = sys.argv.pop(1), sys.argv.pop(1)
name = module.partition(".")[0]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class CallFailed(MegatronRLError):
    """The failure of a call: the user's code raised, was silent for too long, or said too much."""


class TooSlow(CallFailed):
    """A call that was not answered in time."""


class ProcessEnded(CallFailed):
    """The end of a process, or an answer after which it cannot be used."""

    def __init__(self, reason: str, had_call: bool) -> None:
        super().__init__(reason)
        self.had_call = had_call
        """True if the call was open then, and may be the cause."""


class OwnProcessEnded(CallFailed):
    """The end of a process that only this call had."""


class OutputLog:
    """A file that takes up to 16 MiB of output, or less if the disk is full.

    It then says so and drops the rest. Without a file, all output is dropped.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: FileIO | None = None
        if path is not None:
            self._file = FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
        self._left = _MOST_BYTES

    def write(self, piece: bytes) -> None:
        if self._file is None or self._left <= 0:
            return
        self._left -= len(piece)
        try:
            self._file.write(piece)
            if self._left <= 0:
                self._file.write(b"\n[16 MiB were printed; what follows is dropped]\n")
        except OSError as error:
            # Rewards continue without the file: output must still be read, or functions would block forever.
            self._left = 0
            _LOGGER.warning(
                "%s cannot be written: %s; the output of reward functions is dropped", self._file.name, error.strerror
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ConfinedProcess:
    """A confined process. The caller must end it."""

    SHARES_LOCK = False
    """Whether several conversations share the process, and so Python's lock in it."""

    def __init__(self, process: asyncio.subprocess.Process, log: OutputLog) -> None:
        self.num_open = 0
        """The number of those that use it: conversations, rollouts, groups."""
        self.is_worn = False
        """True if it is given nothing new, and ends with the last that uses it."""
        self.is_fresh = True
        """False if an earlier use may have left state in it."""
        self._process = process
        self._log = log
        self._last_output = b""
        self._output = asyncio.create_task(self._follow_output())
        self._numbers = itertools.count(1)
        self._num_asked = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # The question whether the process lives that it has not answered, and the time when it was asked.
        self._question: tuple[int, float] | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._fault = ""
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, module: str, environment: Mapping[str, str], namespace: bool, log: OutputLog, python: Path | None = None
    ) -> Self:
        """Start the process, which runs a module; it is ready once `set_up` has returned.

        `python` is the interpreter of another environment, which need not have this package.
        """
        program = ["-m", module] if python is None else ["-c", RUN_MODULE, str(_PACKAGE), module]
        command = [str(python or sys.executable), "-P", *program, str(os.getpid()), str(int(namespace))]
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LONGEST_ANSWER,
                env=environment,
                start_new_session=True,
            )
        )
        try:
            return cls(await asyncio.shield(starting), log)
        except asyncio.CancelledError:
            # A start that is undone half-way would leave pipes open: so it is completed first, then ended.
            await cls(await starting, log).end()
            raise

    async def set_up(self, setup: bytes, timeout: float) -> dict[str, Any]:
        """Send the set-up, and return the answer: what was loaded, or why it cannot be."""
        try:
            async with asyncio.timeout(timeout):
                await self._send(setup)
                answer = await self._receive()
        except TimeoutError:
            raise ProcessEnded(f"did not finish importing within {timeout:g} seconds", had_call=True) from None
        self._reading = asyncio.get_running_loop().create_task(self._read_answers())
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def is_usable(self) -> bool:
        """True once it is set up, unless it is worn or has ended."""
        return self._reading is not None and not self.is_worn and self.is_alive

    async def call(self, call: str, timeout: float, encoded: Mapping[str, bytes] | None = None, **content: Any) -> Any:
        """Make a call, and return what the user's code says; raise CallFailed if it fails.

        `encoded` has contents that are JSON already.
        """
        number = self._num_asked = next(self._numbers)
        line = _encode_call({"id": number, "call": call, **content}, encoded or {})
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = loop.create_future()
        if self._asking is None and self.SHARES_LOCK:
            self._asking = loop.call_later(_ASKED_EACH * timeout, self._ask, _ASKED_EACH * timeout)
        try:
            if self._fault:
                raise ProcessEnded(self._fault, had_call=False)
            async with asyncio.timeout(timeout):
                await self._send(line)
                return await waiting
        except TimeoutError:
            # This process's event loop may have stood still: what was answered meanwhile is read now.
            late = self._renew(number)
            await asyncio.wait([late], timeout=min(timeout / 4, _LAST_LOOK_SECONDS))
            if late.done():
                return late.result()
            self.is_worn = True
            # If it has one conversation, only the call itself can be the cause.
            silence = 0.0 if self._question is None else loop.time() - self._question[1]
            if silence > timeout / 2 and self.num_open > 1:
                reason = f"its process did not answer for {timeout / 2:g} seconds: a call in it holds Python's lock"
                self.break_off(reason)
            if self._fault:
                raise ProcessEnded(self._fault, had_call=True) from None
            raise TooSlow(f"did not answer {call} within {timeout:g} seconds") from None
        finally:
            del self._waiting[number]

    def break_off(self, fault: str) -> None:
        """End the process and all its calls for its first fault."""
        self.is_worn = True
        if self._fault:
            return
        self._fault = fault
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ProcessEnded(fault, had_call=True))
        self.kill()

    def report_nonsense(self) -> ProcessEnded:
        """End the process, whose answer the caller cannot read; return the failure to raise."""
        fault = _fault_of_nonsense()
        self.break_off(str(fault))
        return fault

    def kill(self) -> None:
        """Tell the keeper to end the worker and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """End the process, and wait until no process and no open pipe is left."""
        self.break_off("its process was ended")
        if self._asking is not None:
            self._asking.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        # A process counts as ended only when its pipes have been read to their end.
        gone = asyncio.gather(self._process.wait(), self._drain(), self._output, return_exceptions=True)
        await asyncio.wait({gone}, timeout=_END_SECONDS)
        if not gone.done():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            await asyncio.wait({gone}, timeout=_END_SECONDS)
        gone.cancel()

    def _ask(self, seconds: float) -> None:
        """Ask the process whether it lives, and again after these seconds as long as it has calls to answer."""
        self._asking = None
        if not self._waiting or self._fault:
            return
        loop = asyncio.get_running_loop()
        if self._question is None:
            number = self._num_asked = next(self._numbers)
            self._question = number, loop.time()
            self._write(_encode_call({"id": number, "call": "ping"}, {}))
        self._asking = loop.call_later(seconds, self._ask, seconds)

    def _renew(self, number: int) -> asyncio.Future[Any]:
        """Return the future for the answer to a call; a timeout has cancelled the first one."""
        if self._waiting[number].cancelled():
            self._waiting[number] = asyncio.get_running_loop().create_future()
        return self._waiting[number]

    async def _read_answers(self) -> None:
        try:
            while True:
                content = await self._receive()
                number = content.get("id")
                if not isinstance(number, int) or not 0 < number <= self._num_asked:
                    raise _fault_of_nonsense()
                if self._question is not None and number == self._question[0]:
                    self._question = None
                # The caller of an answer that comes too late has left, or is about to look once more.
                if number not in self._waiting or (waiting := self._renew(number)).done():
                    continue
                if "error" in content:
                    kind = OwnProcessEnded if content.get("has_ended") is True else CallFailed
                    waiting.set_exception(kind(str(content["error"])))
                else:
                    waiting.set_result(content.get("said"))
        except ProcessEnded as ended:
            self.break_off(str(ended))

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    async def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._write(data)
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            if not line.endswith(b"\n"):
                raise ProcessEnded(await self._describe_end(), had_call=True)
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise _fault_of_nonsense() from None
        if not isinstance(content, dict):
            raise _fault_of_nonsense()
        return content

    async def _describe_end(self) -> str:
        try:
            async with asyncio.timeout(_END_SECONDS):
                code = await self._process.wait()
                await asyncio.shield(self._output)
        except TimeoutError:
            return "its process closed the channel of the answers"
        try:
            how = f"was killed by {signal.Signals(code - 128).name}"
        except ValueError:
            how = f"ended with exit code {code}"
        last = self._last_output.decode(errors="replace").strip().splitlines()
        return f"its process {how}" + (f"; its last line: {last[-1][:500]}" if last else "")

    async def _follow_output(self) -> None:
        """Read all that functions print, so that printing never blocks them."""
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(_PIECE):
            self._last_output = (self._last_output + piece)[-_PIECE:]
            self._log.write(piece)

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(_PIECE):
            pass


def _fault_of_nonsense() -> ProcessEnded:
    return ProcessEnded("something in its process wrote into the channel of the answers", had_call=True)


def _encode_call(content: Mapping[str, Any], encoded: Mapping[str, bytes]) -> bytes:
    try:
        line = json.dumps(content).encode()
    except (TypeError, ValueError) as error:
        raise CallFailed(f"a column of the row cannot be passed on as JSON: {error}") from None
    return b"%s%s}\n" % (line[:-1], b"".join(b', "%s": %s' % (key.encode(), data) for key, data in encoded.items()))
