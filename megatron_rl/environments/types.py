"""An environment as its flag names it, and what its processes say about it."""

import dataclasses
from pathlib import Path

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.flag import names_function
from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.rewards.spec import parse_on_error

FLAG = "--rollout-env"
# The component of a response's reward that its environment gives.
COMPONENT = "environment"
ON_ERROR_FLAG = "--rollout-env-on-error"


class EnvironmentFailed(MegatronRLError):
    """The failure of an environment: it raised, was silent for too long, or said too much."""


class TooSlow(EnvironmentFailed):
    """An environment that does not answer a call in time."""


class WorkerEnded(EnvironmentFailed):
    """The end of the process that held an environment, with all others in it."""

    def __init__(self, reason: str, had_call: bool) -> None:
        super().__init__(reason)
        self.had_call = had_call
        """True if the conversation had a call then, which may be the cause."""


@dataclasses.dataclass(frozen=True)
class Description:
    """The parts of a class of environments."""

    name: str
    has_reward: bool
    """True if it gives rewards itself."""


@dataclasses.dataclass(frozen=True)
class EnvironmentSpec:
    """The class of environments: a file, and the class or function in it that makes one."""

    file: Path
    name: str

    @classmethod
    def parse(cls, text: str) -> "EnvironmentSpec":
        """Parse FILE.py:CLASS."""
        if not names_function(text):
            raise UsageError(f"{FLAG} {text} must name a class of environments: write {FLAG} FILE.py:CLASS")
        file, _, name = text.rpartition(":")
        return cls(Path(file).resolve(), name)

    def read(self) -> str:
        """Read the file."""
        try:
            return self.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{FLAG} {self.file} cannot be read: {error}; name a readable file") from None


def find_flag_problems(config: EnvironmentConfig) -> list[str]:
    """Find the mistakes in the flags of environments."""
    found: list[str] = []
    if config.source is not None:
        try:
            EnvironmentSpec.parse(config.source).read()
        except UsageError as error:
            found += error.problems
    try:
        parse_on_error(config.on_error, ON_ERROR_FLAG)
    except UsageError as error:
        found += error.problems
    return found
