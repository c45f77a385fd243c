"""A stand-in for SandboxFusion's service: it runs a program in a folder of its own, without any confinement."""

import base64
import contextlib
import http.server
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path


class _Runner(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with tempfile.TemporaryDirectory() as folder:
            for name, content in asked["files"].items():
                (Path(folder) / name).write_bytes(base64.b64decode(content))
            ended = subprocess.run(
                [sys.executable, "-c", asked["code"]],
                cwd=folder, capture_output=True, text=True, timeout=asked["run_timeout"], check=False,
            )  # fmt: skip
        status = "Success" if ended.returncode == 0 else "Failed"
        body = json.dumps({"status": status, "run_result": {"stdout": ended.stdout, "stderr": ended.stderr}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Run the stand-in; yield its URL."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Runner) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/run_code"
        finally:
            server.shutdown()
            thread.join()
