"""Run a script in a rank of tests/nursery.py, which has imported megatron, so that the start takes no seconds.

The script gets its words and an environment of its own. Settings of that environment for modules that were imported
before come too late.
"""

import contextlib
import faulthandler
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.e2e import forked_sidecar
from tests.nursery import Job, end_like_python
from tests.ranks import check_nursery, fork, read

_POLL_SECONDS = 0.02


class ForkedProcess:
    """The part of a `subprocess.Popen` that a test needs."""

    def __init__(
        self,
        script: Path,
        words: Sequence[str],
        prologue: str,
        output: Path,
        environment: Mapping[str, str],
        platform: str = "cpu",
    ) -> None:
        """Run the prologue and then the script; its output goes into a file."""
        self._platform = platform
        self._folder = Path(tempfile.mkdtemp(prefix="forked-", dir=output.parent))
        self._rank = environment["RANK"]
        job = Job(__name__, be_script.__name__, (script, list(words), prologue, output), num_threads=1)
        (self._folder / "job").write_bytes(pickle.dumps(job))
        fork(self._folder, environment, platform)
        while (pid := read(self._folder / f"process-{self._rank}")) is None:
            check_nursery(platform)
            time.sleep(_POLL_SECONDS)
        self.pid: int = pid

    def poll(self) -> int | None:
        check_nursery(self._platform)
        return read(self._folder / f"exit-{self._rank}")

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank {self._rank}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def be_script(script: Path, words: Sequence[str], prologue: str, output: Path) -> NoReturn:
    """Run as the script would, and end as Python would."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.enable()
    if os.environ["RANK"] == "0":
        forked_sidecar.plant()
    sys.argv = [str(script), *words]

    def run() -> None:
        exec(compile(prologue, "<prologue>", "exec"), {"__name__": "__main__"})
        runpy.run_path(str(script), run_name="__main__")

    end_like_python(run)
