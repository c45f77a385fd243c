"""The loading and calling of reward functions inside a worker."""

import asyncio
import copy
import difflib
import inspect
import json
import random
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.rewards.ready_made import REWARDS
from megatron_rl.rewards.types import (
    ANSWER,
    GIVEN,
    Misfit,
    MissingColumn,
    RewardSpec,
    Values,
    check_values,
    get_text,
)

_LONGEST_MESSAGE = 2000
# Errors that every completion would cause.
_MISFITS = (Misfit, ImportError)


class CannotLoad(Exception):
    """A file that does not import or lacks the function; the message names the place."""


class Functions:
    """The functions of a run, loaded once and called for each group in turn."""

    def __init__(self, specs: list[RewardSpec], sources: dict[str, str]) -> None:
        self._specs = specs
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        modules: dict[str, types.ModuleType] = {}
        self._functions = [self._function(spec, sources, modules) for spec in specs]

    def _function(self, spec: RewardSpec, sources: dict[str, str], modules: dict[str, types.ModuleType]) -> Any:
        if spec.function is None:
            return REWARDS[spec.source](spec.argument, spec.timeout)
        if spec.source not in modules:
            modules[spec.source] = load_module(spec.source, sources[spec.source])
        function = getattr(modules[spec.source], spec.function, None)
        if callable(function):
            return function
        near = difflib.get_close_matches(spec.function, dir(modules[spec.source]), n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise CannotLoad(f"{spec.source} has no function {spec.function}{hint}")

    def call(self, index: int, prompt_index: int, line: bytes) -> Values:
        """Call a function with the group in the line, which is parsed again: no function sees another's changes."""
        spec, function, request = self._specs[index], self._functions[index], json.loads(line)
        num_samples = len(request["completions"])
        random.seed(f"{spec.name}\0{prompt_index}")
        result = function(**_arguments(function, request))
        if inspect.isawaitable(result):
            result = self._loop.run_until_complete(_awaited(result))
        return check_values(result, num_samples)

    @staticmethod
    def is_misfit(error: BaseException) -> bool:
        """Check whether any completion would cause this error, because the function does not fit the data."""
        return isinstance(error, _MISFITS)

    @staticmethod
    def has_remedy(error: BaseException) -> bool:
        """Check whether the error says what to do."""
        return isinstance(error, MissingColumn)

    def report(self, index: int, error: BaseException) -> str:
        """Print an error's traceback; return its description."""
        if isinstance(error, Misfit):
            return str(error)[:_LONGEST_MESSAGE]
        return report_error(error, self._specs[index].source)


async def _awaited(result: Any) -> Any:
    return await result


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
    text = lines[0][:_LONGEST_MESSAGE].encode(errors="backslashreplace").decode() if lines else ""
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


def _arguments(function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    """Build the keyword arguments of TRL's signature; a function without **kwargs gets only those that it names."""
    count = len(request["completions"])
    prompt = request["prompt"]
    write = get_text if isinstance(prompt, str) else _write_messages
    arguments = {
        "prompts": _repeated(prompt, count),
        "completions": [write(completion) for completion in request["completions"]],
        "completion_ids": request["completion_ids"],
        **{name: _repeated(value, count) for name, value in request["columns"].items()},
    }
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = arguments
    else:
        named = {p.name: arguments[p.name] for p in parameters if p.name in arguments}
    for parameter in parameters:
        wanted = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if wanted and parameter.default is parameter.empty and parameter.name not in arguments:
            raise MissingColumn(_missing(parameter.name, sorted(set(arguments) - set(GIVEN))))
    return named


def _write_messages(completion: Any) -> Any:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def _missing(name: str, columns: list[str]) -> str:
    there = f"it asks for {name}, and the row has no such column (it has {', '.join(columns) or 'none'}): "
    if name == ANSWER:
        return f"{there}add it, or write --answer-key COLUMN for the column that holds the answer"
    return f"{there}add it, rename the parameter to a column, or to {ANSWER} and write --answer-key COLUMN"


def _repeated(value: Any, count: int) -> list[Any]:
    return [copy.deepcopy(value) if isinstance(value, list | dict) else value for _ in range(count)]
