"""Hosts that an engine spans: it has a part on every one of them (`vllm/parts.py`).

Invariants:

- the engine is lost with any of its parts or hosts, and its fault names the host. Then the other parts are ended
  with it, and all start again;
- a version has reached the engine once it has arrived on every host; each worker loads it from its own host's folder.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar.engines import EngineRefused, WeightsNotWritten, WeightsPlace
from megatron_rl.sidecar.hosts.remote import RemoteHandle, RemoteHost


class SpannedHosts:
    """Several hosts as one. Satisfies `sidecar.engines.EngineHost`; the first one has the engines' servers."""

    def __init__(self, hosts: Sequence[RemoteHost]) -> None:
        self._hosts = tuple(hosts)

    async def answers(self) -> bool:
        return all(await asyncio.gather(*(host.answers() for host in self._hosts)))

    async def until_back(self) -> None:
        await asyncio.gather(*(host.until_back() for host in self._hosts))

    def connect(self, address: str, is_ours: bool = True) -> httpx.AsyncBaseTransport:
        return self._hosts[0].connect(address, is_ours)

    async def is_given(self, weights: Weights) -> bool:
        return all(await asyncio.gather(*(host.is_given(weights) for host in self._hosts)))

    async def has_copy(self, weights: Weights) -> bool:
        return all(await asyncio.gather(*(host.has_copy(weights) for host in self._hosts)))

    async def find_weights(self, weights: Weights) -> tuple[WeightsPlace, ...]:
        found = await asyncio.gather(*(host.find_weights(weights) for host in self._hosts))
        return tuple(place for places in found for place in places)

    def explain_not_written(self, weights: Weights, error: WeightsNotWritten) -> EngineRefused:
        left_out = [host for host in self._hosts if host.left_out[0] == weights.version]
        return (left_out or self._hosts)[0].explain_not_written(weights, error)

    def is_being_written(self, weights: Weights) -> bool:
        return any(host.is_being_written(weights) for host in self._hosts)


class HandleOfParts:
    """The processes of all parts of an engine. Satisfies `sidecar.launcher.Handle`."""

    def __init__(self, parts: Sequence[RemoteHandle]) -> None:
        """Make a handle; the first part has the server."""
        self._parts = tuple(parts)
        self.address = parts[0].address

    @property
    def log(self) -> Path:
        return self._find_first_lost().log

    def poll(self) -> str | None:
        return next(filter(None, (part.poll() for part in self._parts)), None)

    def need(self, pids: Sequence[int]) -> None:
        # A number means another process on each host, and each has as many workers.
        share = len(pids) // len(self._parts)
        for number, part in enumerate(self._parts):
            part.need(pids[number * share : (number + 1) * share])

    def find_fault(self) -> str | None:
        for part in self._parts:
            if fault := part.find_fault():
                return f"its part on host {part.host_name}: {fault}"
        return None

    def kill(self) -> None:
        with ThreadPoolExecutor(len(self._parts)) as threads:
            list(threads.map(RemoteHandle.kill, self._parts))

    def log_lines(self) -> list[str]:
        return self._find_first_lost().log_lines()

    def _find_first_lost(self) -> RemoteHandle:
        """Return the part that explains the engine's end; that of the server while all run."""
        return next((part for part in self._parts if part.find_fault()), self._parts[0])
