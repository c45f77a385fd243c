"""Kill a process that appends, at a random moment, and return what it had been told was written."""

import random
import subprocess
import sys
import textwrap

from tests.processes import ROOT


def kill_while_appending(code: str, random_number: random.Random) -> int:
    """Run code that prints a line after each append; kill -9 it later. Return the number of lines it had printed."""
    command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = [process.stdout.readline() for _ in range(1 + random_number.randrange(20))]
        if not told[-1]:
            raise AssertionError(process.stderr.read().decode())
        try:
            process.wait(random_number.random() * 0.003)
        except subprocess.TimeoutExpired:
            process.kill()
        return len(told) + len(process.stdout.read().splitlines())
