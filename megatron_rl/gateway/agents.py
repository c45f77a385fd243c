"""Agents that are functions of a person's own, run in confined processes as environments are."""

from collections.abc import Mapping

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.environments.process import EnvironmentWorker
from megatron_rl.environments.types import AGENT_FLAG, EnvironmentFailed, EnvironmentSpec, WorkerEnded
from megatron_rl.gateway.visits import AgentFailed, Visit
from megatron_rl.rewards.types import PoolSettings


class AgentWorker(EnvironmentWorker):
    """A worker that runs agents."""

    MODULE = "megatron_rl.gateway.worker"


class AgentPool(EnvironmentPool):
    """A pool of workers that run agents."""

    WORKER = AgentWorker
    # An agent that is called off has this long to end: its calls of the gateway are refused.
    CLOSE_SECONDS = 5.0


class FunctionAgents:
    """Agents that are calls of one function. Satisfies `megatron_rl.gateway.visits.Agents`."""

    def __init__(self, config: EnvironmentConfig, settings: PoolSettings, port: int) -> None:
        """Make it; `port` is the gateway's."""
        spec = EnvironmentSpec.parse(config.agent or "", AGENT_FLAG)
        self._pool = AgentPool(config, settings, spec, (port,) if config.agent_network == "gateway" else ())
        self._timeout = config.agent_timeout
        # The rollouts that ran in a process that ended: each runs alone from then on.
        self._suspects: set[int] = set()

    @property
    def identity(self) -> str:
        """Everything that is known to decide what agents do."""
        return self._pool.identity

    async def start(self) -> None:
        await self._pool.start()

    async def act(self, visit: Visit) -> Mapping[str, float]:
        is_alone = visit.seed in self._suspects
        self._suspects.discard(visit.seed)
        address = {"base_url": visit.address, "api_key": visit.key, "model": visit.model}
        try:
            async with self._pool.hold(visit.row, visit.seed, is_alone) as conversation:
                rewards: dict[str, float] = await conversation.call("act", self._timeout, **address)
                return rewards
        except WorkerEnded as ended:
            if not is_alone:
                self._suspects.add(visit.seed)
            raise AgentFailed(str(ended), is_to_be_repeated=not is_alone) from None
        except EnvironmentFailed as failure:
            raise AgentFailed(str(failure)) from None

    async def close(self) -> None:
        await self._pool.close()
