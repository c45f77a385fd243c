"""The folders of models that rewards name: their checks, which read no weights, and their hashes."""

import functools
from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def check_folder(argument: str | None, name: str) -> Path:
    """Return a model's folder with weights and a tokenizer; raise a ValueError if it lacks one."""
    if not argument:
        raise ValueError(f"{name} needs the folder of a model: write {name}:FOLDER")
    folder = Path(argument)
    for what, is_there in (
        ("config.json", (folder / "config.json").is_file()),
        ("*.safetensors", any(folder.glob("*.safetensors"))),
        (_TOKENIZERS[0], any((folder / file).is_file() for file in _TOKENIZERS)),
    ):
        if not is_there:
            raise ValueError(f"{folder} has no {what}: name a folder in Hugging Face's format, with its tokenizer")
    return folder


def list_places(folder: Path) -> tuple[Path, ...]:
    """List the folders in which a model's files are stored: in a cache of Hugging Face's they are links."""
    return tuple(dict.fromkeys([folder, *(file.resolve().parent for file in sorted(folder.iterdir()))]))


def hash_folder(folder: Path) -> str:
    """Hash the names and contents of a folder's files; files that have not changed are read once."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return _hash_files(tuple((file, (found := file.stat()).st_size, found.st_mtime_ns) for file in files))


@functools.lru_cache
def _hash_files(files: tuple[tuple[Path, int, int], ...]) -> str:
    # Imported here, because workers import this module too, and another environment may lack it.
    from blake3 import blake3

    whole = blake3()
    for file, _, _ in files:
        whole.update(f"{file.name}\0{blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()}\n".encode())
    return whole.hexdigest()
