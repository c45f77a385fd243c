"""A worker that runs reward functions: `python -m megatron_rl.rewards.worker PARENT NAMESPACE`.

A call is "score" or "try", of one function for one group. It is answered with {"values"}, or with {"error"}, which also
says whether it is a "misfit", which any completion would cause, and whether its text has a "remedy". A "try" is called
in a forked process; null is the answer if that process ends without one.
"""

import asyncio
import copy
import difflib
import inspect
import json
import os
import random
import sys
import types
from collections.abc import Callable, Mapping
from typing import IO, Any

from megatron_rl.confined.worker import (
    LONGEST_MESSAGE,
    CannotLoad,
    Setup,
    answer,
    describe_error,
    list_parameters,
    load_module,
    report_error,
    run_worker,
    wait_for,
)
from megatron_rl.rewards.classifier import Classifier
from megatron_rl.rewards.ready_made import REWARDS
from megatron_rl.rewards.types import ANSWER, GIVEN, Misfit, MissingColumn, RewardSpec, Values, check_values, get_text

# Errors that every completion would cause.
_MISFITS = (Misfit, ImportError)


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
            return _make(spec)
        if spec.source not in modules:
            modules[spec.source] = load_module(spec.source, sources[spec.source])
        function = getattr(modules[spec.source], spec.function, None)
        if callable(function):
            return function
        near = difflib.get_close_matches(spec.function, dir(modules[spec.source]), n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise CannotLoad(f"{spec.source} has no function {spec.function}{hint}")

    def call(self, index: int, prompt_index: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function with a group that no other function sees; return its values, or the description of its error.

        The error's traceback is printed.
        """
        try:
            return {"values": self._call(index, prompt_index, group)}
        except BaseException as error:
            is_plain = isinstance(error, Misfit)
            text = str(error)[:LONGEST_MESSAGE] if is_plain else report_error(error, self._specs[index].source)
            return {
                "error": text, "misfit": isinstance(error, _MISFITS), "remedy": isinstance(error, MissingColumn)
            }  # fmt: skip

    def _call(self, index: int, prompt_index: int, group: Mapping[str, Any]) -> Values:
        spec, function = self._specs[index], self._functions[index]
        random.seed(f"{spec.name}\0{prompt_index}")
        result = function(**_arguments(function, group))
        if inspect.isawaitable(result):
            result = self._loop.run_until_complete(wait_for(result))
        return check_values(result, len(group["completions"]))


def _make(spec: RewardSpec) -> Any:
    """Make a ready-made reward, and load the model of one that has it."""
    made = REWARDS[spec.source](spec.argument, spec.timeout)
    if isinstance(made, Classifier):
        try:
            made.load(spec.device)
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            raise CannotLoad(f"{spec.source}:{spec.argument} on {spec.device}: {describe_error(error)}") from None
    return made


def _arguments(function: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
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
        parameters, takes_all = list_parameters(function)
    except (TypeError, ValueError):
        return arguments
    named = arguments if takes_all else {name: arguments[name] for name in parameters if name in arguments}
    for parameter in parameters.values():
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


def _load(setup: Setup) -> tuple[Functions, None]:
    return Functions([RewardSpec(**spec) for spec in setup["specs"]], setup["sources"]), None


def _serve(functions: Functions, setup: Setup, requests: IO[bytes], answers: IO[bytes]) -> None:
    while line := requests.readline():
        request = json.loads(line)
        is_trial = request["call"] == "try"
        if is_trial and not _is_trial_child():
            # The child's own answer has come before, if it gave one.
            answer(answers, {"id": request["id"], "said": None})
            continue
        said = functions.call(request["function"], request["prompt_index"], request["group"])
        sys.stdout.flush()
        answer(answers, {"id": request["id"], "said": said})
        if is_trial:
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


if __name__ == "__main__":
    run_worker(sys.argv[1:], _load, _serve)
