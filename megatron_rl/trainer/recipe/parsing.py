"""One command line for two parsers, ours and the recipe's. Each is given the flags that it knows."""

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType

from megatron_rl.command_line import parse as command_line
from megatron_rl.command_line.flags import list_flags, list_own_flags
from megatron_rl.command_line.other_projects import find_project, split_words
from megatron_rl.command_line.run import RunSettings
from megatron_rl.errors import UsageError
from megatron_rl.flag import index_by_name
from megatron_rl.platforms.megatron_configs import find_megatron_version

# Flags that only the recipe's builder reads; our builder has its own layer, and refuses any other.
_OF_THE_BUILDER = {"--spec"}

ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None
"""A recipe's function that adds its own flags."""


def parse_ours(words: Sequence[str], theirs: Collection[str]) -> RunSettings:
    """Parse our settings. Report the flags that neither parser knows, but not those that only the recipe knows."""
    ours = set(index_by_name(list_flags())) | {name for name in theirs if find_project(name) is not None}
    ours -= _OF_THE_BUILDER
    return command_line.parse_run(select_words(words, ours, theirs))


def parse_theirs(
    parse: Callable[..., argparse.Namespace], words: Sequence[str], theirs: Collection[str], extra: ExtraArgs
) -> argparse.Namespace:
    """Have Megatron's parser parse its flags, which it reads from `sys.argv`."""
    ours = index_by_name(list_own_flags())
    with _argv(select_words(words, theirs, ours)), _errors_of_argparse():
        return parse(extra)


def list_their_names(module: ModuleType, extra: ExtraArgs) -> set[str]:
    """Return the flags of `megatron.training.arguments`, and those that the recipe adds."""
    parser = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra is not None:
        parser = extra(parser)
    return {name for action in parser._actions for name in action.option_strings}


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a failed assertion of Megatron about its arguments into a UsageError with its text."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        reason = str(error) or "an assertion without a text"
        raise UsageError(f"Megatron {find_megatron_version()} refuses the recipe's arguments: {reason}") from error


def select_words(words: Sequence[str], names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the flags of `names` with their values, and the flags that are in neither list."""
    selected: list[str] = []
    for flag in split_words(words):
        name = flag[0].partition("=")[0]
        if name in names or name not in others:
            selected += flag
    return selected


@contextlib.contextmanager
def _argv(words: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _errors_of_argparse() -> Iterator[None]:
    """Turn the error that argparse prints into a UsageError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as ended:
        if not ended.code:
            raise
        *_, last = said.getvalue().strip().splitlines() or [""]
        raise UsageError(f"Megatron's parser: {last.partition('error: ')[2] or last}") from None
    finally:
        if sys.exc_info()[0] is None:
            sys.stderr.write(said.getvalue())
