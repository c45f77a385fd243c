"""Shows a run to a person who watches it: a live display on a terminal, else a line per iteration."""

import collections
import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_rl.config.settings import ObserveConfig
from megatron_rl.observe.metrics import number_at, pass_name

_REFRESHES_PER_SECOND = 4
# The remaining time is estimated from this many of the last iterations.
_NUM_REMEMBERED = 10


class Progress:
    """The display that the loop reports to; this class shows nothing. No method waits for the display."""

    shows_counts = False
    """True if `counts` should be asked for while an iteration runs."""

    def begin(self, version: int, num_groups: int) -> None:
        """Note that an iteration begins; `version` is the number of iterations before it, in this and earlier runs."""

    def phase(self, name: str) -> None:
        """Note the current phase: publishing, generating, training, updating, evaluating, saving."""

    def counts(self, finished: int, trained: int, waiting_for: str) -> None:
        """Note how many groups are sampled and trained on, and what the loop waits for ("" for nothing)."""

    def end(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Note that the iteration is over, with these metrics.

        After the last one, another call may bring the evaluation of the last version.
        """

    def say(self, text: str) -> None:
        """Print a line for people, above the display."""

    def close(self) -> None:
        """Leave the terminal as it was; a second call does nothing."""


def progress_of(config: ObserveConfig, total: int, stream: TextIO) -> Progress:
    """Make the display that `--progress` asks for, for a run of `total` iterations. Its methods do not raise."""
    kind = config.progress
    if kind == "auto":
        kind = "live" if stream.isatty() and os.environ.get("TERM") not in (None, "dumb") else "lines"
    if kind == "none":
        return GuardedProgress(QuietProgress())
    shown = LiveProgress if kind == "live" else LineProgress
    return GuardedProgress(shown(total, config.log_interval, stream))


class GuardedProgress(Progress):
    """Keeps errors of the display, such as a closed terminal, out of the loop.

    The error is printed to standard error, and from then on only the texts of `say` are shown.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self.shows_counts = inner.shows_counts

    def begin(self, version: int, num_groups: int) -> None:
        self._try(lambda inner: inner.begin(version, num_groups))

    def phase(self, name: str) -> None:
        self._try(lambda inner: inner.phase(name))

    def counts(self, finished: int, trained: int, waiting_for: str) -> None:
        self._try(lambda inner: inner.counts(finished, trained, waiting_for))

    def end(self, version: int, metrics: Mapping[str, Any]) -> None:
        self._try(lambda inner: inner.end(version, metrics))

    def say(self, text: str) -> None:
        self._try(lambda inner: inner.say(text))

    def close(self) -> None:
        self._try(lambda inner: inner.close())

    def _try(self, call: Callable[[Progress], None]) -> None:
        inner = self._inner
        try:
            call(inner)
        except Exception as error:
            self._inner = QuietProgress()
            with contextlib.suppress(Exception):
                inner.close()
            with contextlib.suppress(Exception):
                print(f"progress is no longer shown: {type(error).__name__}: {error}", file=sys.stderr)


class QuietProgress(Progress):
    """Shows only the texts of `say`, which may be warnings, on standard error."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)


class LineProgress(Progress):
    """A line every `interval` iterations, and one at the end of the last."""

    def __init__(self, total: int, interval: int, stream: TextIO) -> None:
        self._total = total
        self._interval = interval
        self._stream = stream

    def end(self, version: int, metrics: Mapping[str, Any]) -> None:
        if is_due(version, self._total, self._interval):
            self.say(line_of(version, self._total, metrics))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _Terminal(Console):
    """A console that raises if its reader has gone away, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal is closed")


class _Display(Live):
    """Keeps an error of its thread, which would go unseen."""

    failure: Exception | None = None

    def refresh(self) -> None:
        try:
            super().refresh()
        except Exception as error:
            self.failure = error


class LiveProgress(LineProgress):
    """A display that its own thread redraws, below the lines; the loop only leaves notes for it."""

    shows_counts = True

    def __init__(self, total: int, interval: int, stream: TextIO) -> None:
        super().__init__(total, interval, stream)
        self._console = _Terminal(file=stream, force_terminal=True, highlight=False)
        self._live: _Display | None = None
        self._is_closed = False
        self._shown = Shown(total=total)
        self._lock = threading.Lock()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_NUM_REMEMBERED)

    def begin(self, version: int, num_groups: int) -> None:
        now = time.monotonic()
        self._note(
            version=version, num_groups=num_groups, finished=0, trained=0, waiting_for="", begun=now, phase_begun=now
        )
        if self._live is None and not self._is_closed:
            self._live = _Display(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                # A stream into a file is left alone.
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()

    def phase(self, name: str) -> None:
        self._note(phase=name, phase_begun=time.monotonic())

    def counts(self, finished: int, trained: int, waiting_for: str) -> None:
        self._note(finished=finished, trained=trained, waiting_for=waiting_for)

    def end(self, version: int, metrics: Mapping[str, Any]) -> None:
        if version < self._total:
            self._seconds.append(time.monotonic() - self._shown.begun)
            self._note(metrics=metrics, seconds=sum(self._seconds) / len(self._seconds), phase="", waiting_for="")
        super().end(version, metrics)

    def say(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._is_closed = True
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _note(self, **changes: Any) -> None:
        if self._live is not None and self._live.failure is not None:
            raise self._live.failure
        # It is replaced as a whole: the display's thread takes no lock, and must never see half of a change. The lock
        # is for the loop and the thread that asks for counts: neither may undo the other's change.
        with self._lock:
            self._shown = dataclasses.replace(self._shown, **changes)

    def _render(self) -> RenderableType:
        return display(self._shown, time.monotonic())


@dataclasses.dataclass(frozen=True)
class Shown:
    """The content of the live display at one moment."""

    total: int
    version: int = 0
    num_groups: int = 0
    finished: int = 0
    trained: int = 0
    waiting_for: str = ""
    phase: str = ""
    begun: float = 0.0
    phase_begun: float = 0.0
    # The mean over the last iterations; None before the end of the first.
    seconds: float | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def display(shown: Shown, now: float) -> RenderableType:
    """Draw the run, the groups of this iteration, and the current phase with the last one's results."""
    seconds, num_left = shown.seconds, shown.total - shown.version
    left = None if seconds is None else seconds * num_left - (now - shown.begun)
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True)
    bars.add_column(width=24)
    bars.add_column(no_wrap=True, overflow="ellipsis")
    bars.add_row(
        Text(f"iteration {shown.version + 1} of {shown.total}", style="bold"),
        ProgressBar(total=max(shown.total, 1), completed=shown.version),
        Text("" if left is None else f"{_clock(max(left, 0.0))} left"),
    )
    if shown.num_groups:
        bars.add_row(
            Text(f"{shown.trained} of {shown.num_groups} groups trained"),
            ProgressBar(total=shown.num_groups, completed=shown.trained),
            Text(f"{shown.finished} finished"),
        )
    doing = [f"{shown.phase} {_clock(now - shown.phase_begun)}"] if shown.phase else []
    doing += [f"waiting for {shown.waiting_for}"] if shown.waiting_for else []
    reward = number_at(shown.metrics, "reward", "mean")
    came_to = [] if reward is None else [f"reward {reward:.3f}"]
    row = "   ".join(filter(None, (", ".join(doing), *came_to, _rates(shown.metrics))))
    # The cursor waits on a line of its own, where another process may print, such as torchrun its last traceback.
    return Group(bars, Text(row, no_wrap=True, overflow="ellipsis"), Text(""))


def line_of(version: int, total: int, metrics: Mapping[str, Any]) -> str:
    """Write an iteration as one line whose columns align with other lines'; "-" stands for a missing number."""
    width = len(str(total))
    if version >= total:
        return "  ".join((f"    after {total}/{total}", *_remarks(metrics)))
    iteration = number_at(metrics, "time", "iteration")
    loss = f"loss {_number(number_at(metrics, 'loss'), '10.3e')}"
    trained = f"{_number(number_at(metrics, 'time', 'trained_tokens_per_second'), '8,.0f')} trained"
    if "demonstrations" in metrics or "pairs" in metrics:
        begin = f"iteration {version + 1:>{width}}/{total}"
        return "  ".join((begin, loss, f"tokens/s {trained}", f"{_number(iteration, '8.2f')} s", *_remarks(metrics)))
    wait = number_at(metrics, "time", "wait")
    share = None if wait is None or not iteration else 100 * wait / iteration
    truncated = number_at(metrics, "responses", "truncated")
    columns = [
        f"iteration {version + 1:>{width}}/{total}",
        f"reward {_number(number_at(metrics, 'reward', 'mean'), '7.3f')}",
        loss,
        f"tokens/s {_number(number_at(metrics, 'time', 'generated_tokens_per_second'), '8,.0f')} generated {trained}",
        f"{_number(iteration, '8.2f')} s",
        f"waited {_number(share, '3.0f')}%",
        f"truncated {_number(None if truncated is None else 100 * truncated, '3.0f')}%",
        *_remarks(metrics),
    ]
    return "  ".join(columns)


def is_due(version: int, total: int, interval: int) -> bool:
    """Return True if the iteration after `version` others gets a line."""
    return (version + 1) % interval == 0 or version + 1 >= total


def _remarks(metrics: Mapping[str, Any]) -> list[str]:
    """Collect the numbers that not every iteration has."""
    remarks = []
    if failed := number_at(metrics, "responses", "failed"):
        remarks.append(f"failed {100 * failed:.0f}%")
    passed, reward = (number_at(metrics, "evaluation", name) for name in ("pass", "mean"))
    if passed is not None:
        remarks.append(f"evaluation {pass_name([metrics])} {passed:.3f} reward {_number(reward, '.3f')}")
    held_out = number_at(metrics, "evaluation", "loss")
    if held_out is not None:
        remarks.append(f"held-out loss {held_out:.3f}")
    accuracy, margin = (number_at(metrics, "evaluation", name) for name in ("accuracy", "margin"))
    if accuracy is not None and margin is not None:
        remarks.append(f"accuracy {accuracy:.3f} margin {margin:.3f}")
    all_equal = number_at(metrics, "reward", "all_equal_groups")
    if all_equal:
        remarks.append(f"groups of equal rewards {all_equal:.0f}")
    return remarks


def _rates(metrics: Mapping[str, Any]) -> str:
    generated = number_at(metrics, "time", "generated_tokens_per_second")
    trained = number_at(metrics, "time", "trained_tokens_per_second")
    known = [
        f"{rate:,.0f} {word}" for rate, word in ((generated, "generated"), (trained, "trained")) if rate is not None
    ]
    return f"tokens/s {', '.join(known)}" if known else ""


def _number(value: float | None, form: str) -> str:
    width = int(form.split(".")[0].rstrip(",") or 0)
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
