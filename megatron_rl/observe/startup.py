"""Prints the steps of a run before its first iteration, each in a line with the seconds since the start."""

import threading
import time
from collections.abc import Callable
from typing import TextIO

from megatron_rl.config.hardware import CoreShares
from megatron_rl.config.settings import Settings
from megatron_rl.shared.weights.mapping import Mapping

# Parts that took fewer seconds are not shown.
_LEAST_SHOWN = 0.05


class Startup:
    """The start of rank 0. Other ranks have one too, and show nothing."""

    def __init__(self, begun: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Count from `begun`, the clock's time when the process began, or from now."""
        self._clock = clock
        self._begun = clock() if begun is None else begun
        self._last = self._begun
        self._parts: dict[str, float] = {}
        self._stream: TextIO | None = None
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._begun

    def end_part(self, name: str) -> None:
        """End a part of the start: it began when the part before it ended."""
        now = self._clock()
        self._parts[name] = self._parts.get(name, 0.0) + now - self._last
        self._last = now

    def describe_parts(self) -> str:
        """Describe the parts that took time, in order, with their seconds."""
        shown = (f"{name} {seconds:.1f} s" for name, seconds in self._parts.items() if seconds >= _LEAST_SHOWN)
        return ", ".join(shown)

    def show(self, stream: TextIO) -> None:
        """Print to this stream from now on; before this call nothing is printed."""
        self._stream = stream

    def say(self, text: str) -> None:
        """Print a line for people. If the terminal is closed, the run continues silently; the display notices it."""
        with self._lock:
            if self._stream is None:
                return
            try:
                print(f"start {self.seconds:6.1f} s  {text}", file=self._stream, flush=True)
            except OSError:
                self._stream = None


def describe_prompts(num_trained: int, num_held_out: int, num_read: int, what: str = "prompts") -> str:
    """Say how many rows of each kind the run has; `what` names the rows."""
    num_left_out = num_read - num_trained - num_held_out
    return f"{what}: {num_trained:,} to train on, {num_held_out:,} held out, {num_left_out:,} left out"


def describe_model(settings: Settings, platform: str, world_size: int) -> str:
    """Describe the model's size and its division over ranks."""
    num_parameters = sum(spec.num_elements for spec in Mapping(settings.architecture).manifest())
    sizes = settings.parallel_sizes
    layout = {
        "TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context, "EP": sizes.expert,
        "DP": world_size // sizes.model,
    }  # fmt: skip
    dtype = str(settings.transformer.params_dtype).removeprefix("torch.")
    divided = ", ".join(f"{name} {size}" for name, size in layout.items())
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"model: {settings.architecture.family}, {_counted(num_parameters)} parameters in {dtype}, on {ranks} of "
        f"{platform}: {divided}"
    )


def describe_cores(cores: CoreShares, num_threads: int) -> str:
    """Describe how ranks and engines share a CPU; OMP_NUM_THREADS, if set, decides the ranks' threads."""
    ranks, workers = (
        f"{count} thread" if count == 1 else f"{count} threads" for count in (num_threads, cores.threads_of_worker)
    )
    return f"cores: {cores.num_cores} on this host: {ranks} a rank, {workers} a process of an engine"


def _counted(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
