"""Serves a report of live runs, on this machine alone, to clients with the token.

The page itself holds no data of the runs. It asks for them with the token, which is in the fragment of the address that
the command prints. Browsers send no fragment to a server, and no command line shows it.
"""

import contextlib
import hmac
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megatron_rl.analysis.report.data import ReportData
from megatron_rl.analysis.report.page import compress, write_json
from megatron_rl.errors import MegatronRLError, UsageError

_HOST = "127.0.0.1"
_SUMMARY, _ROLLOUTS = "/summary", "/rollouts/"


class ReportServer(contextlib.AbstractContextManager["ReportServer"]):
    """Answers until it is closed. On a request, data are read again if a file has changed."""

    def __init__(self, data: ReportData, page: str, port: int = 0) -> None:
        """Open the port; port 0 stands for a free one."""
        self.token = secrets.token_urlsafe(32)
        self._data = data
        self._page = page
        self._reading = threading.Lock()
        self._signature: object = None
        self._tag = ""
        self._summary = b""
        server = self

        class Handler(_Handler):
            report = server

        try:
            self._server = ThreadingHTTPServer((_HOST, port), Handler)
        except OSError as error:
            raise UsageError(
                f"--serve {port} cannot be opened: {error.strerror}; write another port, or none"
            ) from None
        self._server.daemon_threads = True

    def __exit__(self, *_: object) -> None:
        self._server.server_close()

    @property
    def origin(self) -> str:
        return f"http://{_HOST}:{self._server.server_address[1]}"

    @property
    def address(self) -> str:
        return f"{self.origin}/#token={self.token}"

    def serve(self) -> None:
        """Answer until `stop`, or until a signal interrupts it."""
        self._server.serve_forever()

    def stop(self) -> None:
        """End `serve`, which runs in another thread."""
        self._server.shutdown()

    def summary(self) -> tuple[str, bytes]:
        """Return the summary of the runs as they are now, packed, and a tag that changes with it."""
        with self._reading:
            signature = self._data.signature()
            if signature != self._signature:
                self._summary = compress(write_json(self._data.read()))
                # The files may have grown since the signature was taken: then the next request reads them again.
                self._signature = signature
                self._tag = f'"{secrets.token_hex(8)}"'
            return self._tag, self._summary

    def rollouts(self, run: int) -> bytes | None:
        """Return the rollouts of a run, packed; None for a run that is not served."""
        if not 0 <= run < len(self._data):
            return None
        with self._reading:
            return compress(write_json(self._data.read_rollouts(run)))

    @property
    def page(self) -> bytes:
        return compress(self._page)


class _Handler(BaseHTTPRequestHandler):
    """One request. Everything except the page needs the token."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "megatron-rl", ""
    report: ReportServer

    def do_GET(self) -> None:
        # A page under another name that resolves to this address must not read the data.
        if f"http://{self.headers.get('host', '')}" != self.report.origin:
            self._answer_problem(421, f"open {self.report.origin}")
        elif self.path == "/":
            self._answer(200, self.report.page, "text/html; charset=utf-8")
        elif not self._has_token():
            self._answer_problem(401, "the token is missing or wrong")
        else:
            try:
                self._answer_data()
            except MegatronRLError as error:
                self._answer_problem(503, "\n".join(error.problems))

    def _answer_data(self) -> None:
        if self.path == _SUMMARY:
            tag, data = self.report.summary()
            if self.headers.get("if-none-match") == tag:
                self._answer(304, b"", "application/json", tag)
            else:
                self._answer(200, data, "application/json", tag)
            return
        number = self.path.removeprefix(_ROLLOUTS)
        found = None
        if self.path.startswith(_ROLLOUTS) and number.isdecimal():
            found = self.report.rollouts(int(number))
        if found is None:
            self._answer_problem(404, f"{self.path} is not here")
        else:
            self._answer(200, found, "application/json")

    def _has_token(self) -> bool:
        given = self.headers.get("authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, f"Bearer {self.report.token}".encode())

    def _answer_problem(self, status: int, problem: str) -> None:
        self._answer(status, compress(json.dumps({"error": problem})), "application/json")

    def _answer(self, status: int, body: bytes, kind: str, tag: str | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Encoding": "gzip", "Content-Length": str(len(body)),
            "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin", "X-Frame-Options": "DENY",
        }  # fmt: skip
        if status == 304:
            del headers["Content-Encoding"], headers["Content-Length"]
        if tag is not None:
            headers["ETag"] = tag
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing about a request."""
