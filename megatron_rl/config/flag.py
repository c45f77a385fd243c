"""What a flag is, and how a field of a dataclass becomes one. Nothing here needs torch."""

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UsageError

# How alike two words are, of 1, where one is a slip of the pen for the other.
_NEAR = 0.85


class Kind(enum.StrEnum):
    """What becomes of a flag that Megatron's scripts know."""

    USED = "used"
    IGNORED = "without effect here"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag: how it is spelled, how its words become a value, and where that value goes."""

    name: str
    aliases: tuple[str, ...] = ()
    kind: Kind = Kind.USED
    # "transformer.layernorm_epsilon" or "checkpoint.save"; a flag that means several things has several.
    targets: tuple[str, ...] = ()
    # Makes the value of one word; None for a switch, whose value is `const`.
    convert: Callable[[str], object] | None = None
    const: object = True
    nargs: str | int | None = None
    choices: tuple[object, ...] = ()
    # What holds without the flag; None leaves it to whoever receives the value.
    default: object = None
    # The values that are accepted; None accepts all. A refused flag still accepts those that ask for nothing.
    allowed: tuple[object, ...] | None = None
    help: str = ""
    # Why it has no effect or is refused, and what to write instead.
    remedy: str = ""
    # Whether Megatron's scripts know this flag too.
    megatron: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_switch(self) -> bool:
        return self.convert is None

    def value(self, words: Sequence[str], name: str | None = None) -> object:
        """The value that these words on the command line mean, under the name they were written with."""
        name = name or self.name
        if self.convert is None:
            return self.const
        items = tuple(self._item(word, name) for word in words)
        return items[0] if self.nargs is None else items

    def check_count(self, words: Sequence[str], name: str) -> None:
        """A UsageError unless as many words follow the flag as it takes."""
        if self.convert is None and words:
            raise UsageError(f"unexpected {words[0]!r}: {name} takes no value; drop it")
        if self.convert is not None and not words and self.nargs != "*":
            raise UsageError(f"{name}: expected one argument; write {name} {self.value_text()}")
        if self.convert is not None and self.nargs is None and len(words) > 1:
            raise UsageError(f"unexpected {words[1]!r}: {name} takes one value; write {name} {self.value_text()}")

    def _item(self, word: str, name: str) -> object:
        assert self.convert is not None
        try:
            item = self.convert(word)
            if item != item:
                raise ValueError("nan")
        except (ValueError, KeyError, SyntaxError):
            raise UsageError(f"{name} {word}: not a valid value; write {name} {self.value_text()}") from None
        if self.choices and item not in self.choices:
            raise UsageError(
                f"{name} {word}: not one of the choices{nearest(word, self.choices)}; write {name} {self.value_text()}"
            )
        return item

    def accepts(self, value: object) -> bool:
        items = value if isinstance(value, tuple) else (value,)
        return self.allowed is None or all(item in self.allowed for item in items)

    def value_text(self) -> str:
        """What stands after the flag, for people."""
        if self.convert is None:
            return ""
        if self.choices:
            return "{" + ",".join(text_of(choice) for choice in self.choices) + "}"
        name = {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(self.convert, "VALUE")  # type: ignore[call-overload]
        return name if self.nargs is None else f"{name} ..."


def nearest(word: str, among: Iterable[object]) -> str:
    """ " (the nearest is ...)" where something is near, else nothing."""
    near = meant(word, among)
    return "" if near is None else f" (the nearest is {near})"


def meant(word: str, among: Iterable[object]) -> str | None:
    """What was probably meant: a slip of the pen away, dashes aside."""
    plain = {_plain(text_of(item)): text_of(item) for item in among}
    written = _plain(word)
    # One wrong letter is more of a short word.
    cutoff = min(_NEAR, 1 - 1 / max(len(written), 4))
    near = difflib.get_close_matches(written, plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def _plain(word: str) -> str:
    return word.strip("-").replace("_", "-")


def text_of(value: object) -> str:
    """A value as one would write it on the command line."""
    if isinstance(value, enum.Enum):
        return str(value) if isinstance(value, enum.StrEnum) else value.name
    if isinstance(value, tuple | list):
        return " ".join(text_of(item) for item in value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return str(value).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Option:
    """What the flag of a field of our own configuration needs beyond the field's name, type and default."""

    help: str
    # The spellings, where they are not the field's name.
    names: tuple[str, ...] = ()
    megatron: bool = True
    allowed: tuple[object, ...] | None = None
    remedy: str = ""


def flags_of(config: type, subject: str) -> list[Flag]:
    """The flags of one of our own configurations."""
    hints = typing.get_type_hints(config, include_extras=True)
    flags = []
    for field in dataclasses.fields(config):
        annotation, option = typing.get_args(hints[field.name])
        flag = flag_of_field(field, annotation, f"{subject}.{field.name}", option.names)
        assert flag is not None, f"{config.__name__}.{field.name} has a type that no command line can say"
        flags.append(
            dataclasses.replace(
                flag, help=option.help, megatron=option.megatron, allowed=option.allowed, remedy=option.remedy
            )
        )
    return flags


def flag_of_field(field: dataclasses.Field, annotation: object, target: str, names: Sequence[str] = ()) -> Flag | None:
    """The flag of a field, as Megatron derives one; None where the type is none that a command line can say.

    A boolean that is off is a switch under its own name, one that is on a switch with "no" or "disable" before it.
    """
    shape = _shape(annotation)
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


def _shape(annotation: object) -> dict[str, Any] | None:
    """How words become a value of this type, as arguments of Flag."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not types.NoneType]
        return _shape(inner[0]) if len(inner) == 1 else None
    if origin is typing.Literal:
        return {"convert": type(arguments[0]), "choices": arguments}
    if origin is list:
        inner_shape = _shape(arguments[0])
        return None if inner_shape is None else {**inner_shape, "nargs": "+"}
    if isinstance(annotation, type) and issubclass(annotation, enum.StrEnum):
        return {"convert": annotation, "choices": tuple(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return {"convert": annotation.__getitem__, "choices": tuple(annotation)}
    return {"convert": annotation} if annotation in (bool, int, float, str, Path) else None


def index(flags: Iterable[Flag]) -> Mapping[str, Flag]:
    """Every spelling with its flag; where two claim one spelling, the first has it."""
    by_name: dict[str, Flag] = {}
    for flag in flags:
        for name in flag.names:
            by_name.setdefault(name, flag)
    return by_name
