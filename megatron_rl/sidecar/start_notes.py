"""Writes down how far a sidecar's start has come, for the trainer that started it (`starting.py`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.starting import StartProgress
from megatron_rl.sidecar.supervisor import Supervisor
from megatron_rl.sidecar.together import Parts

_POLL_SECONDS = 0.1


class StartNotes:
    """The progress of a start, written to a file whenever it changes."""

    def __init__(self, path: Path, warnings: Sequence[str]) -> None:
        """Begin to count seconds; `warnings` are those of the rewards, and grow while these start."""
        self.parts = Parts()
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
