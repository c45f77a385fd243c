"""The sidecar's own host as a host of engines, and the connections to engines."""

import os
from pathlib import Path

import httpx

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.shared.weights.folders import is_being_written
from megatron_rl.sidecar.engines import EngineRefused, WeightsNotWritten, WeightsPlace

# No connection is kept: the server may close an idle one at the moment of its next use.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
# Servers of our own keep an idle connection for an hour, and it is used again within seconds or not at all. So even one
# that is busy with something else for minutes does not close it at its next use.
_KEEPING = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=2.0)
SERVER_KEEPS_SECONDS = 3600

STEP = "step"
"""The extension of a request that names the step of an engine to which it belongs."""
STEPS = ("health", "prepare", "learn", "reload", "pause", "reach", "load", "commit", "probe")
"""The steps of a start and of a publish, which all engines of a host reach at nearly the same time."""


def reach_socket(path: str, is_ours: bool) -> httpx.AsyncBaseTransport:
    """Make a transport for requests to a unix socket of this host, whose server may have been started elsewhere."""
    # Certificates, which a socket of this host has no use for, take 17 ms to read.
    return httpx.AsyncHTTPTransport(uds=path, limits=_KEEPING if is_ours else LIMITS, verify=False)


class OwnHost:
    async def answers(self) -> bool:
        return True

    async def until_back(self) -> None: ...

    def connect(self, address: str, is_ours: bool = True) -> httpx.AsyncBaseTransport:
        return reach_socket(address, is_ours)

    async def is_given(self, weights: Weights) -> bool:
        return True

    async def has_copy(self, weights: Weights) -> bool:
        return not weights.is_streamed and Path(weights.folder).is_dir()

    async def find_weights(self, weights: Weights) -> tuple[WeightsPlace, ...]:
        return (WeightsPlace(weights.folder, os.getuid()),)

    def explain_not_written(self, weights: Weights, error: WeightsNotWritten) -> EngineRefused:
        return error

    def is_being_written(self, weights: Weights) -> bool:
        return not weights.is_streamed and is_being_written(Path(weights.folder))


OWN_HOST = OwnHost()
