"""A sidecar's start: its parts, which run at the same time, and their progress for the trainer that started it.

Invariants:

- an error is raised only when the parts before it in the order are done, so that of several mistakes the same one is
  reported, whichever part is faster;
- when one is raised, the other parts are cancelled, and none of them runs any more.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.rewards.types import RewardRequest
from megatron_rl.shared.protocol.wire import Prompt, decode, encode
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.sidecar.engines import EngineState

FILE_NAME = "starting.json"
TRIALS_FILE = "trials"
# The parts of a start, which run at the same time, in the order in which their errors count.
REWARDS = "rewards"
ENVIRONMENTS = "environments"
TEACHERS = "teachers"
FLAGS = "flags of vLLM"
PARSERS = "parsers of vLLM"
ENGINES = "engines"
TOKENIZER = "tokenizer"
_POLL_SECONDS = 0.05
_NOTE_SECONDS = 0.1
# Two: enough to tell a reward per completion from a single one for all.
_MADE_UP = ("42", "This is a trial, and no answer.")
# Seconds without news after which the awaited processes are named.
_SILENCE_SECONDS = 15.0


class StartProgress(msgspec.Struct, frozen=True, kw_only=True):
    engines: dict[str, float | None] = {}
    """The seconds after which each started engine was ready; None for one that is not ready yet."""
    warnings: list[str] = []
    """The warnings of the rewards."""
    parts: dict[str, float | None] = {}
    """The seconds after which each part was done; None for one that is not done yet."""
    engine_parts: dict[str, dict[str, float]] = {}
    """The seconds of the parts of each engine's start."""

    @property
    def is_over(self) -> bool:
        return bool(self.parts) and None not in (*self.parts.values(), *self.engines.values())

    def write(self, path: Path) -> None:
        write_private(path, msgspec.json.encode(self))


def read(path: Path) -> StartProgress | None:
    """Read the progress; return None if none has been written yet."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartProgress)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class _Trials(msgspec.Struct, frozen=True):
    prompts: list[Prompt]


def write_trials(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write rows on which a sidecar that is starting tries its rewards; only the file's owner can read them."""
    write_private(path, encode(_Trials(list(prompts))))


async def take_trials(path: Path) -> list[RewardRequest]:
    """Wait for the rows, return them with made-up completions, and remove the file, which is for one sidecar."""
    while not path.exists():
        await asyncio.sleep(_POLL_SECONDS)
    prompts = decode(path.read_bytes(), _Trials).prompts
    path.unlink()
    return [
        RewardRequest(
            index=prompt.index,
            prompt=prompt.text,
            completions=_MADE_UP,
            completion_ids=[[0]] * len(_MADE_UP),
            columns=prompt.columns,
            row=prompt.row,
        )
        for prompt in prompts
    ]


class News:
    """The news of a sidecar that starts, as lines for people."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ready: set[str] = set()
        self._num_warnings = 0
        self._is_begun = self._is_told = False
        self._begun = self._last = time.monotonic()

    def lines(self, now: float) -> Iterator[str]:
        """Yield the news or, after a silence, the processes that are awaited."""
        starting = read(self._path)
        if starting is None or not starting.engines:
            if self._is_silent(now):
                yield f"sidecar: waiting for its process, {now - self._begun:.0f} s so far"
            return
        for line in self._find_news(starting):
            self._last = now
            yield line
        if not self._is_told and self._is_silent(now):
            yield from self._name_awaited(starting, now)

    def _find_news(self, starting: StartProgress) -> Iterator[str]:
        yield from (f"warning: {warning}" for warning in starting.warnings[self._num_warnings :])
        self._num_warnings = len(starting.warnings)
        if not self._is_begun:
            self._is_begun = True
            yield f"engines: {_named(starting.engines)} start and load the model"
        ready = _find_ready(starting)
        if new := [name for name in ready if name not in self._ready]:
            self._ready |= ready.keys()
            slowest = max(ready[name] for name in new)
            yield f"engines: {_named(new)} ready after {slowest:.1f} s, {len(ready)} of {len(starting.engines)}"
        if starting.is_over and not self._is_told:
            self._is_told = True
            yield f"sidecar: {describe_parts(starting)}"

    def _name_awaited(self, starting: StartProgress, now: float) -> Iterator[str]:
        ready = _find_ready(starting)
        missing = [name for name in starting.engines if name not in ready]
        if missing:
            yield (
                f"engines: {len(ready)} of {len(starting.engines)} ready, waiting for {_named(missing)} "
                f"(what they print is in {self._path.parent / 'logs'})"
            )
        others = [name for name, seconds in starting.parts.items() if seconds is None and name != ENGINES]
        if others:
            yield f"sidecar: waiting for {', '.join(others)}, {now - self._begun:.0f} s so far"

    def _is_silent(self, now: float) -> bool:
        """Check whether the silence is long enough to break; True starts another silence."""
        is_silent = now - self._last >= _SILENCE_SECONDS
        if is_silent:
            self._last = now
        return is_silent


def describe_parts(starting: StartProgress) -> str:
    """Describe the seconds of a start's parts, which ran at the same time, and those of the slowest engine's."""
    parts = [f"{name} {seconds:.1f} s" for name, seconds in starting.parts.items() if seconds is not None]
    slowest = max(starting.engine_parts.items(), key=lambda engine: sum(engine[1].values()), default=None)
    text = f"its parts, side by side: {', '.join(parts)}"
    return text if slowest is None else f"{text}; {slowest[0]}: {list_seconds(slowest[1])}"


def list_seconds(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())


def _find_ready(starting: StartProgress) -> dict[str, float]:
    return {name: seconds for name, seconds in starting.engines.items() if seconds is not None}


def _named(engines: Iterable[str]) -> str:
    names = list(engines)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} others"


class StartNotes:
    """The parts of a start, and their progress, which is written to a file whenever it changes."""

    def __init__(self, path: Path, warnings: Sequence[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count seconds; `warnings` are the warnings of the rewards, and grow while these start."""
        self.seconds: dict[str, float | None] = {}
        """The seconds from the start to the end of each part; None for one that is not done."""
        self._path = path
        self._warnings = warnings
        self._clock = clock
        self._begun = clock()
        self._engine_parts: dict[str, dict[str, float]] = {}
        self._written = StartProgress()

    async def run(self, actions: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        """Run the actions and return their results, by name."""
        self.seconds |= dict.fromkeys(actions)
        tasks = {name: asyncio.create_task(self._timed(name, action)) for name, action in actions.items()}
        try:
            return {name: await task for name, task in tasks.items()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _timed(self, name: str, action: Coroutine[Any, Any, Any]) -> Any:
        result = await action
        self.seconds[name] = self._measure()
        return result

    def note_engine(self, name: str, seconds: Mapping[str, float]) -> None:
        self._engine_parts[name] = {part: round(value, 1) for part, value in seconds.items()}

    @contextlib.asynccontextmanager
    async def following(self, status: Callable[[], Mapping[str, Any]]) -> AsyncIterator[None]:
        """Write the progress within the context, and once more at its end; `status` returns the supervisor's."""

        async def follow() -> None:
            while True:
                await asyncio.sleep(_NOTE_SECONDS)
                self._note(status()["engines"])

        task = asyncio.create_task(follow())
        try:
            yield
            self._note(status()["engines"])
        finally:
            task.cancel()

    def _measure(self) -> float:
        return round(self._clock() - self._begun, 1)

    def _note(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        now, known = self._measure(), self._written.engines
        engines = {
            name: None if engine["state"] == EngineState.STARTING else known.get(name) or now
            for name, engine in found.items()
        }
        progress = StartProgress(
            engines=engines,
            warnings=list(self._warnings),
            parts=dict(self.seconds),
            engine_parts=dict(self._engine_parts),
        )
        # A failed start ends all engines, and reports the reason itself.
        if engines and progress != self._written:
            self._written = progress
            # This only informs the trainer: other writers report a full disk.
            with contextlib.suppress(OSError):
                progress.write(self._path)
