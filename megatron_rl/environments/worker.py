"""A worker of environments: `python -m megatron_rl.environments.worker PARENT NAMESPACE`; see `confined.worker`.

The calls of a conversation run one after another, each in a thread, so that one that hangs keeps no other conversation
waiting. A call that the parent has given up runs to its end too: "close" waits for it. A "ping" is answered at once,
unless a call holds Python's lock.
"""

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any

from megatron_rl.confined.worker import Setup, answer, list_parameters, load_named, report_error, run_worker, wait_for
from megatron_rl.tool_calls import describe_methods, list_methods

_MOST_THREADS = 1024
# The longest text of an environment, in bytes as it travels: a policy reads far less.
LONGEST_TEXT = 1 << 19
_LONGEST_ERROR = 2000
# The public methods that the policy cannot call.
_OWN_METHODS = ("reset", "step", "get_reward", "close")


class Environment:
    """The environment of a conversation.

    It has an event loop of its own, for an environment may keep what belongs to a loop, and one may block its loop.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._instance = factory()
        self._tools = list_methods(self._instance, _OWN_METHODS)
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, request: Mapping[str, Any]) -> Any:
        kind, instance = request["call"], self._instance
        if kind == "open":
            return _check_text(
                self._run(instance.reset, **choose_arguments(instance.reset, request["row"], request["seed"]))
            )
        if kind == "step":
            said = self._run(instance.step, request["completion"])
            if isinstance(said, tuple) and len(said) == 2:
                return [_check_text(said[0]), _check_reward(said[1], "step")]
            return _check_text(said)
        if kind == "tool":
            return self._use(request["name"], request["arguments"])
        return _check_reward(self._run(instance.get_reward))

    def close(self) -> None:
        try:
            if callable(close := getattr(self._instance, "close", None)):
                self._run(close)
        finally:
            if self._loop is not None:
                self._loop.close()

    def _use(self, name: str, arguments: str) -> str:
        """Call a tool; return the text of its result, or of its error."""
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            result = str(self._run(getattr(self._instance, name), **_read_arguments(arguments)))
            _check_text(result)
            return result
        except Exception as error:
            # The policy is told what is wrong with a call, in TRL's words.
            text = str(error)[:_LONGEST_ERROR].encode(errors="backslashreplace").decode()
            return str({"error": text})

    def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(wait_for(result))


def _read_arguments(text: str) -> dict[str, Any]:
    arguments = json.loads(text)
    if not isinstance(arguments, dict):
        raise ValueError(f"The arguments must be a JSON object, not {type(arguments).__name__}.")
    return arguments


def choose_arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Choose what `reset` is given: the row's columns, all or those that it names, and the seed if it names it."""
    parameters, takes_all = list_parameters(reset)
    given = {name: value for name, value in row.items() if takes_all or name in parameters}
    return {**given, "seed": seed} if "seed" in parameters and "seed" not in row else given


def _check_text(said: object) -> str | None:
    if said is not None and not isinstance(said, str):
        raise TypeError(f"returned {type(said).__name__}, and must return text or None, or one of them with a reward")
    if said is not None and (size := len(json.dumps(said))) > LONGEST_TEXT:
        raise ValueError(f"said {size:,} bytes, and {LONGEST_TEXT:,} are allowed")
    # A tokenizer takes no text that UTF-8 cannot write.
    if said is not None:
        said.encode()
    return said


def _check_reward(value: Any, method: str = "get_reward") -> float:
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{method} returned {value}, not a finite number")
    return number


def describe(factory: Callable[[], Any], has_schemas: bool) -> dict[str, Any]:
    """Describe what an environment offers, with the schemas of its tools; raise a TypeError if it cannot be used."""
    instance = factory()
    name, tools = type(instance).__name__, list_methods(instance, _OWN_METHODS)
    if not callable(getattr(instance, "reset", None)):
        raise TypeError(f"{name} has no method reset")
    has_step = callable(getattr(instance, "step", None))
    if not has_step and not tools:
        raise TypeError(f"{name} has no method step, which answers text, and no other that is a tool")
    return {
        "name": name,
        "has_reward": callable(getattr(instance, "get_reward", None)),
        "has_step": has_step,
        "tools": describe_methods(instance, tools) if has_schemas else [],
    }


def _load(setup: Setup) -> tuple[Any, Any]:
    return load_named(setup, lambda factory: describe(factory, setup["is_first"]))


def _serve(factory: Callable[[], Any], setup: Setup, requests: IO[bytes], answers: IO[bytes]) -> None:
    held: dict[int, Environment] = {}
    one_at_a_time = threading.Lock()

    def call(request: Mapping[str, Any]) -> Any:
        conversation = request["conversation"]
        if request["call"] == "open":
            held[conversation] = Environment(factory)
        if request["call"] == "close":
            # It is not there if its row could not be passed on, or the class raised.
            return held.pop(conversation).close() if conversation in held else None
        return held[conversation].call(request)

    def handle(request: Mapping[str, Any], before: Future[None] | None) -> None:
        if before is not None:
            wait([before])
        said: dict[str, Any] = {"id": request["id"]}
        try:
            said["said"] = call(request)
        except BaseException as error:
            said["error"] = report_error(error, setup["file"])
        with one_at_a_time:
            sys.stdout.flush()
            answer(answers, said)

    executor = ThreadPoolExecutor(_MOST_THREADS, "calls")
    # The last call of each conversation: it began before those after it, so they cannot wait for each other.
    last: dict[int, Future[None]] = {}
    while line := requests.readline():
        request = json.loads(line)
        if request["call"] == "ping":
            with one_at_a_time:
                answer(answers, {"id": request["id"]})
            continue
        conversation = request["conversation"]
        calling = executor.submit(handle, request, last.pop(conversation, None))
        if request["call"] != "close":
            last[conversation] = calling


if __name__ == "__main__":
    run_worker(sys.argv[1:], _load, _serve)
