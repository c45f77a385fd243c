"""The parent's side of a worker: its process, its pipes, and the ways in which it can fail."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

from megatron_rl.rewards.types import Values, check_values

_LONGEST_ANSWER = 1 << 20
_PIECE = 1 << 16
_END_SECONDS = 5.0
_LOGGER = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20
_PACKAGE = Path(__file__).resolve().parents[1]
# Runs a module of this package alone: the folder that the package is in may have packages for another interpreter.
_RUN_MODULE = """
import importlib.util, runpy, sys
folder, module = sys.argv.pop(1), sys.argv.pop(1)
name = module.partition(".")[0]
spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class OutputLog:
    """A file that takes up to 16 MiB of output, or less if the disk is full.

    It then says so and drops the rest. Without a file, all output is dropped.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else _open_for_owner(path)
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


def _open_for_owner(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


class WorkerFault(Exception):
    """A fault after which a worker cannot be used: it died, is silent, or sent nonsense."""

    def __init__(self, reason: str, is_cause_unclear: bool) -> None:
        super().__init__(reason)
        self.is_cause_unclear = is_cause_unclear
        """Whether the state that an earlier group left in the worker may be the cause."""


@dataclasses.dataclass(frozen=True)
class FunctionAnswer:
    """A function's values for a group, or the reason why it has none."""

    values: Values | None
    error: str = ""
    is_misfit: bool = False
    """Whether any completion would cause this error."""
    has_remedy: bool = False
    """Whether the error says what to do."""


class ConfinedWorker:
    """A worker. The caller must end it after a WorkerFault, or if it was cancelled while it worked."""

    MODULE = "megatron_rl.rewards.worker"
    """The program that the worker runs."""

    def __init__(self, process: asyncio.subprocess.Process, log: OutputLog) -> None:
        self._process = process
        self._log = log
        self._last_output = b""
        self._num_served = 0
        self._output = asyncio.create_task(self._follow_output())

    @classmethod
    async def start(
        cls, environment: Mapping[str, str], namespace: bool, log: OutputLog, python: Path | None = None
    ) -> Self:
        """Start the process; it is ready once `set_up` has returned.

        `python` is the interpreter of another environment, which need not have this package.
        """
        program = ["-m", cls.MODULE] if python is None else ["-c", _RUN_MODULE, str(_PACKAGE), cls.MODULE]
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
        """Send the functions and wait until they are loaded."""
        try:
            async with asyncio.timeout(timeout):
                await self._send(setup)
                return await self._receive()
        except TimeoutError:
            raise WorkerFault(f"did not finish importing within {timeout:g} seconds", False) from None

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs. No function is blamed for an end between two groups."""
        return self._process.returncode is None

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
        except ValueError:
            raise self._nonsense() from None
        if not line.endswith(b"\n"):
            raise WorkerFault(await self._how_it_ended(), self._num_served > 0)
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            raise self._nonsense() from None
        if not isinstance(content, dict):
            raise self._nonsense()
        return content

    def _nonsense(self) -> WorkerFault:
        return WorkerFault("something in its process wrote into the channel of the answers", self._num_served > 0)

    async def _how_it_ended(self) -> str:
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

    def kill(self) -> None:
        """Tell the keeper to end the worker and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        """Kill the worker, and wait until no process and no open pipe is left."""
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

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(_PIECE):
            pass


class RewardWorker(ConfinedWorker):
    """A worker that runs reward functions, for one group at a time."""

    async def send(self, job: Mapping[str, Any], group: bytes, timeout: float) -> None:
        """Send a group."""
        try:
            async with asyncio.timeout(timeout):
                await self._send(json.dumps(job).encode() + b"\n" + group)
        except TimeoutError:
            raise WorkerFault(f"did not take the group within {timeout:g} seconds", self._num_served > 0) from None

    async def try_out(
        self, job: Mapping[str, Any], group: bytes, num_samples: int, timeout: float
    ) -> dict[int, FunctionAnswer]:
        """Return functions' answers to a made-up group, by number; a function that ends the trial gives none."""
        answers: dict[int, FunctionAnswer] = {}
        try:
            async with asyncio.timeout(timeout):
                await self._send(json.dumps(job).encode() + b"\n" + group)
                while "trial_is_over" not in (content := await self._receive()):
                    answers[int(content.get("function", -1))] = self._read(content, num_samples)
        except TimeoutError:
            raise WorkerFault(f"did not end within {timeout:g} seconds", False) from None
        return {number: answers[number] for number in job["functions"] if number in answers}

    async def answer(self, job: int, function: int, num_samples: int, timeout: float) -> FunctionAnswer:
        """Receive the next function's answer."""
        try:
            async with asyncio.timeout(timeout):
                content = await self._receive()
        except TimeoutError:
            raise WorkerFault(f"did not end within {timeout:g} seconds", False) from None
        if content.get("job") != job or content.get("function") != function:
            raise self._nonsense()
        return self._read(content, num_samples)

    def _read(self, content: Mapping[str, Any], num_samples: int) -> FunctionAnswer:
        if "error" in content:
            is_misfit, has_remedy = content.get("misfit") is True, content.get("remedy") is True
            return FunctionAnswer(None, str(content["error"]), is_misfit, has_remedy)
        try:
            return FunctionAnswer(check_values(content.get("values"), num_samples))
        except ValueError:
            raise self._nonsense() from None

    def served(self) -> None:
        """Count a group that is done: it may have left state that affects the next one."""
        self._num_served += 1
