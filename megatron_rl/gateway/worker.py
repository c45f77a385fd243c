"""A worker of agents: `python -m megatron_rl.gateway.worker PARENT NAMESPACE`; see `confined.worker`.

It runs the agent's file once, and then forks a process for each rollout: a rollout shares what was imported, and
nothing that another one does. The worker needs no package but Python's own, because the interpreter may be another
environment's.

A conversation is a rollout: "open" has its row and seed, and is answered with the number of its process; "act" has the
gateway's address, the key and the model. Before "close" the parent has ended the process and its descendants.
"""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import json
import math
import os
import random
import selectors
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

from megatron_rl.confined.confinement import adopt_orphans, signal_at_parents_death
from megatron_rl.confined.worker import Setup, answer, list_parameters, load_named, report_error, run_worker, wait_for
from megatron_rl.environments.types import AGENT_COMPONENT
from megatron_rl.environments.worker import choose_arguments

_PIECE = 1 << 16
_LONGEST_ANSWER = 1 << 20


@dataclasses.dataclass
class RolloutProcess:
    call: int | None
    """The number of the call that it has not answered."""
    pid: int
    channel: socket.socket
    folder: str
    """The folder for its files, which is removed at its end."""
    data: bytes = b""
    ended: str = ""
    """The way in which the process has ended; empty while it lives."""


class RolloutProcesses:
    """The rollouts of a worker, each in a process that is forked from this one."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes], act: Callable[..., Any], file: str) -> None:
        self._requests = requests
        self._answers = answers
        self._act = act
        self._file = file
        self._rollouts: dict[int, RolloutProcess] = {}
        self._data = b""
        self._has_requests = True
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Answer calls until there are none."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A module that the agent's file imports may have blocked it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self._selector.register(self._requests, selectors.EVENT_READ, self._read_requests)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        while self._has_requests:
            for key, _ in self._selector.select():
                key.data()

    def _read_requests(self) -> None:
        piece = os.read(self._requests.fileno(), _PIECE)
        self._has_requests = bool(piece)
        *lines, self._data = (self._data + piece).split(b"\n")
        for line in lines:
            self._handle(json.loads(line), line)

    def _handle(self, request: dict[str, Any], line: bytes) -> None:
        if request["call"] == "open":
            try:
                self._fork(request)
            except OSError as error:
                answer(self._answers, {"id": request["id"], "error": f"its process cannot be started: {error}"})
        elif request["call"] == "close":
            self._close(request)
        else:
            rollout = self._rollouts[request["conversation"]]
            rollout.call = request["id"]
            # A process that has ended is noticed when it is reaped.
            with contextlib.suppress(ConnectionError):
                rollout.channel.sendall(line + b"\n")
            self._settle(rollout)

    def _fork(self, request: Mapping[str, Any]) -> None:
        mine, other = socket.socketpair()
        folder = tempfile.mkdtemp()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            mine.close()
            self._become(request, other, folder)
        other.close()
        rollout = self._rollouts[request["conversation"]] = RolloutProcess(request["id"], pid, mine, folder)
        self._selector.register(mine, selectors.EVENT_READ, functools.partial(self._read_answer, rollout))

    def _become(self, request: Mapping[str, Any], channel: socket.socket, folder: str) -> NoReturn:
        """Become the process of a rollout, which lives until it is killed."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal_at_parents_death(signal.SIGKILL)
            self._close_all()
            # The number that processes outside of this worker's namespace know.
            channel.sendall(b'{"said": %s}\n' % os.fsencode(os.readlink("/proc/self")))
            run_rollout(self._act, request, channel.makefile("rb"), channel.makefile("wb"), folder, self._file)
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _close_all(self) -> None:
        """Close what belongs to the worker, so that no rollout can write in another one's name."""
        self._selector.close()
        for rollout in self._rollouts.values():
            rollout.channel.close()
        for end in (self._woken, self._waker):
            os.close(end)
        self._requests.close()
        self._answers.close()

    def _read_answer(self, rollout: RolloutProcess) -> None:
        if rollout.channel.fileno() < 0:
            # It was closed after the selector had seen it.
            return
        try:
            piece = rollout.channel.recv(_PIECE)
        except ConnectionError:
            piece = b""
        rollout.data += piece
        if not piece or len(rollout.data) > _LONGEST_ANSWER:
            self._selector.unregister(rollout.channel)
            rollout.data = rollout.data[:_LONGEST_ANSWER]
        self._settle(rollout)

    def _settle(self, rollout: RolloutProcess) -> None:
        """Answer the rollout's call, if its process has answered or ended."""
        *lines, rollout.data = rollout.data.split(b"\n")
        for line in lines:
            self._answer(rollout, json.loads(line))
        if rollout.ended:
            self._answer(rollout, {"error": rollout.ended, "has_ended": True})
        elif len(rollout.data) == _LONGEST_ANSWER:
            self._answer(rollout, {"error": f"its answer has {_LONGEST_ANSWER:,} bytes or more: return less"})

    def _answer(self, rollout: RolloutProcess, content: Mapping[str, Any]) -> None:
        if rollout.call is not None:
            answer(self._answers, {"id": rollout.call, **content})
            rollout.call = None

    def _reap(self) -> None:
        """Reap all children that have ended: processes of rollouts, and those that they left."""
        os.read(self._woken, _PIECE)
        rollouts = {rollout.pid: rollout for rollout in self._rollouts.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in rollouts:
                rollouts[pid].ended = describe_end(os.waitstatus_to_exitcode(status))
                self._settle(rollouts[pid])

    def _close(self, request: Mapping[str, Any]) -> None:
        if (rollout := self._rollouts.pop(request["conversation"], None)) is not None:
            if rollout.channel in self._selector.get_map():
                self._selector.unregister(rollout.channel)
            rollout.channel.close()
            if not rollout.ended:
                # Its parent may not know it yet.
                os.kill(rollout.pid, signal.SIGKILL)
            shutil.rmtree(rollout.folder, ignore_errors=True)
        answer(self._answers, {"id": request["id"], "said": None})


def describe_end(code: int) -> str:
    """Describe how a process has ended that should not have."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    # Signals for real time have no names.
    names = {number.value: number.name for number in signal.Signals}
    return f"its process was killed by {names.get(-code, f'signal {-code}')}"


def run_rollout(
    act: Callable[..., Any], opened: Mapping[str, Any], calls: IO[bytes], answers: IO[bytes], folder: str, file: str
) -> None:
    """Act when the call comes, answer with the rewards, and wait to be ended.

    The worker closes nothing before, because descendants would no longer be this process's.
    """
    line = calls.readline()
    if not line:
        return
    call = json.loads(line)
    # From here on, so that a parent can tell descendants from a rollout that it has not heard of.
    os.setsid()
    adopt_orphans()
    variables = build_variables(call["base_url"], call["api_key"])
    # One by one: `update` asks each class of mappings, which would give the process a copy of half a MiB of them.
    for name, value in {"HOME": folder, "TMPDIR": folder, **variables}.items():
        os.environ[name] = value
    tempfile.tempdir = None
    seed_generators(opened["seed"])
    content: dict[str, Any]
    try:
        given = {name: call[name] for name in ("base_url", "api_key", "model")}
        result = act(**{**choose_arguments(act, opened["row"], opened["seed"]), **given})
        content = {"said": read_rewards(asyncio.run(wait_for(result)) if inspect.isawaitable(result) else result)}
    except BaseException as error:
        content = {"error": report_error(error, file)}
    sys.stdout.flush()
    answer(answers, content)
    calls.readline()


def build_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Build the variables in which clients look for an address and a key."""
    return {
        "OPENAI_API_KEY": api_key,
        "OPENAI_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
    }


def seed_generators(seed: int) -> None:
    """Seed the global generators of random numbers: a forked process would draw the numbers of all others."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def read_rewards(result: object) -> dict[str, float]:
    """Read an agent's rewards: a number, numbers by component, or None."""
    if result is None:
        return {}
    rewards = result if isinstance(result, dict) else {AGENT_COMPONENT: result}
    read = {str(name): _read_number(value) for name, value in rewards.items()}
    for name, value in read.items():
        if not math.isfinite(value):
            raise ValueError(f"the reward {name} is {value}, and must be finite")
    return read


def _read_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"returned {value!r:.100}, and must return a number, numbers by name, or None") from None


def describe_agent(function: Any) -> dict[str, Any]:
    """Describe an agent's function, which has no tools; raise a TypeError if it cannot be called as an agent."""
    name = getattr(function, "__name__", type(function).__name__)
    parameters, takes_all = list_parameters(function)
    missing = [name for name in ("base_url", "api_key", "model") if name not in parameters]
    if missing and not takes_all:
        raise TypeError(f"an agent has the parameters base_url, api_key and model, and {missing[0]} is missing")
    return {"name": name, "has_reward": True, "has_step": False, "tools": []}


def _load(setup: Setup) -> tuple[Any, Any]:
    adopt_orphans()
    return load_named(setup, describe_agent)


def _serve(function: Callable[..., Any], setup: Setup, requests: IO[bytes], answers: IO[bytes]) -> None:
    # Imported even if the file does not: a rollout that imports it later could not seed its generator. numpy itself
    # imports it at its first use, which would be in each rollout.
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    # Objects that the collector of garbage visits would be copied into each fork.
    gc.collect()
    gc.freeze()
    RolloutProcesses(requests, answers, function, setup["file"]).serve()


if __name__ == "__main__":
    run_worker(sys.argv[1:], _load, _serve)
