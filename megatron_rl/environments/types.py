"""An environment as its flag names it, and what its processes say about it."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.flag import names_function
from megatron_rl.errors import MegatronRLError, UsageError

FLAG = "--rollout-env"
# The component of a response's reward that its environment gives.
COMPONENT = "environment"

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


class EnvironmentFailed(MegatronRLError):
    """The failure of an environment: it raised, was silent for too long, or said too much."""


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
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of its tools, as chat templates take them."""
    has_step: bool = False
    """Whether it answers completions: then it has a method `step`, and no tool."""
    has_reward: bool = False


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


def parse_on_error(text: str) -> float | None:
    """Parse --rollout-env-on-error: return None for "stop", else the reward of a response whose environment failed."""
    if text == "stop":
        return None
    if not re.fullmatch(_NUMBER, text) or abs(float(text)) == float("inf"):
        raise UsageError(f"--rollout-env-on-error {text} must be stop or a finite number")
    return float(text)


def find_flag_problems(config: EnvironmentConfig) -> list[str]:
    """Find the mistakes in the flags of environments."""
    found: list[str] = []
    if config.source is not None:
        try:
            EnvironmentSpec.parse(config.source).read()
        except UsageError as error:
            found += error.problems
    try:
        parse_on_error(config.on_error)
    except UsageError as error:
        found += error.problems
    return found
