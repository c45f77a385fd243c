"""The worker's side of a confined process: `python -m MODULE PARENT NAMESPACE`, over its standard streams.

It is two processes, a keeper and a second one. The keeper runs no code of the user's. It starts the second process, and
adopts the processes that the second one leaves. It ends them all when the second process ends, on SIGTERM, or when its
own parent dies. The second process confines itself, loads the user's code and answers calls.

The first line that it reads is the set-up, answered with {"ready", "missing", "description"} or {"cannot_load"}. Each
later line is a call: {"id", "call", ...}, answered in any order with {"id", "said"} or {"id", "error"}. The first
answer to a call counts.
"""

import inspect
import json
import os
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from megatron_rl.confined.confinement import (
    PROCESSES,
    Confinement,
    adopt_orphans,
    confine,
    new_process_namespace,
    signal_at_parents_death,
)

# The signals that the keeper waits for; blocked, so that none is lost or interrupts it.
_EVENTS = frozenset({signal.SIGTERM, signal.SIGCHLD})
# Linux's PF_EXITING.
_EXITING = 0x4
LONGEST_MESSAGE = 2000

Setup = Mapping[str, Any]
Load = Callable[[Setup], tuple[Any, Any]]
"""A function that loads the user's code; it returns it with its description, or raises CannotLoad."""
Serve = Callable[[Any, Setup, IO[bytes], IO[bytes]], None]
"""A function that answers calls of the code that was loaded until there are none."""


class CannotLoad(Exception):
    """A file that does not import or lacks the function; the message names the place."""


def run_worker(arguments: list[str], load: Load, serve: Serve) -> NoReturn:
    """Become the keeper of a second process, which confines itself, loads and serves."""
    parent, namespace = int(arguments[0]), arguments[1] == "1"
    signal.pthread_sigmask(signal.SIG_BLOCK, _EVENTS)
    missing = _become_keeper(namespace)
    if os.getppid() != parent:
        _tidy_up()
        os._exit(1)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _EVENTS)
        _work(missing, load, serve)
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


def _children() -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if find_parent(pid) == os.getpid()]


def find_parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has none here or is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program may have any characters, and ends at the last parenthesis.
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def _work(missing: dict[str, str], load: Load, serve: Serve) -> NoReturn:
    """Run the second process; never return into the keeper's code."""
    code = 1
    try:
        if sys.platform == "linux":
            signal_at_parents_death(signal.SIGKILL)
        os.setpgid(0, 0)
        requests, answers = _take_streams()
        _load_and_serve(requests, answers, missing, load, serve)
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


def _load_and_serve(requests: IO[bytes], answers: IO[bytes], missing: dict[str, str], load: Load, serve: Serve) -> None:
    setup: Setup = json.loads(requests.readline())
    _limit_memory(setup["memory_bytes"])
    if setup["confinement"] is not None:
        missing |= confine(Confinement(**{name: tuple(paths) for name, paths in setup["confinement"].items()}))
    try:
        loaded, description = load(setup)
    except CannotLoad as error:
        answer(answers, {"cannot_load": str(error)})
        return
    answer(answers, {"ready": True, "missing": missing, "description": description})
    serve(loaded, setup, requests, answers)


def _limit_memory(limit: int | None) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answer(answers: IO[bytes], content: Mapping[str, Any]) -> None:
    answers.write(json.dumps(content).encode() + b"\n")
    answers.flush()


# The user's code.


async def wait_for(result: Any) -> Any:
    """Return what an awaitable gives; as a coroutine, which an event loop can run."""
    return await result


def list_parameters(function: Callable[..., Any]) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return a function's parameters, and whether it accepts others by name."""
    parameters = inspect.signature(function).parameters
    return parameters, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def report_error(error: BaseException, path: str) -> str:
    """Print an error's traceback; return its description, with the line of the user's file where it happened."""
    # In one piece: other threads print too.
    sys.stderr.write("".join(traceback.format_exception(error)))
    sys.stderr.flush()
    return describe_error(error) + name_line(error, path)


def describe_error(error: BaseException) -> str:
    """Return the class of an error, the first line of its text, and the error that caused all."""
    first = root = error
    seen: set[int] = set()
    while id(root) not in seen:
        seen.add(id(root))
        root = _find_cause(root) or root
    cause = f"; caused by {_name_error(root)}" if root is not first else ""
    return _name_error(first) + cause


def _find_cause(error: BaseException) -> BaseException | None:
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _name_error(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    # UTF-8 cannot write halves of surrogate pairs, and a line may have mebibytes.
    text = lines[0][:LONGEST_MESSAGE].encode(errors="backslashreplace").decode() if lines else ""
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def name_line(error: BaseException, path: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f" ({path}:{lines[-1]})" if lines else ""


def load_module(path: str, source: str) -> types.ModuleType:
    """Load a file's module from the text that was read when the run began, so that later edits have no effect."""
    name = f"megatron_rl_reward_{Path(path).stem}"
    # A file can import its neighbours, as a script can.
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except SyntaxError as error:
        raise CannotLoad(f"{error.filename}:{error.lineno} does not import: SyntaxError: {error.msg}") from None
    except BaseException as error:
        place = name_line(error, path).strip(" ()") or path
        raise CannotLoad(f"{place} does not import: {describe_error(error)}") from None
    return module


def load_named(setup: Setup, describe: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Load the class or function of a set-up, and describe it; raise CannotLoad if it cannot be used."""
    file, name = setup["file"], setup["name"]
    try:
        loaded: Any = getattr(load_module(file, setup["source"]), name, None)
        if not callable(loaded):
            raise CannotLoad(f"{file} has no class or function {name}")
        return loaded, describe(loaded)
    except CannotLoad:
        raise
    except BaseException as error:
        # The class is the user's own.
        raise CannotLoad(f"{name} of {file}: {error}{name_line(error, file)}") from None
