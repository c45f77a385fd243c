"""Watches the processes that an engine needs, by the kernel's account. Linux only: it reads /proc."""

import os
from pathlib import Path
from typing import NamedTuple

NUM_LOOKS = 25
"""The looks in a row that must see a process stopped. Looks are counted, not seconds: a suspended host stops the
observer together with the processes that it looks at."""
_STOPPED = "T"
_ENDED = ("Z", "X")
_NUM_WORDS = 3
# vLLM gives such a title to each process that it cannot do without.
_NEEDED_TITLE = "VLLM::"
_MOST_TITLE = 60


class ProcessStatus(NamedTuple):
    state: str
    """The kernel's letter: R for running, S for sleeping, T for stopped, Z for ended."""
    parent: int
    started: int
    """The time of its start in the kernel's ticks, in which two processes of the same number differ."""


def read_process(pid: int) -> ProcessStatus | None:
    """Read the status of a process; return None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may have spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return ProcessStatus(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def list_group(group: int) -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and _find_group(int(name)) == group]


class ProcessWatch:
    """Notices that a needed process of an engine has ended or is stopped.

    Invariants:

    - the leader is needed, each process that was added, and each one between these and the leader. Other processes of
      the group come and go;
    - until a process is added, those of the group with a title of vLLM's are needed. A title that is the parent's does
      not count: a process that calls a program first forks, and the fork has its title for a moment;
    - a process has ended when it is a zombie, does not exist, or its number belongs to another process;
    - a process is stopped (SIGSTOP) when NUM_LOOKS looks in a row have seen it stopped. Until a process is added, this
      holds for each process of the group, because the needed ones are not known yet.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._needed: dict[int, tuple[ProcessStatus, str]] = {}
        self._titled: dict[int, tuple[ProcessStatus, str]] = {}
        self._num_stopped: dict[int, int] = {}

    def add(self, pid: int) -> None:
        """Watch this process, if it descends from the leader, and those between it and the leader."""
        line: dict[int, tuple[ProcessStatus, str]] = {}
        while pid > 1 and (found := read_process(pid)) is not None:
            line[pid] = found, _read_title(pid)
            if pid == self._leader:
                self._needed |= dict(reversed(line.items()))
                return
            pid = found.parent

    def find_fault(self) -> str | None:
        """Say which process has ended or is stopped; None while all run. Call this at a steady pace."""
        # The outermost first: the processes below one end with it.
        needed = self._needed or self._find_titled()
        ended = [f"{pid} ({title})" for pid, (known, title) in needed.items() if _has_ended(pid, known)]
        if ended:
            return f"its process {ended[0]} has ended" + (f", and so have {', '.join(ended[1:])}" if ended[1:] else "")
        stopped = [pid for pid in self._needed or list_group(self._leader) if _is_stopped(pid)]
        self._num_stopped = {pid: self._num_stopped.get(pid, 0) + 1 for pid in stopped}
        for pid, num_looks in self._num_stopped.items():
            if num_looks >= NUM_LOOKS:
                return f"its process {pid} ({_read_title(pid)}) is stopped, as by SIGSTOP"
        return None

    def _find_titled(self) -> dict[int, tuple[ProcessStatus, str]]:
        """Return the processes that were once seen with a title of vLLM's, even if they have ended."""
        for pid in list_group(self._leader):
            title = _read_title(pid)
            if pid in self._titled or not title.startswith(_NEEDED_TITLE) or (found := read_process(pid)) is None:
                continue
            if title != _read_title(found.parent):
                self._titled[pid] = found, title
        return self._titled


def _has_ended(pid: int, known: ProcessStatus) -> bool:
    found = read_process(pid)
    return found is None or found.started != known.started or found.state in _ENDED


def _is_stopped(pid: int) -> bool:
    found = read_process(pid)
    return found is not None and found.state == _STOPPED


def _find_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _read_title(pid: int) -> str:
    """Read the beginning of a process's command line, or the title that it has given itself."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return "gone"
    return " ".join([Path(words[0]).name, *filter(None, words[1:_NUM_WORDS])])[:_MOST_TITLE]
