"""The folders of models that rewards name: their checks, which read no weights, their hashes and special tokens."""

import functools
import json
import re
from pathlib import Path
from typing import Any

CLASSIFIER, JUDGE = "model", "judge"
"""The names of rewards whose argument is a model's folder."""
_NEEDED = ("config.json", "*.safetensors", "tokenizer*")


def check_folder(argument: str | None, name: str) -> Path:
    """Return the folder that a reward names; raise a ValueError if it has no model."""
    if not argument:
        raise ValueError(f"{name} needs the folder of a model: write {name}:FOLDER")
    for pattern in _NEEDED:
        if not any(Path(argument).glob(pattern)):
            raise ValueError(f"{argument} has no {pattern}: name a folder in Hugging Face's format, with its tokenizer")
    read_special_tokens(Path(argument))
    return Path(argument)


def read_special_tokens(folder: Path) -> re.Pattern[str]:
    """Return the pattern of texts that a tokenizer reads as control tokens; raise a ValueError if it is unreadable."""
    try:
        files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
        whole, config = (json.loads(file.read_bytes()) if file.exists() else {} for file in files)
        tokens = [*whole.get("added_tokens", ()), *config.get("added_tokens_decoder", {}).values()]
        texts = {token["content"] for token in tokens if token["special"] and token["content"].strip()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error!r}; name a model's folder") from None
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def remove_special_tokens(value: Any, special: re.Pattern[str]) -> Any:
    """Return a value of JSON with a space in place of each special token's text, in keys too."""
    if isinstance(value, dict):
        return {
            remove_special_tokens(key, special): remove_special_tokens(item, special) for key, item in value.items()
        }
    if isinstance(value, list):
        return [remove_special_tokens(item, special) for item in value]
    # A token's text may have spaces, so that two parts around another one become one.
    while isinstance(value, str) and special.search(value):
        value = special.sub(" ", value)
    return value


def list_places(folder: Path) -> tuple[Path, ...]:
    """List the folders in which a model's files are stored: in a cache of Hugging Face's they are links."""
    return tuple(dict.fromkeys([folder, *(file.resolve().parent for file in sorted(folder.iterdir()))]))


def hash_folder(folder: Path) -> str:
    """Hash the names and contents of a folder's files; files that have not changed are read once."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return _hash_files(tuple((file, (found := file.stat()).st_size, found.st_mtime_ns) for file in files))


@functools.lru_cache
def _hash_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    # Imported here, because workers import this module too.
    from blake3 import blake3

    whole = blake3()
    for file, _, _ in files:
        whole.update(f"{file.name}\0{blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()}\n".encode())
    return whole.hexdigest()
