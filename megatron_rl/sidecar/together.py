"""The parts of a sidecar's start, which run at the same time.

Invariants:

- an error is raised only when the parts before it in the order are done, so that of several mistakes the same one is
  reported, whichever part is faster;
- when one is raised, the other parts are cancelled, and none of them runs any more.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any


class Parts:
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
