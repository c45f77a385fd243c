"""The parser of flags: from the words of a command line to values and mistakes. Nothing here needs torch.

The trainer and a sidecar that a person starts read their flags with it. All mistakes are collected, and those that only
follow from another one are left out.
"""

import argparse
import dataclasses
import functools
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron_rl.errors import InputError, UsageError
from megatron_rl.flag import Flag, Kind, find_nearest, index_by_name, suggest_nearest

_NAME = re.compile(r"--[a-z][\w-]*")


@dataclasses.dataclass(frozen=True)
class Given:
    """A value and the flag it came from, as it was written."""

    value: Any
    source: str
    name: str = ""
    is_implied: bool = False
    """Whether another project's script implies it, so that everything else goes before it."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The reason for a flag that a command line does not have itself."""

    source: str
    """The flag of another project as it was written, or what implies ours."""
    name: str = ""
    """The name of that flag; empty if ours is implied."""


@dataclasses.dataclass
class ParsedFlags:
    """The values of a command line, and its mistakes."""

    flags: Sequence[Flag]
    given: dict[str, Given] = dataclasses.field(default_factory=dict)
    """The values, by the fields that get them, such as "checkpoint.save"."""
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    faulty: set[str] = dataclasses.field(default_factory=set)
    """Flags that are known to be wrong: problems that follow from their values are not reported too."""
    input_error: InputError | None = None
    """The error of reading a file; it is raised itself if it is the only problem."""
    written: set[str] = dataclasses.field(default_factory=set)
    """The names of the flags that were read."""
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    """The origins of the flags that are not written themselves, by their names."""
    ignored: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    """Flags without effect, by reason."""
    is_repeatable: bool = True
    """Whether the last value of a flag counts. If not, other values are a mistake, and lists are joined."""

    def fault(self, problem: str, *names: str) -> None:
        """Add a problem of these flags."""
        self.problems.append(problem)
        self.faulty.update(names)

    def keep(self, target: str, new: Given) -> None:
        """Keep a value, unless it is implied and another one is given."""
        old = self.given.get(target)
        if old is None or old.is_implied:
            self.given[target] = new
        elif old.name == new.name and isinstance(new.value, tuple) and not self.is_repeatable:
            self.given[target] = dataclasses.replace(new, value=old.value + new.value)
        elif old.value != new.value and not new.is_implied:
            if old.name != new.name:
                self.fault(f"{old.source} and {new.source} contradict each other: drop one of them", new.name)
            elif not self.is_repeatable:
                values = " and ".join(given.source.partition(" ")[2] for given in (old, new))
                self.fault(f"{new.name} is given twice, with {values}: drop one", new.name)
            else:
                self.given[target] = new
                self.notes.append(f"{old.source} is overruled by {new.source}, which comes later")

    def consider(self, problems: Iterable[str]) -> None:
        """Add the problems that name no faulty flag; the others follow from a problem that is already reported."""
        for problem in problems:
            named = _NAME.findall(problem)
            if problem in self.problems or not self.faulty.isdisjoint(named):
                continue
            self.problems.append(problem)
            if named and problem.startswith(f"{named[0]} is missing"):
                self.faulty.add(named[0])

    def consider_input(self, error: InputError) -> None:
        self.problems.append(str(error))
        self.input_error = error

    def select_values(self, subject: str) -> dict[str, Any]:
        prefix = f"{subject}."
        return {
            target.removeprefix(prefix): given.value
            for target, given in self.given.items()
            if target.startswith(prefix)
        }

    def raise_problems(self) -> None:
        """Raise all problems as one error, if there are any."""
        if self.input_error is not None and self.problems == [str(self.input_error)]:
            raise self.input_error
        if self.problems:
            raise UsageError(*self.problems)


class FlagParser(argparse.ArgumentParser):
    """A parser that raises a UsageError in place of ending the process.

    Flags cannot be abbreviated, and a flag that was not given leaves no attribute.
    """

    def __init__(
        self, prog: str, description: str, formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter
    ) -> None:
        # argparse makes a formatter for each flag, and each would ask for the terminal's width.
        width = shutil.get_terminal_size().columns - 2
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
            formatter_class=functools.partial(formatter_class, width=width),
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def parse_words(parser: FlagParser, words: Sequence[str], parsed: ParsedFlags, remark: str = "") -> None:
    """Parse words with a parser of `make_parser`; `remark` ends the error of a flag that is unknown."""
    _, rest = parser.parse_known_args(list(words), argparse.Namespace(parsed=parsed))
    # A refused flag is never suggested.
    known = index_by_name(flag for flag in parsed.flags if flag.kind is not Kind.REFUSED)
    names = [word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"]
    for name in names:
        parsed.problems.append(f"unknown flag {name}{suggest_nearest(name, known)}{remark}")
        near = find_nearest(name, known)
        if near is not None:
            # The flag that was probably meant is not reported as missing.
            parsed.faulty.add(known[near].name)
    if rest and not names:
        parsed.problems.append(f"unexpected {rest[0]!r}: every value follows its flag")


def make_parser(prog: str, description: str, flags: Iterable[Flag]) -> FlagParser:
    """Make a parser of these flags; `parse_words` uses it."""
    parser = FlagParser(prog=prog, description=description, formatter_class=_Formatter)
    for flag in flags:
        text = flag.help if flag.kind is Kind.USED else f"{flag.kind}: {flag.remedy}"
        # Any number of words is allowed here, because argparse would stop at the first wrong number.
        parser.add_argument(
            *flag.names, action=_Store, flag=flag, dest=flag.name, help=text.replace("%", "%%"), nargs="*"
        )
    return parser


class _Formatter(argparse.HelpFormatter):
    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Return the values that --help shows after a flag; argparse itself reads any number of words there."""
        return action.flag.value_text() if isinstance(action, _Store) else super()._format_args(action, default_metavar)


class _Store(argparse.Action):
    """An action that keeps the value of a flag under the flag's targets."""

    def __init__(self, *, flag: Flag, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.flag = flag

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        words, parsed, flag = list(values), namespace.parsed, self.flag
        written = option or flag.name
        origin = parsed.origins.get(flag.name, Origin(" ".join((written, *words)), written))
        name = origin.name or written
        parsed.written.add(flag.name)
        try:
            value = self._read(words, name, origin.source)
        except UsageError as error:
            # An error of a flag that is implied says by what.
            parsed.fault(str(error) if origin.name else f"{error} ({origin.source})", flag.name, name)
            return
        if flag.kind is Kind.REFUSED:
            return
        # A value that asks for the behaviour of this package needs no note.
        if flag.kind is Kind.IGNORED and (flag.allowed is None or not flag.accepts(value)):
            parsed.ignored.setdefault(flag.remedy, {})[name] = None
        for target in flag.targets:
            parsed.keep(target, Given(value, origin.source, flag.name, is_implied=not origin.name))

    def _read(self, words: Sequence[str], name: str, source: str) -> object:
        """Return the flag's value, or raise a UsageError if it is wrong or refused."""
        flag = self.flag
        flag.check_count(words, name)
        value = flag.read(words, name)
        if problems := list(flag.check_bound(value, name)):
            raise UsageError(*problems)
        if flag.kind is Kind.REFUSED and (flag.is_switch or not flag.accepts(value)):
            raise UsageError(f"{source} is refused: {flag.remedy}")
        if flag.kind is Kind.USED and not flag.accepts(value):
            raise UsageError(f"{source} is not supported: {flag.remedy}")
        return value
