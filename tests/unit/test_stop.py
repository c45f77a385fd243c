"""Requests to stop."""

import os
import signal
import subprocess
import sys
import textwrap
import time

_WAITING = """
    import time
    from megatron_rl.trainer.loop.stop import StopRequest

    stop = StopRequest(60.0, lambda error: None).install()
    stop.begin()
    print("ready", flush=True)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    print(stop.is_asked)
    stop.over()
"""


def test_many_requests_at_once_are_one() -> None:
    command = [sys.executable, "-c", textwrap.dedent(_WAITING)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 2
        while time.monotonic() < end:
            os.kill(process.pid, signal.SIGTERM)
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
        assert process.stdout.read() == "True\n"
