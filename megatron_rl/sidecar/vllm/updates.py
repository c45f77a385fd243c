"""The check, at an engine's start, that its weights can be replaced: copied in place if that is right, or by vLLM.

The workers learn the order of their parameters, by loading other numbers, and then load the engine's own checkpoint.
Now the log-probs of the probe must be as before. If they are not and weights were copied in place, vLLM loads the
checkpoint: log-probs that differ from the copy's show that a layer keeps something which follows from its weights. Then
vLLM loads all weights of this engine.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from megatron_rl.sidecar.engines import EngineRefused, ProbeReport, WrongWeights
from megatron_rl.sidecar.vllm.connection import Answer, Connection
from megatron_rl.sidecar.vllm.patches import NOT_APPLIED
from megatron_rl.sidecar.vllm.routes import PAUSE

_log = logging.getLogger(__name__)

# Prefixes that a connector of vLLM's stores outside the engine belong to the old weights too.
RESET = "/reset_prefix_cache?reset_external=true"

# The most that log-probs of the same weights and kernels may differ: some devices do not add in a fixed order.
_RELOAD_TOLERANCES = {"float32": 1e-4}
_RELOAD_TOLERANCE = 5e-2

BY_VLLM = "vLLM loads weights, since they cannot be copied in place"
FROM_FILES = "it reads weights from files, since it cannot copy them from the trainer's devices"

CallWorkers = Callable[..., Awaitable[list[Answer]]]
"""A function that calls a method in all workers, given the step, the method and its arguments."""
Probe = Callable[[Sequence[int]], Awaitable[ProbeReport]]


class Updates:
    """The ways in which the weights of one engine can be replaced."""

    def __init__(
        self, name: str, facts: Mapping[str, Any], connection: Connection, workers: CallWorkers, probe: Probe
    ) -> None:
        self._name = name
        self._facts = facts
        self._connection = connection
        self._workers = workers
        self._probe = probe
        self._told: set[str] = set()
        """The reasons, already logged, why weights are not copied in place, or not from the trainer's devices."""

    async def check(self, is_started_here: bool) -> None:
        """Refuse a vLLM that loads this model in place differently than at its start: its weights would be wrong.

        Later checks would not notice: the engines receive the announced weights, and all are wrong in the same way.
        An engine that was not started here may hold any weights. On it only copies in place can be tried.
        """
        patched, version = self._facts["moe_patch"], self._facts["vllm"]
        if not is_started_here and patched.startswith(NOT_APPLIED):
            raise EngineRefused(
                f"engine {self._name}: vLLM {version} may not update experts in place on a CPU "
                f"({patched}): let the sidecar start the engine, which tries it"
            )
        before = (await self._probe(())).log_probs if is_started_here else None
        await self._learn_order()
        obstacles = await self._reload()
        if obstacles is None:
            if before is not None:
                _log.warning(
                    "engine %s: updates in place cannot be tried, its checkpoint has no safetensors", self._name
                )
            return
        if before is None and obstacles:
            return
        try:
            after = await self._probe_again()
        except WrongWeights:
            if obstacles:
                raise
            after = []
        if not obstacles and (before is None or not self._are_close(before, after)):
            after = await self._try_without_copies(after)
        if before is not None and not self._are_close(before, after):
            raise EngineRefused(
                f"engine {self._name}: once other numbers and then its own checkpoint were loaded in place, the "
                f"log-probs of the probe differ by more than {self._reload_tolerance:g}: vLLM {version} "
                f"cannot update this model here (experts: {patched})"
            )

    async def _try_without_copies(self, copied: Sequence[float]) -> list[float]:
        """Have vLLM load the checkpoint; if this gives other log-probs of the probe, let it load all later weights too.

        Before the copy in place, the model held other numbers. A layer may have kept something that follows from those.
        """
        await self._connection.send("reload", PAUSE)
        await self._reload(by="vllm")
        loaded = await self._probe_again()
        if not self._are_close(copied, loaded):
            reason = "after a copy, the log-probs of the probe are others than after vLLM's reload"
            await self._workers("reload", "megatron_rl_leave_loads_to_vllm", reason)
            self._tell_once([reason])
        return loaded

    async def _probe_again(self) -> list[float]:
        """Return the log-probs of the probe after other weights were loaded."""
        await self._connection.post("reload", RESET)
        return (await self._probe(())).log_probs

    def _are_close(self, some: Sequence[float], others: Sequence[float]) -> bool:
        """Check whether two probes agree, as those of equal weights do."""
        # Written so that NaN never matches.
        return len(some) == len(others) and all(
            abs(a - b) <= self._reload_tolerance for a, b in zip(some, others, strict=True)
        )

    @property
    def _reload_tolerance(self) -> float:
        return _RELOAD_TOLERANCES.get(self._facts["dtype"], _RELOAD_TOLERANCE)

    def tell(self, answers: Sequence[Answer], key: str = "obstacles", what: str = BY_VLLM) -> list[str]:
        """Log once each of the workers' reasons why weights take another way; return all reasons."""
        reasons = list(dict.fromkeys(reason for answer in answers for reason in answer[key]))
        self._tell_once(reasons, what)
        return reasons

    def _tell_once(self, reasons: Sequence[str], what: str = BY_VLLM) -> None:
        for reason in reasons:
            if reason not in self._told:
                self._told.add(reason)
                _log.info("engine %s: %s: %s", self._name, what, reason)

    async def _learn_order(self) -> None:
        """Have the workers learn the places of tensors in their parameters; they hold no real weights afterwards."""
        await self._connection.send("learn", PAUSE)
        answers = await self._workers("learn", "megatron_rl_learn_order")
        if any(answer["obstacles"] for answer in answers):
            # All workers of an engine load in the same way.
            await self._workers("learn", "megatron_rl_leave_loads_to_vllm", "; ".join(self.tell(answers)))
        unknown = sorted({name for answer in answers for name in answer["unknown"] or ()})
        if any(answer["unknown"] is None for answer in answers):
            _log.warning(
                "engine %s: the order of its parameters cannot be learned, its checkpoint has no safetensors",
                self._name,
            )
        elif unknown:
            names = ", ".join(unknown[:5])
            _log.warning("engine %s: %d parameters cannot be compared bit for bit: %s", self._name, len(unknown), names)

    async def _reload(self, by: Literal["", "vllm"] = "") -> list[str] | None:
        """Load the engine's own checkpoint; return why it was not copied in place, or None if it cannot be loaded."""
        answers = await self._workers("reload", "megatron_rl_reload_checkpoint", by)
        obstacles = self.tell(answers)
        return obstacles if all(answer["reloaded"] for answer in answers) else None
