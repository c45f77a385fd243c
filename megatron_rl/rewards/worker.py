"""A worker: `python -m megatron_rl.rewards.worker PARENT NAMESPACE`, which communicates over its standard streams.

It is two processes, a keeper and a second one. The keeper runs no reward function. It starts the second process, and
adopts the processes that the second one leaves. It ends them all when the second process ends, on SIGTERM, or when its
own parent dies. The second process confines itself, loads the functions and answers.

The first line that it reads is the set-up, answered with {"ready"} or {"cannot_load"}. Then each job is two lines: the
task and the group. Each function answers with one line: {"job", "function", "values" or "error"}. An error also says
whether it is a "misfit", which any completion would cause, and whether its text has a "remedy". A "trial" is a job for
a forked process; however that process ends, {"trial_is_over"} is the last answer.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_rl.rewards.confinement import (
    PROCESSES,
    Confinement,
    adopt_orphans,
    confine,
    new_process_namespace,
    signal_at_parents_death,
)
from megatron_rl.rewards.types import RewardSpec

# The signals that the keeper waits for; blocked, so that none is lost or interrupts it.
_EVENTS = frozenset({signal.SIGTERM, signal.SIGCHLD})
# Linux's PF_EXITING.
_EXITING = 0x4


Serve = Callable[[IO[bytes], IO[bytes], dict[str, str]], None]
"""A function that answers requests until there are none; it gets the measures of confinement that are missing."""


def run_worker(arguments: list[str], serve: Serve) -> NoReturn:
    """Become the keeper of a second process, which confines itself and calls `serve`."""
    parent, namespace = int(arguments[0]), arguments[1] == "1"
    signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    missing = _become_keeper(namespace)
    if os.getppid() != parent:
        _tidy_up()
        os._exit(1)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _EVENTS)
        _work(missing, serve)
    _close_streams()
    status = _wait_for(child)
    _end_all()
    if _is_ending(parent):
        _tidy_up()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _is_ending(parent: int) -> bool:
    """Check whether the parent has ended or is ending: its pipes break, and so our child ends, before it has ended."""
    if os.getppid() != parent:
        return True
    try:
        stat = Path(f"/proc/{parent}/stat").read_text(errors="replace")
    except OSError:
        return True
    # The flags of the process follow its name, which is in parentheses.
    return bool(int(stat.rpartition(")")[2].split()[6]) & _EXITING)


def _tidy_up() -> None:
    """Remove the scratch folder, because a parent that was killed cannot."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


def _become_keeper(namespace: bool) -> dict[str, str]:
    missing = {}
    try:
        signal_at_parents_death(signal.SIGTERM)
        adopt_orphans()
        if namespace:
            new_process_namespace()
        else:
            missing[PROCESSES] = "no namespace of their own was asked for"
    except OSError as error:
        missing[PROCESSES] = f"no namespace of their own: {error}"
    return missing


def _close_streams() -> None:
    """Close the keeper's ends of the pipes, so that they break when the worker ends."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)


def _wait_for(child: int) -> int:
    """Wait for the child; return its status, or 0 if the keeper is told to end first."""
    while signal.sigwait(_EVENTS) == signal.SIGCHLD:
        while (ended := _reap()) is not None:
            if ended[0] == child:
                return ended[1]
    return 0


def _reap() -> tuple[int, int] | None:
    """Return a child that has ended, with its status; None if none has."""
    ended = os.waitpid(-1, os.WNOHANG)
    return ended if ended[0] else None


def _end_all() -> None:
    """End every descendant: the children of an ended one become ours, so repeat until none is left."""
    while True:
        for child in _children():
            os.kill(child, signal.SIGKILL)
        try:
            while _reap():
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _children() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    # The name of the program may have any characters, and ends at the last parenthesis.
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == os.getpid():
                yield int(name)


def _work(missing: dict[str, str], serve: Serve) -> NoReturn:
    """Run the second process; never return into the keeper's code."""
    code = 1
    try:
        if sys.platform == "linux":
            signal_at_parents_death(signal.SIGKILL)
        os.setpgid(0, 0)
        requests, answers = _take_streams()
        serve(requests, answers, missing)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _take_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Separate the channel of answers from the output of functions, which goes to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def read_setup(requests: IO[bytes], missing: dict[str, str]) -> dict[str, Any]:
    """Read the set-up, and confine this process as it says; add the measures that failed to those that are missing."""
    setup: dict[str, Any] = json.loads(requests.readline())
    _limit_memory(setup["memory_bytes"])
    if setup["confinement"] is not None:
        missing |= confine(Confinement(**{name: tuple(paths) for name, paths in setup["confinement"].items()}))
    return setup


def _serve(requests: IO[bytes], answers: IO[bytes], missing: dict[str, str]) -> None:
    setup = read_setup(requests, missing)
    # Imported here, after the confinement: the keeper does not need it.
    from megatron_rl.rewards.calling import CannotLoad, Functions

    try:
        functions = Functions([RewardSpec(**spec) for spec in setup["specs"]], setup["sources"])
    except CannotLoad as error:
        answer(answers, {"cannot_load": str(error)})
        return
    answer(answers, {"ready": True, "missing": missing})
    while line := requests.readline():
        job, group = json.loads(line), requests.readline()
        if job.get("trial") and not _is_trial_child():
            answer(answers, {"trial_is_over": True})
            continue
        for index in job["functions"]:
            said: dict[str, Any] = {"job": job["job"], "function": index}
            try:
                said["values"] = functions.call(index, job["prompt_index"], group)
            except BaseException as error:
                said["error"] = functions.report(index, error)
                said["misfit"], said["remedy"] = functions.is_misfit(error), functions.has_remedy(error)
            sys.stdout.flush()
            answer(answers, said)
            if "error" in said and job["stop"]:
                break
        if job.get("trial"):
            os._exit(0)


def _is_trial_child() -> bool:
    """Fork, so that the state of a trial ends with the child; return whether this is the child.

    The parent waits for the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return child == 0


def _limit_memory(limit: int | None) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer(answers: IO[bytes], content: dict[str, Any]) -> None:
    """Write an answer as one line."""
    answers.write(json.dumps(content).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    run_worker(sys.argv[1:], _serve)
