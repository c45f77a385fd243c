"""The folder of a run: how it is found and named, its configuration, the findings of drift, and its warnings."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_rl.errors import InputError, UsageError
from megatron_rl.shared.records.append_file import write_private
from megatron_rl.shared.weights.mapping import ModelSize

CONFIG_FILE = "config.json"
WARNINGS_FILE = "warnings.log"
DRIFT_FILE = "drift.json"

T = TypeVar("T")

_PLACES = ("", "*/", "rollout/*/")
"""Places of runs below a folder: itself, one level down as in a demo's folder, and in the folder of --save."""


def list_runs(path: Path, file_name: str) -> list[Path]:
    """List the folders at or below `path` that are runs, because they have the file `file_name`."""
    if not path.is_dir() or (path / file_name).exists():
        return [path]
    return sorted({file.parent for place in _PLACES for file in path.glob(f"{place}{file_name}")})


def find_run(path: Path, file_name: str) -> Path:
    """Return the folder of the run at or below `path`; a path that is not a folder is returned as it is.

    Raise a UsageError unless there is exactly one run.
    """
    runs = list_runs(path, file_name)
    if len(runs) > 1:
        listed = "".join(f"\n  {run}" for run in runs)
        raise UsageError(f"{path} has {len(runs)} runs: name one of{listed}")
    if not runs:
        for place in _PLACES:
            for config in sorted(path.glob(f"{place}{CONFIG_FILE}")):
                check_samples(config.parent, file_name)
        raise UsageError(
            f"{path} has no {file_name}: name the run's folder (--rollout-folder, if the run had one), the folder one "
            "level above, or the folder that --save was given"
        )
    return runs[0]


def check_samples(folder: Path, wanted: str) -> None:
    """Raise a UsageError if the folder holds a run that samples nothing and so lacks `wanted`."""
    config = read_saved_config(folder / CONFIG_FILE) if folder.is_dir() else None
    stage = None if config is None else config.sections.get("run", {}).get("stage")
    if stage is not None and stage.text in ("sft", "dpo"):
        raise UsageError(
            f"{folder} is a run of --stage {stage.text}, which samples nothing, so it has no {wanted}: name a run of "
            f"--stage grpo; `megatron-rl explain` and `megatron-rl picture` read both"
        )


def label_runs(runs: Sequence[str], file_name: str) -> dict[str, Path]:
    """Find the folders of runs given as RUN or LABEL=RUN, by label.

    Without one, the label is the folder's name; for a run one level down, it is the name of the folder above.
    """
    found: dict[str, Path] = {}
    for run in runs:
        label, separator, text = run.partition("=")
        named = Path(text if separator else run)
        path = find_run(named, file_name)
        if not separator:
            folder = path if path.is_dir() else path.parent
            label = (named if folder.parent == named else folder).resolve().name
        if label in found:
            raise UsageError(f"{found[label]} and {path} are both called {label}: write LABEL={path}")
        found[label] = path
    return found


# The configuration.


class Value(msgspec.Struct, array_like=True, frozen=True):
    """A value as text, and its source: a flag, the model's folder, a default."""

    text: str
    source: str


class SavedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that a run was last started with, so that runs can be compared afterwards."""

    platform: str | None = None
    """The trainer's platform, from a flag or as it was found."""
    num_devices: int | None = None
    """Devices of the trainer."""
    num_engine_devices: int | None = None
    """Devices of the engines that the run starts itself."""
    model: ModelSize | None = None
    sections: Mapping[str, Mapping[str, Value]] = {}
    """Values by their subject and their name."""
    words: Sequence[str] = ()
    """The command line, with the flags that follow from the device; none if a recipe's script built the model."""


def write_saved_config(path: Path, config: SavedConfig) -> None:
    """Write the file, readable by its owner only, in place of an earlier start's."""
    text = json.dumps(msgspec.to_builtins(config), ensure_ascii=False)
    write_private(path, f"{text}\n".encode(errors="replace"))


def read_saved_config(path: Path) -> SavedConfig | None:
    """Read the file; None if it does not exist, as in the folder of a run that wrote none."""
    return _read_file(path, SavedConfig)


def _read_file(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; move it away") from None


def find_differences(configs: Sequence[SavedConfig | None]) -> list[tuple[str, str, list[str | None]]]:
    """List the values that differ between runs: their subject, their name, and each run's text.

    None stands for a run without this value, or without a configuration.
    """
    places: dict[tuple[str, str], None] = {}
    for config in configs:
        if config is not None:
            places |= {(section, name): None for section, values in config.sections.items() for name in values}
    rows: list[tuple[str, str, list[str | None]]] = []
    for section, name in places:
        values = [None if config is None else config.sections.get(section, {}).get(name) for config in configs]
        texts = [None if value is None else value.text for value in values]
        known = [text for text, config in zip(texts, configs, strict=True) if config is not None]
        if len(set(known)) > 1:
            rows.append((section, name, texts))
    return rows


def list_given(config: SavedConfig) -> list[tuple[str, str, str, str]]:
    """List the values that came from flags: subject, name, text and source."""
    return [
        (section, name, value.text, value.source)
        for section, values in config.sections.items()
        for name, value in values.items()
        if value.source.startswith("--")
    ]


# The findings of `megatron-rl drift`, for the report.


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about an engine, or about the trainer."""

    name: str
    dtype: str
    difference: float
    """The mean difference of its log-probs from exact ones."""
    largest: str
    """The part with the largest effect."""
    causes: list[str]
    """The parts that are off by more than rounding, each with its layer and the reason."""


class DriftFindings(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    num_tokens: int
    sides: list[Side]
    difference: float | None = None
    """The mean difference of the engine's log-probs from the trainer's; None if the trainer was left out."""


def write_findings(run: Path, findings: DriftFindings) -> None:
    """Write the file, in place of an earlier call's."""
    write_private(run / DRIFT_FILE, msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def read_findings(run: Path) -> DriftFindings | None:
    return _read_file(run / DRIFT_FILE, DriftFindings)


# The warnings.


@contextlib.contextmanager
def keep_warnings(path: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Within this context, append the warnings of other packages to the file, away from the lines of the display.

    `say` is called once, at the first warning. If the file cannot be written, warnings go to standard error as usual.
    """
    handler = _WarningsHandler(path, say)
    root = logging.getLogger()
    logging.captureWarnings(True)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        logging.captureWarnings(False)


class _WarningsHandler(logging.Handler):
    """Opens the file for each record: there are few, and several ranks append to one file."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        self._path = path
        self._say = say
        self._has_said = False

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{text}\n")
        except OSError:
            print(text, file=sys.stderr)
            return
        if not self._has_said:
            self._has_said = True
            self._say(f"other packages have warnings: {self._path} (--verbose shows them here)")
