"""The progress of a sidecar's start, which the sidecar writes and the trainer that started it reads."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from megatron_rl.rewards.types import RewardRequest
from megatron_rl.shared.protocol.wire import Prompt, decode, encode
from megatron_rl.shared.records.append_file import write_private

FILE_NAME = "starting.json"
TRIALS_FILE = "trials"
# Two: enough to tell a reward per completion from a single one for all.
_MADE_UP = ("42", "This is a trial, and no answer.")
# Seconds without news after which the awaited processes are named.
_SILENCE_SECONDS = 15.0


class StartProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a start."""

    engines: dict[str, float | None] = {}
    """The seconds after which each started engine was ready; None for one that is not ready yet."""
    warnings: list[str] = []
    """The warnings of the rewards."""

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
    """Write rows on which the sidecar that is started next tries its rewards; only the file's owner can read them."""
    write_private(path, encode(_Trials(list(prompts))))


def take_trials(path: Path) -> list[RewardRequest]:
    """Read the rows, with made-up completions, and remove the file, which is for one sidecar; [] without a file."""
    try:
        prompts = decode(path.read_bytes(), _Trials).prompts
    except FileNotFoundError:
        return []
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
        self._told: set[str] = set()
        self._begun = self._last = time.monotonic()
        self._is_begun = False

    def lines(self, now: float) -> Iterable[str]:
        """Yield the news or, after a silence, the processes that are awaited."""
        starting = read(self._path)
        if starting is None or not starting.engines:
            if not self._is_begun and self._is_silent(now):
                yield f"rewards: waiting for their processes, {now - self._begun:.0f} s so far"
            return
        engines = starting.engines
        if not self._is_begun:
            yield from (f"rewards: {warning}" for warning in starting.warnings)
            self._is_begun, self._last = True, now
            yield f"engines: {_named(engines)} start and load the model"
        ready = {name: seconds for name, seconds in engines.items() if seconds is not None}
        if new := [name for name in ready if name not in self._told]:
            self._told |= ready.keys()
            self._last = now
            slowest = max(ready[name] for name in new)
            yield f"engines: {_named(new)} ready after {slowest:.1f} s, {len(ready)} of {len(engines)}"
        missing = [name for name in engines if name not in ready]
        if missing and self._is_silent(now):
            yield (
                f"engines: {len(ready)} of {len(engines)} ready, waiting for {_named(missing)} "
                f"(what they print is in {self._path.parent / 'logs'})"
            )

    def _is_silent(self, now: float) -> bool:
        """Check whether the silence is long enough to break; True starts another silence."""
        is_silent = now - self._last >= _SILENCE_SECONDS
        if is_silent:
            self._last = now
        return is_silent


def _named(engines: Iterable[str]) -> str:
    names = list(engines)
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} others"
