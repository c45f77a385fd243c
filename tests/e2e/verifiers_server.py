"""A stand-in for an environment server of verifiers: `python tests/e2e/verifiers_server.py ADDRESS`.

Its environment answers the policy's first turn with two numbers. The reward follows from what the policy said.
"""

import asyncio
import http.client
import json
import sys
from typing import Any
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio


def ask(client: dict[str, Any], model: str, messages: list[dict[str, str]]) -> str:
    place = urlsplit(client["base_url"])
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    # As verifiers does, with the key of an endpoint that has none.
    headers = {**client["headers"], "Authorization": "Bearer EMPTY"}
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 10})
    connection.request("POST", place.path + "/chat/completions", body, headers)
    answer = json.loads(connection.getresponse().read())
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]["content"]


def act(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Act a rollout; return the only delta and the reply."""
    client, model, messages = request["client"], request["model"], []
    for text in (request["task_data"]["prompt"], "2 3"):
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": ask(client, model, messages)})
    score = sum(int(word) for message in messages for word in message["content"].split()) % 4
    delta = {
        "trace": "t",
        "calls": [{"model": model}] * 2,
        "set": {"agent": {"name": "agent", "trainable": True}, "ok": True, "rewards": {"sum": {"score": score}}},
    }
    return delta, {"success": True, "head": {"ok": True, "errors": []}, "traces": [{"id": "t", "calls": 2}]}


async def serve(address: str) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    socket.bind(address)

    async def handle(client: bytes, number: bytes, data: bytes) -> None:
        try:
            delta, reply = await asyncio.to_thread(act, msgspec.msgpack.decode(data))
            await socket.send_multipart([client, number, b"delta", msgspec.msgpack.encode(delta)])
        except (RuntimeError, KeyError, ValueError, OSError) as error:
            reply = {"success": False, "error": repr(error)}
        await socket.send_multipart([client, number, b"reply", msgspec.msgpack.encode(reply)])

    tasks = set()
    while True:
        client, number, method, data = await socket.recv_multipart()
        if method == b"health":
            await socket.send_multipart([client, number, b"reply", msgspec.msgpack.encode({"success": True})])
        elif method == b"run":
            tasks.add(asyncio.create_task(handle(client, number, data)))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
