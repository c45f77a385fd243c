"""The gateway: the open rollouts, each with a key of its own."""

import contextlib
import secrets
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.gateway.chats import Chats
from megatron_rl.gateway.open_rollout import CallCounters, OpenRollout, Sample, Terms
from megatron_rl.gateway.processes import (
    CALLERS,
    Address,
    find_owner,
    find_socket,
    find_unknown,
    list_ancestors,
    list_files,
)
from megatron_rl.gateway.said import CallRefused
from megatron_rl.tool_calls import Reader

PROCESS_KEY = "the-rollout-of-the-process-that-calls"
"""The key in the environment in which an agent's file is imported: the process that calls with it tells the rollout."""
# Looks for the process of a call: its ancestors may end, and it may get another parent, meanwhile.
_NUM_LOOKS = 3


class Gateway:
    """The open rollouts, by key.

    The calls of a rollout that has a process are made by this process or its descendants, or on another host.
    """

    def __init__(self, chats: Chats, reader: Reader, reads_tools: bool, advises: bool = False) -> None:
        """Make it; `reads_tools` says that the reader finds calls of tools.

        With `advises`, requests that would change the sampled policy are advice.
        """
        self.advises = advises
        self.counters = CallCounters()
        self.address = ""
        """The base URL, once the gateway serves."""
        self._chats = chats
        self._reader = reader
        self._reads_tools = reads_tools
        # One thread: chats are tokenized one at a time, in the order of their calls.
        self._writer = ThreadPoolExecutor(1, "chats")
        self._rollouts: dict[str, OpenRollout] = {}
        self._calls: dict[str, weakref.WeakSet[OpenRollout]] = {}
        self._knows_callers = CALLERS not in find_unknown()
        # All keys of this gateway begin with it, so that late calls can be told from foreign ones.
        self._mark = f"mrl-{secrets.token_hex(4)}-"

    @contextlib.contextmanager
    def open(self, terms: Terms, sample: Sample) -> Iterator[tuple[str, OpenRollout]]:
        """Open a rollout, and return its key; it ends with the context."""
        key = self._mark + secrets.token_hex(24)
        rollout = self._rollouts[key] = OpenRollout(
            terms, sample, self._chats, self._reader, self.counters, self._reads_tools, self._writer
        )
        try:
            yield key, rollout
        finally:
            del self._rollouts[key]
            rollout.end()

    @contextlib.contextmanager
    def open_for_calls(self, terms: Terms, sample: Sample) -> Iterator[str]:
        """Open a key with which each call is a rollout of its own; unanswered calls end with the context."""
        with self.open(terms, sample) as (key, _):
            self._calls[key] = weakref.WeakSet()
            try:
                yield key
            finally:
                for call in self._calls.pop(key):
                    call.end()

    def has_given(self, key: str) -> bool:
        """Check whether this gateway has given the key, to a rollout that is open or has ended."""
        return key.startswith(self._mark) or key == PROCESS_KEY

    def find(self, key: str, server: Address, client: Address) -> OpenRollout:
        """Return the open rollout with this key, for a call on this connection; raise CallRefused if there is none."""
        rollout = self._rollouts.get(key)
        if key == PROCESS_KEY:
            return self._find_by_process(_find_socket(server, client))
        if rollout is not None and not rollout.ended.is_set():
            self._check_process(rollout, server, client)
            if (calls := self._calls.get(key)) is not None:
                calls.add(rollout := rollout.renew())
            return rollout
        if rollout is not None or self.has_given(key):
            raise CallRefused("the rollout of this key has ended: a key is good for one rollout", 401, "ended")
        raise CallRefused(
            "the key is missing or unknown: an agent is given one for each rollout, as api_key", 401, "invalid_api_key"
        )

    def _check_process(self, rollout: OpenRollout, server: Address, client: Address) -> None:
        """Refuse a call with a rollout's key by another process of this host, and end the rollout."""
        if rollout.process is None or not self._knows_callers:
            return
        inode = _find_socket(server, client)
        if inode is None or (inode and self._find_caller(inode, rollout) is rollout):
            return
        # A process that has ended is its agent's failure, and so is a client that has left.
        if inode and any(list_files(rollout.process)):
            rollout.refuse_process()
        raise CallRefused("the rollout of this key has ended, or the client has left", 401, "ended")

    def _find_by_process(self, inode: int | None) -> OpenRollout:
        if inode and (rollout := self._find_caller(inode)) is not None:
            return rollout
        raise CallRefused(
            "the key of the environment in which an agent's file is imported is good in processes of rollouts alone: "
            "make calls in the function",
            401,
            "invalid_api_key",
        )

    def _find_caller(self, inode: int, expected: OpenRollout | None = None) -> OpenRollout | None:
        """Return the rollout that the process of a socket is in; None if it is in none."""
        rollouts = {one.process: one for one in self._rollouts.values() if one.process and not one.ended.is_set()}
        if (known := next((one for one in rollouts.values() if inode in one.sockets), None)) is not None:
            return known
        # A rollout seldom has more than one connection.
        likely = [expected] if expected else sorted(rollouts.values(), key=lambda one: len(one.sockets))
        for _ in range(_NUM_LOOKS):
            owner = find_owner(inode, [one.process for one in likely if one.process])
            for pid in () if owner is None else list_ancestors(owner):
                if (rollout := rollouts.get(pid)) is not None:
                    rollout.sockets.add(inode)
                    return rollout
        return None

    def status(self) -> dict[str, int]:
        """Return the counters, by the names that metrics have."""
        counters = self.counters
        return {
            "gateway_rollouts": len(self._rollouts),
            "gateway_calls": counters.calls,
            "gateway_branches": counters.branches,
            "gateway_refused": counters.refused,
            "gateway_advice_not_followed": counters.advised.total(),
        }


def _find_socket(server: Address, client: Address) -> int | None:
    """Return the inode of a connection's client; None if it is on another host, or if the kernel does not tell."""
    try:
        return find_socket(server, client)
    except OSError:
        return None
