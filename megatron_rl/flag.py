"""Flags, and their derivation from fields of dataclasses. Nothing here needs torch."""

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.errors import UsageError

# Two words with at least this similarity (of 1) are taken for a misspelling.
_NEAR = 0.85

T = TypeVar("T")

# The bounds of numbers: the text after "must be", the test, and the remedy.
BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "at least 0": (lambda number: number >= 0, "write 0 or more"),
    "at least 1": (lambda number: number >= 1, "write 1 or more"),
    "above 0": (lambda number: number > 0, "write more than 0"),
    "above 1": (lambda number: number > 1, "write more than 1"),
    "finite and above 0": (lambda number: 0 < number < math.inf, "write more than 0"),
    "finite and at least 0": (lambda number: 0 <= number < math.inf, "write 0 or more"),
    "a finite duration above 0": (lambda number: 0 < number < math.inf, "write one that is"),
    "at least 0 and below 1": (lambda number: 0 <= number < 1, "write a number in that range"),
    "between 0 and 1": (lambda number: 0 <= number <= 1, "write a number in that range"),
    "above 0 and below 1": (lambda number: 0 < number < 1, "write a number in that range"),
}


class Kind(enum.StrEnum):
    """The treatment of a flag that Megatron's scripts know."""

    USED = "used"
    IGNORED = "without effect here"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: its spellings, the conversion of its words to a value, and the targets of that value."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Kind = Kind.USED
    # The fields that get the value, such as "checkpoint.save"; several if the flag means several things.
    targets: tuple[str, ...] = ()
    # Turns one word into a value; None for a switch, whose value is `const`.
    convert: Callable[[str], object] | None = None
    const: object = True
    # As in argparse; with "?" the flag without a word means `const` too.
    nargs: str | int | None = None
    choices: tuple[object, ...] = ()
    # Whether FILE.py:FUNCTION is accepted, beside the choices if there are any.
    takes_function: bool = False
    # The value without the flag; if None, the code that receives the value chooses it.
    default: object = None
    # Whether that default is this package's own, unlike Megatron's.
    is_own_default: bool = False
    # The accepted values; None accepts all. A refused flag still accepts values that ask for nothing.
    allowed: tuple[object, ...] | None = None
    # The bound of accepted numbers, a key of BOUNDS; "" accepts all.
    bound: str = ""
    help: str = ""
    # The reason of a refusal, and what to write instead.
    remedy: str = ""
    # Whether Megatron's scripts know this flag too.
    megatron: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_switch(self) -> bool:
        return self.convert is None

    def read(self, words: Sequence[str], name: str | None = None) -> object:
        """Turn words of the command line into a value; `name` is the spelling that was used."""
        name = name or self.name
        if self.convert is None:
            return self.const
        items = tuple(self._read_item(word, name) for word in words)
        if self.nargs == "?":
            return items[0] if items else self.const
        return items[0] if self.nargs is None else items

    def check_count(self, words: Sequence[str], name: str) -> None:
        """Raise a UsageError unless the flag takes this number of words."""
        if self.convert is None and words:
            raise UsageError(f"unexpected {words[0]!r}: {name} takes no value; drop it")
        if self.convert is not None and not words and self.nargs not in ("*", "?"):
            raise UsageError(f"{name}: expected one argument; write {name} {self.value_text()}")
        if self.convert is not None and self.nargs in (None, "?") and len(words) > 1:
            raise UsageError(f"unexpected {words[1]!r}: {name} takes one value; write {name} {self.value_text()}")

    def _read_item(self, word: str, name: str) -> object:
        assert self.convert is not None
        try:
            item = self.convert(word)
            if item != item:
                raise ValueError("nan")
        except (ValueError, KeyError, SyntaxError):
            raise UsageError(f"{name} {word}: not a valid value; write {name} {self.value_text()}") from None
        if self.choices and item not in self.choices and not (self.takes_function and names_function(word)):
            near = suggest_nearest(word, self.choices)
            remedy = self.remedy or f"write {name} {self.value_text()}"
            raise UsageError(f"{name} {word}: not one of the choices{near}; {remedy}")
        return item

    def check_bound(self, value: object, name: str | None = None) -> Iterator[str]:
        """Yield a problem for the value, or for each value of a list, that is outside the flag's bound."""
        if not self.bound or value is None:
            return
        holds, remedy = BOUNDS[self.bound]
        for item in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(item, str) and not holds(item):
                yield f"{name or self.name} {format_value(item)} must be {self.bound}: {self.remedy or remedy}"

    def accepts(self, value: object) -> bool:
        items = value if isinstance(value, tuple) else (value,)
        return self.allowed is None or all(item in self.allowed for item in items)

    def value_text(self) -> str:
        """Describe, for people, the value that follows the flag."""
        if self.convert is None:
            return ""
        if self.choices:
            others = ("FILE.py:FUNCTION",) if self.takes_function else ()
            return "{" + ",".join((*map(format_value, self.choices), *others)) + "}"
        if self.takes_function:
            return "FILE.py:FUNCTION" if self.nargs is None else "FILE.py:FUNCTION ..."
        if isinstance(self.convert, IntegerOr):
            return str(self.convert)
        name = {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(self.convert, "VALUE")  # type: ignore[call-overload]
        return name if self.nargs is None else f"{name} ..."


@dataclasses.dataclass(frozen=True)
class IntegerOr:
    """Reads a whole number, or one of these words."""

    words: tuple[str, ...]

    def __call__(self, word: str) -> int | str:
        return word if word in self.words else int(word)

    def __str__(self) -> str:
        return "{" + ",".join(("INTEGER", *self.words)) + "}"


def names_function(word: str) -> bool:
    """Return whether a word has the form FILE.py:FUNCTION."""
    file, _, function = word.rpartition(":")
    return file.endswith(".py") and function.isidentifier()


def suggest_nearest(word: str, among: Iterable[object]) -> str:
    """Return " (the nearest is ...)" if a word is near, else an empty text."""
    among = list(among)
    near = find_nearest(word, among)
    if near is not None:
        return f" (the nearest is {near})"
    related = find_related(word, [format_value(item) for item in among])
    return f" (flags with these words: {', '.join(related)})" if related else ""


def find_nearest(word: str, among: Iterable[object]) -> str | None:
    """Find the word that was probably meant, the nearest without dashes; None if none is near."""
    plain = {_strip_dashes(format_value(item)): format_value(item) for item in among}
    written = _strip_dashes(word)
    # One wrong letter is a larger part of a short word.
    cutoff = min(_NEAR, 1 - 1 / max(len(written), 4))
    near = difflib.get_close_matches(written, plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def find_related(word: str, among: Iterable[str]) -> list[str]:
    """Find the flags that end with the words of a flag; if none does, those that differ in the last word alone."""
    words = _strip_dashes(word).split("-")
    if not word.startswith("--") or len(words) < 2:
        return []
    known = {name: _strip_dashes(name).split("-") for name in among if name.startswith("--")}
    longer = [name for name, its in known.items() if its[-len(words) :] == words]
    return sorted(longer or [name for name, its in known.items() if len(words) > 2 and its[:-1] == words[:-1]])


def _strip_dashes(word: str) -> str:
    return word.strip("-").replace("_", "-")


def format_value(value: object) -> str:
    """Write a value as on the command line."""
    if isinstance(value, enum.Enum):
        return str(value) if isinstance(value, enum.StrEnum) else value.name
    if isinstance(value, tuple | list):
        return " ".join(format_value(item) for item in value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return str(value).removeprefix("torch.")


def own_flag(
    default: T,
    help: str,
    *names: str,
    bound: str = "",
    remedy: str = "",
    choices: tuple[object, ...] = (),
    takes_function: bool = False,
    megatron: bool = False,
    alone: object = None,
) -> T:
    """Declare a field of our own configuration with a flag; it is named after the field unless names are given.

    `choices` are for a field whose type does not list them. `megatron` says that Megatron's scripts have the flag too.
    `alone` is the value that the flag means without a word; None if it needs one.
    """
    metadata: dict[str, object] = {"help": help, "names": names, "bound": bound, "remedy": remedy, "megatron": megatron}
    metadata |= {"takes_function": takes_function} | ({"choices": choices} if choices else {})
    metadata |= {"nargs": "?", "const": alone} if alone is not None else {}
    return dataclasses.field(default=default, metadata=metadata)


def megatron_flag(default: T, help: str, *names: str, bound: str = "", remedy: str = "") -> T:
    """Declare a field of our own configuration with a flag that Megatron's scripts have too."""
    return own_flag(default, help, *names, bound=bound, remedy=remedy, megatron=True)


def derive_flags(config: type, subject: str) -> list[Flag]:
    hints = typing.get_type_hints(config)
    flags = []
    for field in dataclasses.fields(config):
        metadata = dict(field.metadata)
        flag = derive_flag(field, hints[field.name], f"{subject}.{field.name}", metadata.pop("names"))
        assert flag is not None, f"{config.__name__}.{field.name} has a type that no command line can say"
        flags.append(dataclasses.replace(flag, **metadata))
    return flags


def derive_flag(field: dataclasses.Field, annotation: object, target: str, names: Sequence[str] = ()) -> Flag | None:
    """Derive a field's flag as Megatron does; return None if no command line can write a value of its type.

    A boolean that is off gets a switch of its own name; one that is on gets a switch with "no" or "disable" before it.
    """
    shape = _derive_shape(annotation)
    if shape is None:
        return None
    dashed = field.name.replace("_", "-")
    default = None if field.default is dataclasses.MISSING else field.default
    if shape["convert"] is bool:
        negative = default is True
        names = names or ((f"--no-{dashed}", f"--disable-{dashed}") if negative else (f"--{dashed}",))
        shape = {"const": not negative}
    names = names or (f"--{dashed}",)
    return Flag(name=names[0], aliases=tuple(names[1:]), targets=(target,), default=default, **shape)


def _derive_shape(annotation: object) -> dict[str, Any] | None:
    """Return the conversion of words to a value of this type, as arguments of Flag."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        if len(inner) == 2 and inner[0] is int and typing.get_origin(inner[1]) is typing.Literal:
            return {"convert": IntegerOr(typing.get_args(inner[1]))}
        return _derive_shape(inner[0]) if len(inner) == 1 else None
    if origin is typing.Literal:
        return {"convert": type(arguments[0]), "choices": arguments}
    if origin is list:
        inner_shape = _derive_shape(arguments[0])
        return None if inner_shape is None else {**inner_shape, "nargs": "+"}
    if isinstance(annotation, type) and issubclass(annotation, enum.StrEnum):
        return {"convert": annotation, "choices": tuple(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"convert": annotation.__getitem__, "choices": tuple(annotation)}
    return {"convert": annotation} if annotation in (bool, int, float, str, Path) else None


def index_by_name(flags: Iterable[Flag]) -> Mapping[str, Flag]:
    """Map every spelling to its flag; the first of two flags with the same spelling gets it."""
    by_name: dict[str, Flag] = {}
    for flag in flags:
        for name in flag.names:
            by_name.setdefault(name, flag)
    return by_name
