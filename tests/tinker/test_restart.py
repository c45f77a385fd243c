"""A service whose processes are killed loses no request, and does none twice."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import ROOT
from tests.tinker import model
from tests.tinker.services import KEYS, Service, end, start

pytest.importorskip("tinker", reason="Tinker's SDK has an environment of its own: make test-tinker")
from tests.tinker.cycle import KINDS, RANK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), pytest.mark.filterwarnings("ignore::FutureWarning")]
PROCESSES = {
    "rank": "megatron_rl.tinker --stage",
    "client": "tests.tinker.cycle",
    "sidecar": "megatron_rl.tinker.sidecar",
    "engine": "api_server",
    "service": "megatron_rl.cli serve",
}
NUM_CYCLES = 40
FLAGS = ("--seq-length", "256", "--lora-rank", str(RANK), "--serve-most-models", "128")


def kill(name: str, folder: Path) -> None:
    for one in psutil.process_iter():
        # Others end meanwhile.
        with contextlib.suppress(psutil.Error):
            words = " ".join(one.cmdline())
            if PROCESSES[name] in words and str(folder) in words:
                os.kill(one.pid, signal.SIGKILL)
                return
    raise AssertionError(f"no {name} was found")


class Served:
    """A service, which is started again once it was killed itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.service = start(folder, *FLAGS)

    def run_cycle(self, results: Path, number: int, killed: tuple[str, str] | None) -> dict[str, Any]:
        """Run a client until it ends; kill a process once a request of this kind was sent."""
        service: Service = self.service
        command = [sys.executable, "-m", "tests.tinker.cycle", service.url, KEYS[0], model.NAME, str(results)]
        with subprocess.Popen([*command, str(number)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            for line in client.stdout:
                if killed is not None and line.strip() == killed[0]:
                    kill(killed[1], self.folder if killed[1] != "client" else results)
                    if killed[1] == "service":
                        self.service = start(self.folder, *FLAGS)
        if killed is not None and killed[1] == "client":
            assert client.returncode == -signal.SIGKILL
            return self.run_cycle(results, number, None)
        assert client.returncode == 0
        found: dict[str, Any] = json.loads((results / f"{number}.json").read_text())
        # It has the name of its client's session.
        del found["path"]
        return found


def test_what_is_killed_is_done_once(tmp_path: Path) -> None:
    model.save(tmp_path / model.NAME)
    served = Served(tmp_path)
    expected, found = tmp_path / "expected", tmp_path / "found"
    for folder in (expected, found):
        folder.mkdir()
    try:
        whole = [served.run_cycle(expected, number, None) for number in range(NUM_CYCLES)]
        # Each of them trains on.
        assert len({str(one) for one in whole}) == NUM_CYCLES
        kinds = [KINDS[number % len(KINDS)] for number in range(NUM_CYCLES)]
        names = [[*PROCESSES][number % len(PROCESSES)] for number in range(NUM_CYCLES)]
        for number, (kind, name) in enumerate(zip(kinds, names, strict=True)):
            print(f"cycle {number}: the {name} is killed at {kind}", flush=True)
            assert served.run_cycle(found, number, (kind, name)) == whole[number], (number, kind, name)
    finally:
        end(served.service)
