"""Stand-ins for the servers of many engines in one process, which answer at once.

Each has a socket of its own, or belongs to a stand-in for the agent of a host.
"""

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.agent import messages
from megatron_rl.sidecar.vllm import routes
from megatron_rl.sidecar.vllm.routes import (
    Commit,
    Committed,
    GroupAnswer,
    GroupCall,
    GroupChoice,
    GroupSpan,
    WorkersCall,
)
from tests.sidecar import standin_vllm

FACTS: dict[str, Any] = standin_vllm.FACTS
_STARTED = msgspec.json.encode(messages.Started(log="log"))
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


async def _handle(
    answer: Callable[[str, bytes], bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the one request of a connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        # The client has given up.
        writer.close()
        return
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
    body = await reader.readexactly(int(fields.get(b"content-length", 0)))
    data = answer(head.split(b" ", 2)[1].decode(), body)
    writer.write(_HEAD % len(data) + data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    writer.close()


class _Server:
    """One engine's server."""

    def __init__(self, group_size: int, num_tokens: int) -> None:
        draw = np.random.default_rng(0)
        self._tokens = wire.encode_tokens(draw.integers(0, FACTS["vocab_size"], num_tokens))
        self._log_probs = wire.encode_log_probs(-4 * draw.random(num_tokens, dtype=np.float32))
        self._group_size, self._num_tokens = group_size, num_tokens
        self._tag = self._held = ""
        self._num_answers = 0

    def answer(self, path: str, body: bytes) -> bytes:
        self._num_answers += 1
        if path == "/metrics":
            return b"vllm:steps %d\n" % self._num_answers
        if path == routes.COMMIT:
            self._tag = msgspec.json.decode(body, type=Commit).tag
            return msgspec.msgpack.encode(Committed(self._tag, [{"fingerprint": self._held}], is_reset=True))
        if path == routes.GENERATE:
            return msgspec.msgpack.encode(self._sample(msgspec.msgpack.decode(body, type=GroupCall)))
        if path.startswith("/reset_prefix_cache"):
            return b'{"success": true}'
        if path != routes.WORKERS:
            return b""
        call = msgspec.msgpack.decode(body, type=WorkersCall)
        if call.method == "megatron_rl_load":
            self._held = call.arguments[1]
        return msgspec.msgpack.encode([{**FACTS, "pid": 1, "fingerprint": self._held}])

    def _sample(self, call: GroupCall) -> GroupAnswer:
        prompt = np.frombuffer(call.prompt, dtype="<i4")
        if "prompt_logprobs" in call.sampling:
            token, log_prob = self._tokens[:4], self._log_probs[:4]
            choice = GroupChoice(0, "length", token, token, log_prob, [GroupSpan(self._tag, 0, 1)])
            return GroupAnswer([choice], prompt[1:].tobytes(), np.full(len(prompt) - 1, -1.0, "<f4").tobytes())
        span = [GroupSpan(self._tag, 0, self._num_tokens)]
        return GroupAnswer(
            [
                GroupChoice(index, "length", self._tokens, self._tokens, self._log_probs, span)
                for index in range(self._group_size)
            ]
        )


class _Agent:
    """The agent of a host with engines."""

    def __init__(self, group_size: int, num_tokens: int) -> None:
        self._sizes = group_size, num_tokens
        self._engines: dict[str, _Server] = {}

    def answer(self, path: str, body: bytes) -> bytes:
        if path == messages.REQUESTS_ROUTE:
            requests = msgspec.msgpack.decode(body, type=list[messages.EngineRequest])
            return b"".join(
                messages.pack(messages.EngineAnswer(number=number, status=200, kind="", body=self._ask(request)))
                for number, request in enumerate(requests)
            )
        if path == "/v1/lease":
            return msgspec.json.encode(messages.Welcome(lease="lease", user=os.getuid()))
        if path == "/v1/beat":
            return msgspec.json.encode(messages.Pulse(engines=dict.fromkeys(self._engines, messages.Life())))
        self._find(path.removeprefix("/v1/engines/"))
        return _STARTED

    def _find(self, name: str) -> _Server:
        # An engine is asked whether it is healthy from its start on.
        if name not in self._engines:
            self._engines[name] = _Server(*self._sizes)
        return self._engines[name]

    def _ask(self, request: messages.EngineRequest) -> bytes:
        return self._find(request.engine).answer(request.path, request.body)


def serve_agents(num_agents: int, group_size: int, num_tokens: int, pipe: Pipe) -> None:
    """Serve the agents of some hosts until the process is ended; send their addresses, each HOST:PORT."""
    asyncio.run(_serve_agents(num_agents, group_size, num_tokens, pipe))


async def _serve_agents(num_agents: int, group_size: int, num_tokens: int, pipe: Pipe) -> None:
    addresses = []
    for _ in range(num_agents):
        handle = functools.partial(_handle, _Agent(group_size, num_tokens).answer)
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
        addresses.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    pipe.send(addresses)
    await asyncio.Event().wait()


def serve_engines(sockets: Sequence[Path], group_size: int, num_tokens: int) -> None:
    """Serve an engine at each socket, until the process is ended."""
    asyncio.run(_serve(sockets, group_size, num_tokens))


async def _serve(sockets: Sequence[Path], group_size: int, num_tokens: int) -> None:
    for socket in sockets:
        handle = functools.partial(_handle, _Server(group_size, num_tokens).answer)
        await asyncio.start_unix_server(handle, str(socket), backlog=1024)
    await asyncio.Event().wait()
