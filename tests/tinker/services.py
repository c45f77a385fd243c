"""A service of Tinker's interface in processes of its own, with real vLLM, and the cookbook's recipes against it."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.processes import ROOT
from tests.tinker.model import NAME

KEYS = [f"tml-{'a' * 24}", f"tml-{'b' * 24}"]
_READY = re.compile(r"export TINKER_BASE_URL=(\S+) ")


@dataclasses.dataclass(frozen=True)
class Service:
    url: str
    models: Path
    """The folder in which the cookbook finds the tokenizer by the model's name."""
    process: "subprocess.Popen[str]"

    @property
    def folder(self) -> Path:
        return self.models / "run"

    def connect(self, key: str = KEYS[0]) -> Any:
        import tinker

        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def post(self, path: str, body: Any, key: str = KEYS[0]) -> tuple[int, Any]:
        """Send a request as it is, once."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = httpx.post(f"{self.url}/api/v1/{path}", headers={"X-API-Key": key}, timeout=60, **content)
        return answer.status_code, answer.json()

    def run_recipe(self, name: str, data: str, *words: str, timeout: float = 600) -> str:
        """Run a recipe of the cookbook with one of the data of `tests/tinker/recipe.py`; return its output."""
        environment = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": KEYS[0], "TINKER_TELEMETRY": "0"}
        environment["PYTHONPATH"] = str(ROOT)
        ended = subprocess.run(
            [sys.executable, "-m", "tests.tinker.recipe", name, data, f"model_name={NAME}", *words],
            cwd=self.models, env=os.environ | environment, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip
        printed = ended.stdout + ended.stderr
        assert ended.returncode == 0, printed[-4000:]
        assert "training completed" in printed.lower()
        return printed


def start(models: Path, *flags: str) -> Service:
    """Serve the model below a folder, with two keys."""
    command = [
        sys.executable, "-m", "megatron_rl.cli", "serve", "--tinker", "--hf-model", str(models / NAME),
        "--serve-base-model", NAME, "--rollout-folder", str(models / "run"), "--micro-batch-size", "2",
        "--rollout-max-num-seqs", "64", *flags,
    ]  # fmt: skip
    environment = os.environ | {"MEGATRON_RL_SERVE_KEYS": " ".join(KEYS), "TINKER_TELEMETRY": "0"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    printed = ""
    while (ready := _READY.search(printed)) is None:
        line = process.stdout.readline()
        assert line, f"the service has ended\n{printed}"
        printed += line
    assert not any(key in printed for key in KEYS)
    return Service(ready[1], models, process)


def end(service: Service) -> None:
    """End a service by SIGTERM."""
    process = service.process
    try:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serving(models: Path, *flags: str) -> Iterator[Service]:
    """Serve the model below a folder until the context ends."""
    service = start(models, *flags)
    try:
        yield service
    except BaseException:
        service.process.kill()
        raise
    end(service)
