"""The parts of a sidecar's start, which run at the same time, and their progress for the trainer (`starting.py`).

Invariants:

- an error is raised only when the parts before it in the order are done, so that of several mistakes the same one is
  reported, whichever part is faster;
- when one is raised, the other parts are cancelled, and none of them runs any more.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.starting import StartProgress
from megatron_rl.sidecar.supervisor import Supervisor

_POLL_SECONDS = 0.1


class StartParts:
    """Parts of a start, with the seconds until each was done."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self.seconds: dict[str, float | None] = {}
        """The seconds from the start to the end of each part; None for one that is not done."""

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

    def measure(self) -> float:
        """Return the seconds since the start."""
        return round(self._clock() - self._begun, 1)

    async def _timed(self, name: str, action: Coroutine[Any, Any, Any]) -> Any:
        result = await action
        self.seconds[name] = self.measure()
        return result


class StartNotes:
    """The progress of a start, written to a file whenever it changes."""

    def __init__(self, path: Path, warnings: Sequence[str]) -> None:
        """Begin to count seconds; `warnings` are those of the rewards, and grow while these start."""
        self.parts = StartParts()
        self._path = path
        self._warnings = warnings
        self._engine_parts: dict[str, dict[str, float]] = {}
        self._written = StartProgress()

    def note_engine(self, name: str, seconds: Mapping[str, float]) -> None:
        """Note the seconds of the parts of an engine's start."""
        self._engine_parts[name] = {part: round(value, 1) for part, value in seconds.items()}

    @contextlib.asynccontextmanager
    async def following(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Write the progress of the parts and engines that start within the context, and once more at its end."""

        async def follow() -> None:
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                self._note(supervisor)

        task = asyncio.create_task(follow())
        try:
            yield
            self._note(supervisor)
        finally:
            task.cancel()

    def _note(self, supervisor: Supervisor) -> None:
        now, known = self.parts.measure(), self._written.engines
        engines = {
            name: None if engine["state"] == EngineState.STARTING else known.get(name) or now
            for name, engine in supervisor.status()["engines"].items()
        }
        progress = StartProgress(
            engines=engines,
            warnings=list(self._warnings),
            parts=dict(self.parts.seconds),
            engine_parts=dict(self._engine_parts),
        )
        # A failed start ends all engines, and reports the reason itself.
        if engines and progress != self._written:
            self._written = progress
            # This only informs the trainer: other writers report a full disk.
            with contextlib.suppress(OSError):
                progress.write(self._path)
