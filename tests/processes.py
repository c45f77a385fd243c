"""Run Python code in a process of its own, so that a test's changes to torch or to the import system stay there."""

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str, timeout: float = 600, env: Mapping[str, str] | None = None) -> str:
    """Run the code and return what it prints, both streams together.

    Code that fails makes the test fail, with all it printed.
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"exit code {result.returncode}:\n{result.stdout}"
    return result.stdout
