"""Python code of a policy, run as a program alone in a folder: a tool for agents, and a reward from tests.

Invariants:

- the code ends with the call: it is one process, which is killed and cannot start another;
- it changes nothing outside its folder, which is removed, and reaches no network and no other process;
- a test counts as passed by what an expression gives in the code's process. What is expected never enters it.
"""

import ast
import builtins
import contextlib
import dataclasses
import inspect
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from megatron_rl.confined import jail
from megatron_rl.confined.confinement import build_environment, landlock_version, plan_confinement
from megatron_rl.confined.process import RUN_MODULE
from megatron_rl.errors import PlatformError

_MOST_FILES, _MOST_BYTES = 256, 64 << 20
_LOOK_SECONDS = 0.05
_START_SECONDS = 120
_NO_FILES: Mapping[str, str] = MappingProxyType({})
# Libraries that would start threads.
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_MARK = "@answer"
_TELLER = "megatron_rl_teller"
_QUESTION = f"""
try:
    __import__("{_TELLER}")._tell("{_MARK}", {{number}}, {{expression}})
except BaseException:
    pass
"""
_INFINITIES = {"inf": math.inf, "math.inf": math.inf, "float('inf')": math.inf, "float('-inf')": -math.inf}


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of code, and its output."""

    returncode: int
    """The exit code, or the negative number of the signal that ended it."""
    stdout: str
    stderr: str
    timed_out: bool
    cut: bool
    """True if its output or its files have reached the bound: 4 MiB a file, 64 MiB and 256 files in all."""


def run_python(
    code: str, *, stdin: str = "", seconds: float = 5.0, memory_mb: int = 512, files: Mapping[str, str] = _NO_FILES
) -> Result:
    """Run code by this Python in a new folder with these files: without network, threads and subprocesses.

    Raise a PlatformError if the system cannot confine it, and a TimeoutError if it does not start in time.
    """
    for name in files:
        if name in (jail.MAIN, "", ".", "..") or "/" in name:
            raise ValueError(f"files: {name!r} must be a name without a folder, and not {jail.MAIN}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megatron-rl-code-"))
        questions, *outputs = streams = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        for name, content in {**files, jail.MAIN: code}.items():
            (Path(folder) / name).write_bytes(_encode(content))
        questions.write(_encode(stdin))
        questions.seek(0)
        process = _start(folder, seconds, memory_mb << 20, streams)
        try:
            timed_out, is_full = _wait(process, folder, seconds)
        finally:
            process.kill()
            process.wait()
        contents = [_read(output) for output in outputs]
        cut = is_full or any(len(content) >= jail.LARGEST_FILE for content in contents)
        stdout, stderr = (content.decode(errors="replace") for content in contents)
        return Result(process.returncode, stdout, stderr, timed_out, cut)


def _encode(text: str) -> bytes:
    # A policy may write halves of surrogate pairs.
    return text.encode(errors="replace")


def _read(file: IO[bytes]) -> bytes:
    # The code shares the position, and may have moved it.
    file.seek(0)
    return file.read(jail.LARGEST_FILE)


def _start(folder: str, seconds: float, memory_bytes: int, streams: Sequence[IO[bytes]]) -> subprocess.Popen[bytes]:
    """Start the code; return once it is confined."""
    try:
        landlock_version()
    except OSError as error:
        raise _cannot_confine(str(error)) from None
    package = str(Path(__file__).resolve().parents[1])
    readable = [path for path in plan_confinement((), (), Path(folder), ()).read if not path.startswith("/proc/")]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as report:
        with os.fdopen(writing, "wb"):
            limits = (folder, readable, math.ceil(seconds) + 1, memory_bytes, os.getpid(), writing)
            process = subprocess.Popen(
                [sys.executable, "-P", "-S", "-c", RUN_MODULE, package, jail.__name__, json.dumps(limits)],
                stdin=streams[0], stdout=streams[1], stderr=streams[2], cwd=folder, pass_fds=(writing,),
                env=build_environment((), Path(folder), ()) | _ONE_THREAD, start_new_session=True,
            )  # fmt: skip
        poll = select.poll()
        poll.register(report, select.POLLIN)
        try:
            if not poll.poll(1000 * _START_SECONDS):
                raise TimeoutError(
                    f"code of a policy did not start within {_START_SECONDS} seconds, because this host is busy: lower "
                    "--reward-workers, or score it on another host with --reward http://HOST"
                )
            if (said := report.read(1000)) != jail.STARTED:
                raise _cannot_confine((said or _read(streams[2])[-500:]).decode(errors="replace"))
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process


def _cannot_confine(why: str) -> PlatformError:
    return PlatformError(
        f"code of a policy cannot be confined here: {why}; it needs x86_64 or aarch64 and Linux 5.13 with Landlock: "
        "add landlock to the kernel's lsm=, or score it on another host with --reward http://HOST"
    )


def _wait(process: subprocess.Popen[bytes], folder: str, seconds: float) -> tuple[bool, bool]:
    """Wait for the end; return whether the time is over, and whether the folder is full."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            process.wait(max(min(left, _LOOK_SECONDS), 0))
            return False, False
        except subprocess.TimeoutExpired:
            if left <= 0 or _is_full(folder):
                return left <= 0, left > 0


def _is_full(folder: str) -> bool:
    num_bytes = 0
    with os.scandir(folder) as entries:
        for num_files, entry in enumerate(entries, 1):
            num_bytes += entry.stat(follow_symlinks=False).st_size
            if num_files > _MOST_FILES or num_bytes > _MOST_BYTES:
                return True
    return False


def score_tests(code: str, tests: Sequence[Any], *, seconds: float = 5.0, memory_mb: int = 512) -> float:
    """Return the share of the tests that the code passes.

    A test is a pair of an input and the expected output, or a text `assert EXPRESSION == LITERAL`. Each pair gets a
    process, which must end with exit code 0; white space at the ends of lines and empty lines at the end are ignored.
    Then all texts share a process. The tests end at the first timeout, and the rest have failed.
    """
    if not tests:
        raise ValueError("tests: the list is empty; write at least one test")
    asserts, pairs = [], []
    for test in tests:
        match test:
            case str():
                asserts.append(_parse_assert(test))
            case [str() as stdin, str() as output]:
                pairs.append((stdin, output))
            case _:
                raise _misfit(test)
    num_passed = 0
    for stdin, output in pairs:
        result = run_python(code, stdin=stdin, seconds=seconds, memory_mb=memory_mb)
        if result.timed_out:
            return num_passed / len(tests)
        num_passed += result.returncode == 0 and _split(result.stdout) == _split(output)
    if asserts:
        questions = [_QUESTION.format(number=n, expression=text) for n, (text, _) in enumerate(asserts)]
        files = {f"{_TELLER}.py": _TELLER_CODE}
        result = run_python("\n".join([code, *questions]), files=files, seconds=seconds, memory_mb=memory_mb)
        answers = dict(_find_answers(result.stdout))
        num_passed += sum(_equals(answers.get(str(n), ""), value) for n, (_, value) in enumerate(asserts))
    return num_passed / len(tests)


def _misfit(test: Any) -> ValueError:
    return ValueError(f"tests: {test!r} must be [input, expected output], or 'assert EXPRESSION == LITERAL'")


def _split(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _parse_assert(test: str) -> tuple[str, Any]:
    """Split a test into the expression, which the code's process computes, and the value, which it never sees."""
    try:
        match ast.parse(test).body:
            case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
                expected = _evaluate(right)
            case _:
                raise _misfit(test)
    except (ValueError, SyntaxError):
        raise _misfit(test) from None
    if isinstance(expected, bool) and not _calls_code(left):
        raise ValueError(
            f"tests: {test!r} can be passed by code that patches what it calls: compare the value itself, as in "
            f"'assert f(2) == 4', or with {expected} a call of the code's own function, as in 'is_prime(7)'"
        )
    return ast.unparse(left), expected


def _calls_code(expression: ast.expr) -> bool:
    match expression:
        case ast.Call(func=ast.Name(name) | ast.Attribute(value=ast.Call(func=ast.Name(name)))):
            return name not in dir(builtins)
    return False


def _tell(mark: str, number: int, value: object) -> None:
    print("\n" + mark, number, repr(_make_plain(value)), flush=True)


def _make_plain(value: object) -> object:
    """Return an equal value that has a literal, where there is one."""
    if isinstance(value, dict):
        return {_make_plain(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [*map(_make_plain, value)]
    if isinstance(value, tuple):
        return (*map(_make_plain, value),)
    if isinstance(value, set | frozenset):
        return {*map(_make_plain, value)}
    # Numbers of numpy.
    return value.item() if hasattr(value, "item") else value


# A module of its own, because code often has a variable `list` or `print`.
_TELLER_CODE = inspect.getsource(_tell) + inspect.getsource(_make_plain)


def _evaluate(tree: ast.expr | ast.Expression) -> Any:
    return ast.literal_eval(_Infinity().visit(tree))


class _Infinity(ast.NodeTransformer):
    """Infinity as a constant: it has no literal."""

    def visit_Name(self, node: ast.expr) -> ast.expr:
        return ast.Constant(_INFINITIES[text]) if (text := ast.unparse(node)) in _INFINITIES else node

    visit_Attribute = visit_Call = visit_Name


def _find_answers(output: str) -> Sequence[tuple[str, str]]:
    lines = (line.split(" ", 2) for line in output.splitlines())
    return [(words[1], words[2]) for words in lines if len(words) == 3 and words[0] == _MARK]


def _equals(answer: str, expected: Any) -> bool:
    # A long text could exhaust the parser, and is not the answer.
    if len(answer) > 200 + 4 * len(repr(expected)):
        return False
    try:
        return bool(_evaluate(ast.parse(answer, mode="eval")) == expected)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
