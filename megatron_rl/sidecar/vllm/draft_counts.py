"""Counts of an engine's drafts, from vLLM's metrics, and the model that drafts."""

import logging
import re
from typing import Any

from megatron_rl.shared.protocol.wire import Drafts
from megatron_rl.sidecar.vllm.connection import Connection

_log = logging.getLogger(__name__)


def count_drafts(metrics: str) -> Drafts:
    """Count the drafts of an engine since its start."""
    count, drafted, accepted = (
        sum(int(float(count)) for count in re.findall(rf"^vllm:spec_decode_num_{name}_total\b.* (\S+)$", metrics, re.M))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return Drafts(count=count, drafted=drafted, accepted=accepted)


class DraftMeter:
    """Counts the drafts of the engine `name` for each version."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection
        self._before = Drafts()
        """The counts when the last version ended."""

    async def count(self) -> Drafts | None:
        """Count the drafts since the last version ended; None if the engine does not answer."""
        metrics = await self._connection.read_metrics()
        return None if metrics is None else count_drafts(metrics) - self._before

    async def end_version(self, version: int) -> None:
        """Log how many drafted tokens were accepted with this version, and begin to count those of the next one."""
        since = await self.count()
        if since is not None and since.drafted:
            self._before += since
            _log.info(
                "engine %s: %d of %d drafted tokens were accepted (%.0f %%), with version %d",
                self._name, since.accepted, since.drafted, 100 * since.accepted / since.drafted, version,
            )  # fmt: skip


def describe_draft_model(runner: Any) -> dict[str, Any] | None:
    """Describe the model that drafts in a worker, by its parameters; None if there is none, or vLLM hides it.

    A publish writes the policy's parameters. A draft that shares some of them follows the policy there.
    """
    find = getattr(runner, "get_draft_model", None)
    model = None if find is None else find()
    if model is None:
        return None
    own = {id(parameter) for parameter in runner.get_model().parameters()}
    shared = [name for name, parameter in model.named_parameters() if id(parameter) in own]
    return {"num_parameters": sum(1 for _ in model.parameters()), "shared": shared}
