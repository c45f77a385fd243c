"""Stand-ins for the servers of many engines in one process: each has a socket of its own, and answers at once."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.vllm import routes
from megatron_rl.sidecar.vllm.routes import Commit, GroupAnswer, GroupCall, GroupChoice, GroupSpan
from tests.sidecar import standin_vllm

FACTS: dict[str, Any] = standin_vllm.FACTS
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


class _Server:
    """One engine's server."""

    def __init__(self, group_size: int, num_tokens: int) -> None:
        draw = np.random.default_rng(0)
        self._tokens = wire.encode_tokens(draw.integers(0, FACTS["vocab_size"], num_tokens))
        self._log_probs = wire.encode_log_probs(-4 * draw.random(num_tokens, dtype=np.float32))
        self._group_size, self._num_tokens = group_size, num_tokens
        self._tag = self._held = ""
        self._num_answers = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            # The client has given up.
            writer.close()
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields.get(b"content-length", 0)))
        answer = self._answer(head.split(b" ", 2)[1].decode(), body)
        writer.write(_HEAD % len(answer) + answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    def _answer(self, path: str, body: bytes) -> bytes:
        self._num_answers += 1
        if path == "/metrics":
            return b"vllm:steps %d\n" % self._num_answers
        if path == routes.COMMIT:
            self._tag = msgspec.json.decode(body, type=Commit).tag
            return b""
        if path == routes.HELD:
            return msgspec.msgpack.encode(Commit(self._tag))
        if path == routes.GENERATE:
            return msgspec.msgpack.encode(self._sample(msgspec.msgpack.decode(body, type=GroupCall)))
        if path.startswith("/reset_prefix_cache"):
            return b'{"success": true}'
        if path != "/collective_rpc":
            return b""
        call = json.loads(body)
        if call["method"] == "megatron_rl_load":
            self._held = call["args"][1]
        return json.dumps({"results": [{**FACTS, "pid": 1, "fingerprint": self._held}]}).encode()

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


def serve_engines(sockets: Sequence[Path], group_size: int, num_tokens: int) -> None:
    """Serve an engine at each socket, until the process is ended."""
    asyncio.run(_serve(sockets, group_size, num_tokens))


async def _serve(sockets: Sequence[Path], group_size: int, num_tokens: int) -> None:
    for socket in sockets:
        await asyncio.start_unix_server(_Server(group_size, num_tokens).handle, str(socket), backlog=1024)
    await asyncio.Event().wait()
