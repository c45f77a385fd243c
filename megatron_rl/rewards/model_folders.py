"""The folders of models that rewards name: their checks, which read no weights, and their hashes."""

import functools
from pathlib import Path

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
    return Path(argument)


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
