"""A worker of environments: `python -m megatron_rl.environments.worker PARENT NAMESPACE`; see `rewards.worker`.

The first line that it reads is the set-up, answered with {"ready", "description"} or {"cannot_load"}. Each later line
is a call: {"id", "call", "conversation", ...}, answered in any order with {"id", "said"} or {"id", "error"}. The calls
of a conversation come one after another, each in a thread, so that one that hangs keeps no other conversation waiting.
"""

import asyncio
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from megatron_rl.rewards.worker import answer, read_setup, run_worker

# The calls that are not tools.
_OWN = ("reset", "step", "get_reward", "close")
_MOST_THREADS = 1024
# The longest text of an environment, in bytes as it travels: a policy reads far less.
LONGEST_TEXT = 1 << 19
_LONGEST_ERROR = 2000


class Environments:
    """The environments of this process, one a conversation, and the calls of them."""

    def __init__(self, factory: Callable[[], Any], file: str) -> None:
        self._factory = factory
        self._file = file
        self._instances: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()

    def call(self, request: Mapping[str, Any]) -> Any:
        """Make a call, and return what the environment says."""
        conversation, kind = request["conversation"], request["call"]
        if kind == "open":
            instance = self._factory()
            self._instances[conversation] = instance
            return _check_text(self._run(instance.reset, **_choose(instance.reset, request["row"], request["seed"])))
        if kind == "close":
            ended = self._instances.pop(conversation, None)
            if ended is not None and callable(close := getattr(ended, "close", None)):
                self._run(close)
            return None
        instance = self._instances[conversation]
        if kind == "step":
            return _check_text(self._run(instance.step, request["completion"]))
        if kind == "tool":
            return _check_text(self._use_tool(instance, request["name"], request["arguments"]))
        return _check_reward(self._run(instance.get_reward))

    def describe(self, error: BaseException) -> str:
        """Return the last line of an error's traceback, and the line of the environment's file where it happened."""
        from megatron_rl.rewards.calling import name_line

        message = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1][:_LONGEST_ERROR]
        return message + name_line(error, self._file)

    def _use_tool(self, instance: Any, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; its error is what the policy reads, since the policy chose tool and arguments."""
        if name not in list_tools(type(instance)):
            return json.dumps({"error": f"{name} is not a tool"})
        try:
            said = self._run(getattr(instance, name), **arguments)
        except Exception as error:
            return json.dumps({"error": str(error)})
        return said if isinstance(said, str) else json.dumps(said, default=str)

    def _run(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            return asyncio.run_coroutine_threadsafe(_await(result), self._loop).result()
        return result


async def _await(result: Any) -> Any:
    return await result


def _choose(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Choose what `reset` is given: the row's columns, all or those that it names, and the seed if it names it."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in row.items() if takes_all or name in parameters}
    return {**given, "seed": seed} if "seed" in parameters and "seed" not in row else given


def _check_text(said: object) -> str | None:
    if said is not None and not isinstance(said, str):
        raise TypeError(f"returned {type(said).__name__}, and must return text or None")
    if said is not None and (size := len(json.dumps(said))) > LONGEST_TEXT:
        raise ValueError(f"said {size:,} bytes, and {LONGEST_TEXT:,} are allowed")
    return said


def _check_reward(value: Any) -> float:
    number = float(value)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"get_reward returned {value}, not a finite number")
    return number


def list_tools(kind: type) -> list[str]:
    """List the tools of a class: its public methods that have no other role."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_") and name not in _OWN]


def describe(factory: Callable[[], Any]) -> dict[str, Any]:
    """Describe what an environment offers; raise a TypeError for one that cannot be used."""
    instance = factory()
    kind, tools = type(instance), []
    if not callable(getattr(instance, "reset", None)):
        raise TypeError(f"{kind.__name__} has no method reset")
    names, has_step = list_tools(kind), callable(getattr(instance, "step", None))
    if names and not has_step:
        # Imported here: it takes seconds, and an environment with `step` needs no schemas.
        from transformers.utils import get_json_schema

        tools = [get_json_schema(getattr(instance, name)) for name in names]
    elif not has_step:
        raise TypeError(f"{kind.__name__} has neither a tool, which is a public method, nor a method step")
    has_reward = callable(getattr(instance, "get_reward", None))
    return {"name": kind.__name__, "tools": tools, "has_step": has_step, "has_reward": has_reward}


def serve(requests: IO[bytes], answers: IO[bytes], missing: dict[str, str]) -> None:
    """Load the class, and answer calls."""
    setup = read_setup(requests, missing)
    # Imported here, after the confinement: the keeper does not need it.
    from megatron_rl.rewards.calling import CannotLoad, load_module, name_line

    file, name = setup["file"], setup["name"]
    try:
        factory = getattr(load_module(file, setup["source"]), name, None)
        if not callable(factory):
            raise CannotLoad(f"{file} has no class {name}")
        description = describe(factory)
    except CannotLoad as error:
        answer(answers, {"cannot_load": str(error)})
        return
    except Exception as error:
        answer(answers, {"cannot_load": f"{name} of {file}: {error}{name_line(error, file)}"})
        return
    answer(answers, {"ready": True, "missing": missing, "description": description})
    environments, one_at_a_time = Environments(factory, file), threading.Lock()

    def handle(request: Mapping[str, Any]) -> None:
        said: dict[str, Any] = {"id": request["id"]}
        try:
            said["said"] = environments.call(request)
        except BaseException as error:
            said["error"] = environments.describe(error)
        with one_at_a_time:
            sys.stdout.flush()
            answer(answers, said)

    executor = ThreadPoolExecutor(_MOST_THREADS, "calls")
    while line := requests.readline():
        executor.submit(handle, json.loads(line))


if __name__ == "__main__":
    run_worker(sys.argv[1:], serve)
