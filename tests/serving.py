"""A `megatron-rl serve` in a process of its own, and requests to it."""

import contextlib
import dataclasses
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.ranks import ROOT

_SERVING = re.compile(
    r"serving (?P<name>.+), with the fingerprint (?P<fingerprint>\w+), as the model policy\n"
    r"export OPENAI_BASE_URL=(?P<url>\S+) OPENAI_API_KEY=(?P<key>\S+)\n"
)


@dataclasses.dataclass(frozen=True)
class Serving:
    """The command, and what it has printed."""

    process: subprocess.Popen[str]
    printed: str
    name: str
    fingerprint: str
    url: str
    key: str

    def ask(self, path: str, body: Any = None, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data, headers), timeout=120) as answer:
            return json.load(answer)


@contextlib.contextmanager
def serving(folder: Path, *words: str) -> Iterator[Serving]:
    """Serve what is in a folder, on a free port, until the context ends; then SIGTERM must end it."""
    command = [sys.executable, "-m", "megatron_rl.cli", "serve", str(folder), "--port", "0", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            printed = ""
            while (match := _SERVING.search(printed)) is None:
                line = process.stdout.readline()
                assert line, f"megatron-rl serve has ended\n{printed}"
                printed += line
            yield Serving(process, printed, **match.groupdict())
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, printed + process.stdout.read()
        finally:
            process.kill()
