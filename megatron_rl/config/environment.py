"""The settings of environments and agents. As in `trainer`."""

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_rl.flag import own_flag


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Environments that the policy acts in, turn after turn, and the processes that run them."""

    source: str | None = own_flag(
        None,
        "A class of environments, FILE.py:CLASS: each response is a conversation with one of them.",
        "--rollout-env",
    )
    max_turns: int = own_flag(
        8, "The most turns of the policy in a response.", "--rollout-env-max-turns", bound="at least 1"
    )
    timeout: float = own_flag(
        30.0,
        "Seconds that a call of an environment may take.",
        "--rollout-env-timeout",
        bound="a finite duration above 0",
    )
    on_error: str = own_flag(
        "exclude",
        "The treatment of responses whose environment or agent fails. `exclude` leaves them out of their groups and of "
        "training, `refill` first samples them again, up to 3 times. `stop` ends the run; a number is their reward.",
        "--rollout-env-on-error",
    )
    workers: int = own_flag(2, "Processes that run environments.", "--rollout-env-workers", bound="at least 1")
    concurrency: int = own_flag(256, "The most conversations at once.", "--rollout-env-concurrency", bound="at least 1")
    agent: str | None = own_flag(
        None,
        "An agent, FILE.py:FUNCTION: each response is what it had the policy say through the gateway. The flags "
        "--rollout-env-max-turns, -on-error, -workers and -concurrency hold for agents too.",
        "--rollout-agent",
    )
    agent_timeout: float = own_flag(
        600.0,
        "Seconds of its own that an agent may use for a response; waiting for the policy does not count.",
        "--rollout-agent-timeout",
        bound="a finite duration above 0",
    )
    agent_network: Literal["gateway", "any"] = own_flag(
        "gateway",
        "The network of agents: TCP connections to the gateway's port alone, or any.",
        "--rollout-agent-network",
    )
    agent_python: Path | None = own_flag(
        None,
        "The Python of the environment that agents run in, 3.11 or later; this environment's if not given.",
        "--rollout-agent-python",
    )
    gateway_listen: str = own_flag(
        "127.0.0.1:0",
        "The address that the gateway for agents listens at, HOST:PORT or [HOST]:PORT; port 0 is a free port.",
        "--rollout-gateway-listen",
    )
    gateway_advises: bool = own_flag(
        False,
        "Take what agents ask for and would change the sampled policy as advice: it is written into the prompt if "
        "words can, and counted where a turn does not follow it. Without this flag such calls are refused.",
        "--rollout-gateway-advise",
    )
    verifiers: str | None = own_flag(
        None,
        "The address of an environment server of verifiers, as tcp://127.0.0.1:5000, which acts as an agent does.",
        "--rollout-verifiers",
    )

    @property
    def has_turns(self) -> bool:
        """True if a response has several turns of the policy, between which an environment or agent writes."""
        return any(one is not None for one in (self.source, self.agent, self.verifiers))
