"""Start, reach and kill a sidecar as its own process, for tests."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from megatron_rl.shared.protocol.client import RolloutClient, read_token
from megatron_rl.sidecar import parent
from tests.ranks import ROOT


class SidecarProcess:
    """One process, and its output."""

    def __init__(self, folder: Path, *words: str, module: str = "megatron_rl.sidecar"):
        self.folder = folder
        self.output = folder.with_name(f"{folder.name}.output")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--rollout-folder", str(folder), *words],
                cwd=ROOT,
                # It ends with the tests, whatever ends them.
                env={**os.environ, parent.VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_it_serves(self, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.folder / "address").exists():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def client(self, patience: float = 10.0) -> RolloutClient:
        address = (self.folder / "address").read_text().strip()
        return RolloutClient(address, read_token(self.folder / "token"), patience)

    def tree(self) -> list[psutil.Process]:
        """Return the sidecar and every process that it has started."""
        sidecar = psutil.Process(self.process.pid)
        return [sidecar, *sidecar.children(recursive=True)]

    def kill(self) -> None:
        """Kill the sidecar alone, as a fault would."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        (self.folder / "address").unlink(missing_ok=True)

    def end(self, seconds: float = 600.0) -> int:
        self.process.terminate()
        return self.process.wait(seconds)


@contextlib.contextmanager
def sidecar(
    folder: Path, *words: str, seconds: float = 600.0, module: str = "megatron_rl.sidecar"
) -> Iterator[SidecarProcess]:
    """Start a sidecar that serves; at the end, ask it to end, then kill any process that is left of it."""
    started = SidecarProcess(folder, *words, module=module)
    try:
        started.wait_until_it_serves(seconds)
        yield started
    finally:
        left = started.tree() if started.process.poll() is None else []
        # A killed process cannot remove its shared memory.
        started.process.terminate()
        psutil.wait_procs(left, timeout=60)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.process.wait()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that still run."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
