"""A real environment server of verifiers, in its own Python, with the environment of `guessing`."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.sidecar.temporary import make_socket_folder

_PYTHON = os.environ.get("VERIFIERS_PYTHON")
_SERVE = """
import sys
from verifiers.v1.serve import serve_env

agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
serve_env(max_workers=1, address=sys.argv[1], config_data={"taskset": {"id": "guessing"}, "agent": agent})
"""
needs_verifiers = pytest.mark.skipif(
    _PYTHON is None, reason="verifiers has an environment of its own: make test-verifiers"
)


@contextlib.contextmanager
def serve_guessing() -> Iterator[str]:
    """Serve the environment at a unix socket; yield its address."""
    address = f"ipc://{make_socket_folder() / 'server'}"
    assert _PYTHON is not None
    # Agents start programs with uv, which is beside the Python.
    path = f"{Path(_PYTHON).absolute().parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parent)}
    server = subprocess.Popen([_PYTHON, "-c", _SERVE, address], env=environment)
    try:
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            # It ends its rollouts first, which may hang. No test is about that.
            server.kill()
            server.wait()
