"""The Python that workers run in: this process's, or that of an environment which need not have this package."""

import dataclasses
import json
import subprocess
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.rewards.confinement import find_python_path

_OLDEST = (3, 11)
_DESCRIBE = "import json, sys; print(json.dumps([sys.version_info[:2], sys.prefix, sys.base_prefix, sys.path]))"
_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python."""

    python: Path | None
    """None for this process's."""
    path: list[str]
    """The folders in which it finds modules besides its own."""
    readable: tuple[Path, ...] = ()
    """The files and folders that it needs."""

    @classmethod
    def find_own(cls) -> "Interpreter":
        """Return this process's Python."""
        return cls(None, find_python_path())

    @classmethod
    def ask(cls, python: Path, flag: str) -> "Interpreter":
        """Ask another Python where it finds modules; raise a UsageError if it cannot be used."""
        # A link is not followed: it is what tells Python its environment.
        python = python.absolute()
        try:
            asked = subprocess.run(
                [python, "-c", _DESCRIBE], env={}, cwd="/", capture_output=True, check=True, timeout=_SECONDS
            )
            version, *prefixes, path = json.loads(asked.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise UsageError(f"{flag} {python} cannot be run as Python: {error}; name a bin/python") from None
        if tuple(version) < _OLDEST:
            oldest, found = (".".join(map(str, one)) for one in (_OLDEST, version))
            raise UsageError(f"{flag} {python} is Python {found}, and must be {oldest} or later")
        return cls(python, [], tuple(Path(place) for place in [*prefixes, *path] if Path(place).is_absolute()))
