"""The configuration that a run was last started with, so that runs can be compared afterwards."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import InputError, room_checked
from megatron_rl.weights.mapping import ModelSize

FILE_NAME = "config.json"


class Value(msgspec.Struct, array_like=True, frozen=True):
    """A value as text, and where it came from: a flag, the model's folder, a default."""

    text: str
    source: str


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was started with."""

    platform: str | None = None
    """The trainer's, as it was found if a flag did not name it."""
    num_devices: int | None = None
    """Of the trainer."""
    num_engine_devices: int | None = None
    """Of the engines that the run starts itself."""
    model: ModelSize | None = None
    sections: Mapping[str, Mapping[str, Value]] = {}
    """Values by the subject that they belong to, and their names."""


def write(path: Path, config: RunConfig) -> None:
    """Write the file, readable by its owner only, in place of an earlier start's."""
    unfinished = path.with_name(f".{path.name}")
    with room_checked(path):
        descriptor = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            json.dump(msgspec.to_builtins(config), file, ensure_ascii=False)
            file.write("\n")
    unfinished.replace(path)


def read(path: Path) -> RunConfig | None:
    """Read the file; None if it does not exist, as in the folder of a run that wrote none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}; move it away") from None


def find_differences(configs: Sequence[RunConfig | None]) -> list[tuple[str, str, list[str | None]]]:
    """List the values that are not the same in all runs: their subject, their name, and each run's text.

    None stands for a run that has no such value, or no configuration.
    """
    places: dict[tuple[str, str], None] = {}
    for config in configs:
        if config is not None:
            places |= {(section, name): None for section, values in config.sections.items() for name in values}
    rows: list[tuple[str, str, list[str | None]]] = []
    for section, name in places:
        texts = [_text_at(config, section, name) for config in configs]
        known = [text for text, config in zip(texts, configs, strict=True) if config is not None]
        if len(set(known)) > 1:
            rows.append((section, name, texts))
    return rows


def list_given(config: RunConfig) -> list[tuple[str, str, str, str]]:
    """List the values that flags gave: subject, name, text and source."""
    return [
        (section, name, value.text, value.source)
        for section, values in config.sections.items()
        for name, value in values.items()
        if value.source.startswith("--")
    ]


def _text_at(config: RunConfig | None, section: str, name: str) -> str | None:
    value: Any = None if config is None else config.sections.get(section, {}).get(name)
    return None if value is None else value.text
