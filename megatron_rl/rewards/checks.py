"""What is wrong with the flags of rewards, and with the files that they name: read, and nothing of them run.

What only running a file shows, a worker says when the sidecar starts: that it does not import, that a function which it
makes in passing is not there.
"""

import ast
import difflib
import math
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.settings import RewardConfig
from megatron_rl.errors import UsageError
from megatron_rl.rewards.confinement import environment_problems
from megatron_rl.rewards.spec import parse_on_error, parse_spec, parse_specs
from megatron_rl.rewards.types import RewardSpec

# Python alone; functions need what they need.
_LEAST_MEMORY_GIB = 0.125
# What binds names that reading does not find.
_DYNAMIC = {"exec", "globals", "locals", "setattr", "vars", "modules", "__getattr__"}


def problems(reward: RewardConfig) -> Iterator[str]:
    """Each thing that the workers of rewards would end for."""
    if not reward.functions:
        yield "--reward is missing: name a function FILE.py:FUNCTION, or a ready-made one"
    yield from _problems_of_functions(reward.functions or [])
    try:
        parse_on_error(reward.on_error)
    except UsageError as error:
        yield from error.problems
    if reward.workers < 1:
        yield f"--reward-workers {reward.workers} must be at least 1: write 1 or more"
    if not 0 < reward.timeout < math.inf:
        yield f"--reward-timeout {reward.timeout:g}: write seconds above 0"
    if reward.memory_gib is not None and not _LEAST_MEMORY_GIB <= reward.memory_gib < math.inf:
        yield (
            f"--reward-memory-gib {reward.memory_gib:g}: a process that functions run in needs {_LEAST_MEMORY_GIB:g} "
            f"at least; write more, or leave it out"
        )
    for path in reward.readable or ():
        if not path.exists():
            yield f"--reward-readable {path}: there is no such file or folder; name one that exists"
    yield from environment_problems(reward.environment or ())


def read_source(file: str) -> str:
    """The text of a file of rewards."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--reward {file} cannot be read: {error}; name a file that can") from None


def _problems_of_functions(texts: list[str]) -> Iterator[str]:
    are_right = True
    for text in texts:
        try:
            spec = parse_spec(text)
            if spec.is_file:
                _check_file(text, spec)
        except UsageError as error:
            are_right = False
            yield from error.problems
    if are_right:
        try:
            parse_specs(texts)
        except UsageError as error:
            yield from error.problems


def _check_file(text: str, spec: RewardSpec) -> None:
    """A UsageError unless the file is Python and may have the function."""
    source = read_source(spec.source)
    try:
        tree = ast.parse(source, spec.source)
    except SyntaxError as error:
        raise UsageError(
            f"--reward {text}: {spec.source}:{error.lineno} does not import: SyntaxError: {error.msg}; mend the file"
        ) from None
    except ValueError as error:
        raise UsageError(f"--reward {text}: {spec.source} does not import: {error}; mend the file") from None
    names = _names(tree)
    if names is None or spec.function in names:
        return
    near = difflib.get_close_matches(str(spec.function), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"name one of its functions: {spec.source}:FUNCTION"
    raise UsageError(f"--reward {text}: {spec.source} has no function {spec.function}; {hint}")


def _names(tree: ast.Module) -> set[str] | None:
    """The names that a module binds; None where reading does not tell."""
    for node in ast.walk(tree):
        is_star = isinstance(node, ast.alias) and node.name == "*"
        if is_star or {getattr(node, field, None) for field in ("id", "attr", "name")} & _DYNAMIC:
            return None
    inside = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return inside | set(_bound(tree))


def _bound(parent: ast.AST) -> Iterator[str]:
    """The names that are bound below a node and not in a scope of their own."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.split(".")[0]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif not isinstance(node, ast.Lambda):
            yield from _bound(node)
