"""The gateway: the open rollouts, each with a key of its own."""

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from megatron_rl.gateway.chats import Chats
from megatron_rl.gateway.open_rollout import CallCounters, OpenRollout, Sample, Terms
from megatron_rl.gateway.said import CallRefused
from megatron_rl.tool_calls.reading import Reader


class Gateway:
    """The open rollouts, by key."""

    def __init__(self, chats: Chats, reader: Reader, reads_tools: bool) -> None:
        """Make it; `reads_tools` says that the reader finds calls of tools."""
        self.counters = CallCounters()
        self.address = ""
        """The base URL, once the gateway serves."""
        self._chats = chats
        self._reader = reader
        self._reads_tools = reads_tools
        # One thread: chats are tokenized one at a time, in the order of their calls.
        self._writer = ThreadPoolExecutor(1, "chats")
        self._rollouts: dict[str, OpenRollout] = {}
        # All keys of this gateway begin with it, so that late calls can be told from foreign ones.
        self._mark = f"mrl-{secrets.token_hex(4)}-"

    @contextlib.contextmanager
    def open(self, terms: Terms, sample: Sample) -> Iterator[tuple[str, OpenRollout]]:
        """Open a rollout, and return its key; it ends with the context."""
        key = self._mark + secrets.token_hex(24)
        rollout = self._rollouts[key] = self._build(terms, sample)
        try:
            yield key, rollout
        finally:
            del self._rollouts[key]
            rollout.end()

    def _build(self, terms: Terms, sample: Sample) -> OpenRollout:
        return OpenRollout(terms, sample, self._chats, self._reader, self.counters, self._reads_tools, self._writer)

    def has_given(self, key: str) -> bool:
        """Check whether this gateway has given the key, to a rollout that is open or has ended."""
        return key.startswith(self._mark)

    def find(self, key: str) -> OpenRollout:
        """Return the open rollout with this key; raise CallRefused if there is none."""
        rollout = self._rollouts.get(key)
        if rollout is not None and not rollout.ended.is_set():
            return rollout
        if rollout is not None or self.has_given(key):
            raise CallRefused("the rollout of this key has ended: a key is good for one rollout", 401, "ended")
        raise CallRefused(
            "the key is missing or unknown: an agent is given one for each rollout, as api_key", 401, "invalid_api_key"
        )

    def status(self) -> dict[str, int]:
        """Return the counters, by the names that metrics have."""
        counters = self.counters
        return {
            "gateway_rollouts": len(self._rollouts),
            "gateway_calls": counters.calls,
            "gateway_branches": counters.branches,
            "gateway_refused": counters.refused,
        }
