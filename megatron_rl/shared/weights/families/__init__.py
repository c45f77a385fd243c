"""The family and architecture of a model, read from a Hugging Face folder without opening its weights."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_rl import code_files
from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import names_function
from megatron_rl.shared.weights.families.family import KEYS, Family
from megatron_rl.shared.weights.families.images import list_image_tokens
from megatron_rl.shared.weights.families.registry import FAMILIES
from megatron_rl.types import Architecture

BRIDGE = "--weights-bridge"


def find_family(name: str) -> Family:
    """Return the family of that name, or of a FILE.py:NAME."""
    return _load_guest(name)[0] if names_function(name) else _find_own(name)


def _find_own(name: object) -> Family:
    """Return a family of this package; never one of a file that a config.json names."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"model_type {name!r} is not supported: it must be one of {', '.join(FAMILIES)}; or write a family of your "
            f"own, {BRIDGE} FILE.py:NAME"
        )
    return FAMILIES[name]


def _load_guest(source: str) -> tuple[Family, str]:
    """Return a family that this package does not have, from FILE.py:NAME, and the hash of its file."""
    code = code_files.load(BRIDGE, source, "a family", "NAME")
    if not isinstance(code.value, Family):
        path, _, name = source.rpartition(":")
        names = [key for key, value in vars(code.module).items() if isinstance(value, Family)]
        raise UsageError(
            f"{BRIDGE} {source}: {path} has no Family {name}; name one of {', '.join(names) or 'yours'} "
            "(docs/families.md)"
        )
    return code.value, code.sha256


def describe_guest(source: str | None) -> dict[str, str]:
    """Map the flag and the family to the hash of its file, for records; nothing without a user-defined family."""
    return {} if source is None else {f"{BRIDGE} {source}": _load_guest(source)[1]}


def read_config(folder: Path | str, flag: str = "--hf-model") -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder, which a flag names."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        remedy = f"{flag} must be a folder with config.json and weights{_suggest_download(folder)}"
        raise InputError(f"{path} does not exist: {remedy}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise InputError(f"{path} must have a model_type, which names the model's family")
    return config


def _suggest_download(folder: Path | str) -> str:
    """Say how to download a model that is named as on the Hugging Face hub: this package downloads nothing."""
    name = str(folder)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith(".") or Path(name).parent.exists():
        return ""
    local = name.partition("/")[2]
    return (
        f"; if it is a model of the Hugging Face hub: hf download {name} --local-dir {local}, then --hf-model {local}"
    )


def read_architecture(folder: Path | str, guest: str | None = None, flag: str = "--hf-model") -> Architecture:
    """Read the architecture of the model in a Hugging Face folder, which a flag names.

    `guest` is a family as FILE.py:NAME, by which every process that has the architecture finds it.
    """
    config = read_config(folder, flag)
    if guest is None:
        return _find_own(config["model_type"]).read(config)
    family, _ = _load_guest(guest)
    if family.name != config["model_type"]:
        raise InputError(
            f"{BRIDGE} {guest} describes models of model_type {family.name!r}, and {Path(folder) / 'config.json'} has "
            f"{config['model_type']!r}: name the family of this model"
        )
    return dataclasses.replace(family.read(config), family=guest)


def find_left_out(folder: Path | str, tensors: Collection[str]) -> set[str]:
    """Find the tensors of a folder that are never published, since they are not trained.

    A family that this package does not have leaves none out.
    """
    config = read_config(folder)
    family = FAMILIES.get(config["model_type"])
    return set() if family is None else family.find_left_out(config, tensors)


def find_image_tokens(folder: Path | str) -> dict[int, str]:
    """Map the tokens of a folder's model that stand for images or enclose them to their keys of config.json."""
    config = read_config(folder)
    family = FAMILIES.get(config["model_type"])
    return {} if family is None or family.images is None else list_image_tokens(config)


def find_config_key(field: str) -> str:
    """Return the key of config.json for a field of Architecture; messages name the key."""
    return KEYS.get(field, field)


def infer_family(architecture: Architecture) -> str:
    """Return the name of a family that can express this architecture, without regard to its own family field."""
    features: dict[str, str] = {}
    for name, family in FAMILIES.items():
        feature = family.find_unsupported(architecture)
        if feature is None:
            return name
        features[name] = feature
    reasons = "; ".join(f"{name}: cannot have {feature}" for name, feature in features.items())
    raise InputError(f"no supported model family has this architecture ({reasons})")


def derive_config(architecture: Architecture) -> Mapping[str, Any]:
    """Write the config.json of a model that has none yet."""
    return find_family(architecture.family).write(architecture)
