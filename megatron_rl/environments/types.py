"""The flags of environments and agents, and what an environment's processes say about it."""

import dataclasses
import os
from pathlib import Path

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.errors import UsageError
from megatron_rl.flag import names_function
from megatron_rl.rewards.spec import parse_on_error, read_source
from megatron_rl.tool_calls import JSON

FLAG = "--rollout-env"
AGENT_FLAG = "--rollout-agent"
AGENT_PYTHON_FLAG = "--rollout-agent-python"
VERIFIERS_FLAG = "--rollout-verifiers"
# The component of a response's reward that its environment gives.
COMPONENT = "environment"
AGENT_COMPONENT = "agent"
ON_ERROR_FLAG = "--rollout-env-on-error"
NUM_REFILLS = 3


@dataclasses.dataclass(frozen=True)
class Description:
    """The parts of a class of environments."""

    name: str
    has_reward: bool
    """True if it gives rewards itself."""
    has_step: bool = True
    """True if it answers text."""
    tools: tuple[JSON, ...] = ()
    """The schemas of its methods that the policy may call."""


def parse_source(text: str, flag: str) -> tuple[Path, str]:
    """Parse FILE.py:CLASS, or the FILE.py:FUNCTION of an agent."""
    if not names_function(text):
        what, form = ("a class of environments", "CLASS") if flag == FLAG else ("an agent", "FUNCTION")
        raise UsageError(f"{flag} {text} must name {what}: write {flag} FILE.py:{form}")
    file, _, name = text.rpartition(":")
    return Path(file).resolve(), name


@dataclasses.dataclass(frozen=True)
class OnError:
    """The treatment of a response whose environment or agent failed; without a reward it is not scored."""

    stops: bool = False
    reward: float | None = None
    num_refills: int = 0
    """Number of times that it is sampled again first."""


def parse_env_on_error(text: str) -> OnError:
    if text in ("exclude", "refill"):
        return OnError(num_refills=NUM_REFILLS if text == "refill" else 0)
    try:
        reward = parse_on_error(text)
    except UsageError:
        raise UsageError(f"{ON_ERROR_FLAG} {text} must be exclude, refill, stop or a finite number") from None
    return OnError(stops=reward is None, reward=reward)


def find_flag_problems(config: EnvironmentConfig) -> list[str]:
    found: list[str] = []
    for source, flag in ((config.source, FLAG), (config.agent, AGENT_FLAG)):
        try:
            if source is not None:
                read_source(flag, parse_source(source, flag)[0])
        except UsageError as error:
            found += error.problems
    named = {FLAG: config.source, AGENT_FLAG: config.agent, VERIFIERS_FLAG: config.verifiers}
    if len(given := [flag for flag, value in named.items() if value is not None]) > 1:
        found.append(f"{' and '.join(given)} each say who writes between the policy's turns: write one of them")
    python = config.agent_python
    if python is not None and config.agent is None:
        found.append(f"{AGENT_PYTHON_FLAG} {python} is for {AGENT_FLAG}: add it, or drop this flag")
    elif python is not None and (not python.is_file() or not os.access(python, os.X_OK)):
        found.append(f"{AGENT_PYTHON_FLAG} {python} must be a program: name the bin/python of the agent's environment")
    try:
        parse_env_on_error(config.on_error)
    except UsageError as error:
        found += error.problems
    return found
