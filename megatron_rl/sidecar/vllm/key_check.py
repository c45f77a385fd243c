"""The key of a vLLM server that is open to clients: vLLM asks for it on some of its routes alone.

Only the standard library is imported.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

_OPEN = "/health"
_Call = Callable[..., Awaitable[Any]]


class KeyCheck:
    """Refuses every request without the key of VLLM_API_KEY, except for those that ask whether the server is up."""

    def __init__(self, app: _Call) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: _Call, send: _Call) -> None:
        sent = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope.get("path") == _OPEN or hmac.compare_digest(sent, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "the key is missing or wrong"}}'})
        else:
            await send({"type": "websocket.close", "code": 1008})
