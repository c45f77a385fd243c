"""Ctrl-C and SIGTERM, also where SIGINT is ignored from the start, as it is in some CI and for jobs of scripts."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED = pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN])
RANK = """
import os, threading
from megatron_rl.trainer.loop.entry import Entry

def wait(entry):
    entry.say(f"pid {os.getpid()}")
    # In parts: a signal just before a wait is noticed after it.
    for _ in range(600):
        threading.Event().wait(1)

raise SystemExit(Entry("a rank").run(wait))
"""


@contextlib.contextmanager
def started(words: Sequence[str], disposition: signal.Handlers) -> "Iterator[subprocess.Popen[str]]":
    """Start a process that has this disposition for SIGINT, and read its output line by line."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError("".join(lines))


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process ends, or does something of its own, on a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)
    return not ignored >> (number - 1) & 1


@IGNORED
def test_a_rank_of_torchrun_ends_by_an_interrupt_that_torchrun_passes_on(disposition, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    with started(words, disposition) as process:
        pid = int(read_until(process, "pid ").split()[-1])
        assert catches(pid, signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert read_until(process, "interrupted") == "a rank: interrupted\n"


@IGNORED
def test_a_rank_without_torchrun_keeps_an_ignored_interrupt_and_ends_by_sigterm(disposition):
    with started(["-c", RANK], disposition) as process:
        read_until(process, "pid ")
        assert catches(process.pid, signal.SIGINT) == (disposition == signal.SIG_DFL)
        process.send_signal(signal.SIGINT)
        if disposition == signal.SIG_IGN:
            process.terminate()
        assert process.wait(600) == (130 if disposition == signal.SIG_DFL else -signal.SIGTERM)


@IGNORED
def test_an_agent_keeps_an_ignored_interrupt_and_always_ends_well_by_sigterm(disposition, tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    words = ["-m", "megatron_rl.sidecar.agent", "--listen", "127.0.0.1:0"]
    with started([*words, "--token-file", str(token), "--folder", str(tmp_path / "logs")], disposition) as process:
        read_until(process, "serves at")
        assert catches(process.pid, signal.SIGINT) == (disposition == signal.SIG_DFL)
        process.send_signal(signal.SIGINT)
        if disposition == signal.SIG_IGN:
            process.terminate()
        assert process.wait(600) == 0
