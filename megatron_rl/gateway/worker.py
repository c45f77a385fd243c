"""A worker of agents: `python -m megatron_rl.gateway.worker PARENT NAMESPACE`; see `environments.worker`.

A conversation is a rollout: "open" has its row and seed, "act" the gateway's address, the key and the model.
"""

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.environments.types import AGENT_COMPONENT
from megatron_rl.environments.worker import Held, choose_arguments, serve_calls, wait_for
from megatron_rl.rewards.worker import run_worker


class Agent:
    """An agent in one rollout, with an event loop of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._row: Mapping[str, Any] = {}
        self._seed = 0

    def call(self, request: Mapping[str, Any]) -> dict[str, float] | None:
        """Take the row, or act and return the rewards."""
        if request["call"] == "open":
            self._row, self._seed = request["row"], request["seed"]
            return None
        given = {name: request[name] for name in ("base_url", "api_key", "model")}
        result = self._function(**{**choose_arguments(self._function, self._row, self._seed), **given})
        return read_rewards(asyncio.run(wait_for(result)) if inspect.isawaitable(result) else result)

    def close(self) -> None:
        """Do nothing: an agent has ended when it returns."""


def read_rewards(result: object) -> dict[str, float]:
    """Read an agent's rewards: a number, numbers by component, or None."""
    if result is None:
        return {}
    rewards = result if isinstance(result, dict) else {AGENT_COMPONENT: result}
    read = {str(name): _read_number(value) for name, value in rewards.items()}
    for name, value in read.items():
        if not math.isfinite(value):
            raise ValueError(f"the reward {name} is {value}, and must be finite")
    return read


def _read_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.100}, and must return a number, numbers by name, or None") from None


def offer_agent(function: Any, has_schemas: bool) -> tuple[dict[str, Any], Callable[[], Held]]:
    """Offer an agent's function, which has no tools; raise a TypeError if it cannot be called as an agent."""
    name = getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    missing = [name for name in ("base_url", "api_key", "model") if name not in parameters]
    if missing and not takes_all:
        raise TypeError(f"an agent has the parameters base_url, api_key and model, and {missing[0]} is missing")
    return {"name": name, "has_reward": True, "has_step": False, "tools": []}, lambda: Agent(function)


if __name__ == "__main__":
    run_worker(sys.argv[1:], functools.partial(serve_calls, offer=offer_agent))
