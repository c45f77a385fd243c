"""The token that every request must carry, except those for the health of a process."""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = "/health"


class Guard:
    """Checks the token of every request before its body is read. A plain ASGI layer, because every slot passes it."""

    def __init__(self, app: ASGIApp, token: str):
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "the token is missing or wrong"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
