"""The pool of confined processes: rewards, environments and agents run in one, each with a worker of its own.

Invariants:

- all processes run the same code, with the text that was read when the pool was made;
- a process that is worn or has ended is not lent; another one takes its place when one is needed;
- no process that the user's code started outlives `close`.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_rl.confined.confinement import build_environment, find_python_path, plan_confinement
from megatron_rl.confined.process import ConfinedProcess, OutputLog, ProcessEnded
from megatron_rl.errors import MegatronRLError, PlatformError, UsageError

_log = logging.getLogger(__name__)
_OLDEST_PYTHON = (3, 11)
_DESCRIBE = "import json, sys; print(json.dumps([sys.version_info[:2], sys.prefix, sys.base_prefix, sys.path]))"
_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Settings of the processes that run the user's code."""

    num_workers: int = 2
    on_error: float | None = None
    """The reward to substitute when a function fails; None fails the group."""
    start_timeout: float = 120.0
    memory_bytes: int | None = None
    """Bytes of the largest address space of a worker."""
    confine: Literal["auto", "require", "off"] = "auto"
    """auto confines as far as the kernel can, and logs the rest; require refuses to start if the kernel cannot."""
    private: tuple[Path, ...] = ()
    """Folders that functions must not see, such as the run's, which has the token."""
    readable: tuple[Path, ...] = ()
    """Files and folders that functions may read, besides Python's, the system's and their own."""
    environment: tuple[str, ...] = ()
    """Environment variables for functions, besides those that every program needs."""
    log: Path | None = None
    """The file for the output of functions; without it only the last line is kept, for errors."""
    namespace: bool = True
    """Whether each worker gets its own process namespace, if the system allows it."""


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The Python that processes run in: this process's, or that of an environment which need not have this package."""

    python: Path | None = None
    """None for this process's."""
    path: list[str] = dataclasses.field(default_factory=find_python_path)
    """The folders in which it finds modules besides its own."""
    readable: tuple[Path, ...] = ()
    """The files and folders that it needs."""

    @classmethod
    def ask(cls, python: Path, flag: str) -> "Interpreter":
        """Ask another Python where it finds modules; raise a UsageError if it cannot be used."""
        # A link is not followed: it is what tells Python its environment.
        python = python.absolute()
        try:
            asked = subprocess.run(
                [python, "-c", _DESCRIBE], env={}, cwd="/", capture_output=True, check=True, timeout=_SECONDS
            )
            version, *prefixes, path = json.loads(asked.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise UsageError(f"{flag} {python} cannot be run as Python: {error}; name a bin/python") from None
        if tuple(version) < _OLDEST_PYTHON:
            oldest, its = (".".join(map(str, numbers)) for numbers in (_OLDEST_PYTHON, version))
            raise UsageError(f"{flag} {python} is Python {its}, and must be {oldest} or later")
        return cls(python, [], tuple(Path(place) for place in [*prefixes, *path] if Path(place).is_absolute()))


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that the processes of a pool run, and its names in messages."""

    module: str
    """The worker: a module that calls `confined.worker.run_worker`."""
    setup: Mapping[str, Any]
    """The content of the worker's set-up, besides its limits."""
    folders: tuple[Path, ...]
    """The folders of the user's files."""
    what: str
    names: str
    """The names of the functions or the class."""
    flag: str
    workers_flag: str
    ports: tuple[int, ...] = ()
    """The only TCP ports that it may connect to; empty: any."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables that are added to its environment."""
    interpreter: Interpreter = dataclasses.field(default_factory=Interpreter)


class ConfinedPool:
    """A pool of confined processes. It belongs to the event loop that it is started in."""

    PROCESS = ConfinedProcess

    def __init__(self, program: Program, settings: PoolSettings, num_processes: int) -> None:
        self._program = program
        self._settings = settings
        self._num_processes = num_processes
        self._processes: list[ConfinedProcess] = []
        self._starting = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._log: OutputLog | None = None
        self._scratch: Path | None = None
        self.missing: dict[str, str] = {}
        """The ways in which processes are not confined, each with the reason."""
        self.warnings: list[str] = []
        """Warnings for the user of what runs in it."""

    async def start(self) -> Any:
        """Start the processes and return the description of what they loaded.

        A UsageError names the file and line of code that cannot be used.
        """
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron-rl-"))
        try:
            self._log = OutputLog(self._settings.log)
            async with asyncio.TaskGroup() as tasks:
                # Descriptions may take seconds, so the first process alone makes a whole one.
                starts = [tasks.create_task(self._start(number == 0)) for number in range(self._num_processes)]
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        for what, why in self.missing.items():
            self._warn(f"{self._program.what} are not confined in {what}: {why}")
        _, description = starts[0].result()
        return description

    @contextlib.asynccontextmanager
    async def lend(self, is_alone: bool = False) -> AsyncIterator[ConfinedProcess]:
        """Lend the process that the fewest use; `is_alone`, one that is started for this use and ends after it."""
        process = await (self._start_alone() if is_alone else self._choose())
        process.num_open += 1
        try:
            yield process
        finally:
            process.num_open -= 1
            if process.is_worn and not process.num_open:
                self._end(process)

    async def close(self) -> None:
        """End all processes; calls that wait fail."""
        self._is_closed = True
        for process in list(self._processes):
            self._end(process)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._log is not None:
            self._log.close()
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        _log.warning("%s", warning)

    async def _start_alone(self) -> ConfinedProcess:
        process, _ = await self._start()
        process.is_worn = True
        return process

    async def _choose(self) -> ConfinedProcess:
        """Return the process that the fewest use; start others in the places of those that cannot be used."""
        if (free := next((process for process in self._list_usable() if not process.num_open), None)) is not None:
            return free
        async with self._starting:
            while len(usable := self._list_usable()) < self._num_processes:
                await self._start()
        return min(usable, key=lambda process: process.num_open)

    def _list_usable(self) -> list[ConfinedProcess]:
        for process in [process for process in self._processes if process.is_worn and not process.num_open]:
            self._end(process)
        return [process for process in self._processes if process.is_usable]

    async def _start(self, is_first: bool = False) -> tuple[ConfinedProcess, Any]:
        """Start a process, and return it with the description of what it loaded."""
        if self._is_closed:
            raise MegatronRLError("the run is ending")
        assert self._scratch is not None and self._log is not None, "start comes before"
        program, settings = self._program, self._settings
        own = build_environment(settings.environment, self._scratch, program.interpreter.path)
        try:
            process = await self.PROCESS.start(
                program.module,
                {**own, **program.variables},
                settings.namespace,
                self._log,
                program.interpreter.python,
            )
        except OSError as error:
            raise PlatformError(
                f"a process for {program.what} cannot be started: {error.strerror or error}; make room for it "
                f"(ulimit -n, ulimit -u, memory), or lower {program.workers_flag}"
            ) from None
        self._processes.append(process)
        try:
            if self._is_closed:
                raise MegatronRLError("the run is ending")
            answer = await process.set_up(self._write_setup(is_first), settings.start_timeout)
            if "cannot_load" in answer:
                raise UsageError(f"{program.flag}: {answer['cannot_load']}")
            self._check_confinement(answer.get("missing", {}))
        except ProcessEnded as ended:
            self._end(process)
            raise UsageError(f"{program.flag}: a process that loads {program.names} {ended}") from None
        except BaseException:
            self._end(process)
            raise
        return process, answer.get("description")

    def _write_setup(self, is_first: bool) -> bytes:
        assert self._scratch is not None
        program, settings = self._program, self._settings
        read = [*program.folders, *program.interpreter.readable, *settings.readable]
        limits = plan_confinement(read, settings.private, self._scratch, program.interpreter.path)
        limits = dataclasses.replace(limits, ports=program.ports)
        setup = {
            **program.setup,
            "is_first": is_first,
            "memory_bytes": settings.memory_bytes,
            "confinement": None if settings.confine == "off" else dataclasses.asdict(limits),
        }
        return json.dumps(setup).encode() + b"\n"

    def _check_confinement(self, missing: dict[str, str]) -> None:
        self.missing = missing
        if self._settings.confine == "off":
            self.missing = {"everything": "--reward-confine is off"} | missing
        elif self._settings.confine == "require" and missing:
            what = "; ".join(f"{name} ({why})" for name, why in missing.items())
            raise PlatformError(
                f"--reward-confine require: {self._program.what} cannot be confined in {what}; write auto"
            )

    def _end(self, process: ConfinedProcess) -> None:
        """End a process in the background; `close` waits for it."""
        if process not in self._processes:
            return
        self._processes.remove(process)
        process.kill()
        task = asyncio.get_running_loop().create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
