"""Python files that flags name as FILE.py:NAME: user-defined losses, advantages, metrics and families of models.

A file is read and run once in a process, so the text that was hashed is the text that runs.
"""

import dataclasses
import functools
import hashlib
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from megatron_rl.errors import UsageError
from megatron_rl.flag import names_function


@dataclasses.dataclass(frozen=True)
class NamedCode:
    """A value of a file, by its name."""

    module: types.ModuleType
    value: Any
    """None if the file has no such name."""
    sha256: str
    """The hash of the file's text."""


def load(flag: str, source: str, kind: str, placeholder: str) -> NamedCode:
    """Run the file of FILE.py:NAME, and return what it has by that name; raise a UsageError if it cannot be run.

    In errors, `kind` is what must be named, such as "a function", and `placeholder` stands for its name.
    """
    label = f"{flag} {source}"
    if not names_function(source):
        raise UsageError(f"{label} must name {kind}: write FILE.py:{placeholder}")
    path, _, name = source.rpartition(":")
    file = Path(path).resolve()
    try:
        data = _read_file(file)
    except OSError as error:
        raise UsageError(f"{label}: {path} cannot be read: {error.strerror}; name a readable file") from None
    try:
        module = _run_file(file)
    except Exception as error:
        said = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(
            f"{label}: {find_line(error, source)}{type(error).__name__}: {said}; correct the file"
        ) from None
    return NamedCode(module, getattr(module, name, None), hashlib.sha256(data).hexdigest())


def find_line(error: Exception, source: str) -> str:
    """Return the last place in the file of `source` that an error came from, as "FILE.py:LINE: "; else nothing."""
    path = source.rpartition(":")[0]
    file = str(Path(path).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}: " if lines else ""


@functools.cache
def _read_file(file: Path) -> bytes:
    return file.read_bytes()


@functools.cache
def _run_file(file: Path) -> types.ModuleType:
    """Run a file as a module of its own."""
    module = types.ModuleType(f"{file.stem}_of_{hashlib.sha256(bytes(file)).hexdigest()[:16]}")
    module.__file__ = str(file)
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    exec(compile(_read_file(file), file, "exec"), vars(module))
    return module
