"""The tokens that end a response, as the files beside a model's weights list them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_KEY = "eos_token_id"


def read_end_tokens(folder: Path) -> list[int]:
    """Return the tokens that the folder's generation_config.json and config.json list as ends of a response."""
    config = _read(folder / _CONFIG)
    values = (_read(folder / _GENERATION).get(_KEY), config.get(_KEY), config.get("text_config", {}).get(_KEY))
    listed = [value if isinstance(value, list) else [] if value is None else [value] for value in values]
    return list(dict.fromkeys(token for tokens in listed for token in tokens))


def add_end_tokens(folder: Path, ends: Iterable[int]) -> None:
    """Add these tokens to the ends of a response in the folder's generation_config.json."""
    known = read_end_tokens(folder)
    missing = [token for token in ends if token not in known]
    if not missing:
        return
    config, path = _read(folder / _CONFIG), folder / _GENERATION
    # Other software takes these from config.json if generation_config.json is missing.
    beside = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    generation = _read(path) if path.exists() else beside
    path.write_text(json.dumps({**generation, _KEY: [*known, *missing]}, indent=2) + "\n")


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; replace it with the model's own file") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object: replace it with the model's own file")
    return found
