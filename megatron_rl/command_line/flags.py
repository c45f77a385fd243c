"""The flags that the parser knows: our own and Megatron's.

megatron_flags.toml says how each of Megatron's flags is treated. A field of megatron-core that is not in that file is
refused. A newer version may add a field that changes the model, and neither the engines nor the export of weights would
know. `other_projects` rewrites the flags of other projects before.
"""

import ast
import dataclasses
import fnmatch
import functools
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.settings import Subjects
from megatron_rl.flag import Flag, Kind, derive_flag, derive_flags
from megatron_rl.platforms.megatron_configs import find_megatron_version, import_configs

_FILE = Path(__file__).with_name("megatron_flags.toml")
_KINDS = {"without_effect": Kind.IGNORED, "refused": Kind.REFUSED}


def list_flags() -> list[Flag]:
    """List every flag once.

    Our own configuration's flags come first, then the scripts' spellings, then the fields.
    """
    everything = (*list_own_flags(), *_refuse_missing(list_script_flags()), *list_field_flags())
    taken: set[str] = set()
    flags = []
    for flag in (*everything, *list_unused(_read_file())):
        names = [name for name in flag.names if name not in taken]
        taken.update(names)
        if names:
            flags.append(dataclasses.replace(flag, name=names[0], aliases=tuple(names[1:])))
    return flags


def find_other_defaults() -> Mapping[str, tuple[str, str]]:
    """Return flags that Megatron's scripts know too, each with our default and theirs."""
    return {name: (str(own), str(theirs)) for name, (own, theirs) in _read_file()["other_defaults"].items()}


def list_own_flags() -> Iterator[Flag]:
    """List the flags of our own configuration, which need no megatron."""
    for subject, config in typing.get_type_hints(Subjects).items():
        yield from derive_flags(config, subject)


def list_script_flags() -> list[Flag]:
    """List used flags that Megatron's scripts add to megatron-core's fields, or spell in another way."""
    return [Flag(name=name, **_read_entry(entry)) for name, entry in _read_file()["scripts"].items()]


def list_field_flags() -> Iterator[Flag]:
    """List the flags of megatron-core's fields, used or not."""
    classes, table = import_configs(), _read_file()
    without = table["without_flag"]["fields"].split()
    for field, annotation in _list_fields(classes["transformer"]):
        names = field.metadata.get("argparse_meta", {}).get("arg_names", ())
        flag = derive_flag(field, annotation, f"transformer.{field.name}", names)
        if flag is not None and field.name not in without:
            entry = table["transformer"].get(field.name)
            changes = _reject_field(field.name, flag) if entry is None else _read_entry(entry)
            yield dataclasses.replace(flag, **changes)
    for field, annotation in _list_fields(classes["optimizer"]):
        flag = derive_flag(field, annotation, f"optimizer.{field.name}")
        if flag is not None and field.name in table["optimizer"]:
            yield dataclasses.replace(flag, **_read_entry(table["optimizer"][field.name]))


def list_unused(table: Mapping[str, Any]) -> Iterator[Flag]:
    """List the flags of a table that have no effect here, and those that are refused."""
    for kind, reason, words in _list_groups(table):
        for word in words:
            if word.startswith("--"):
                name, mark, harmless = _split_mark(word)
                allowed = tuple(_read_number(value) for value in harmless.split("|")) if harmless else ()
                yield Flag(
                    name=name,
                    kind=kind,
                    remedy=reason,
                    convert=(_read_number if harmless else str) if mark else None,
                    nargs=mark if mark in ("+", "*") else None,
                    allowed=allowed if harmless or kind is Kind.REFUSED else None,
                )


def _read_number(word: str) -> float | str:
    """Read a number if the word is one, so that 0 and 0.0 are the same."""
    try:
        return float(word)
    except ValueError:
        return word


@functools.cache
def _read_file() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def _read_entry(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's entry of a flag, as arguments of Flag."""
    if isinstance(entry, str):
        return {"help": entry}
    arguments: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "sets":
            arguments["targets"] = (value,) if isinstance(value, str) else tuple(value)
            arguments.setdefault("default", None)
        elif key == "own_default":
            arguments |= {"default": value, "is_own_default": True}
        elif key == "type":
            arguments["convert"] = _TYPES[value]
        elif key == "without_effect":
            arguments |= {"kind": Kind.IGNORED, "remedy": value}
        else:
            arguments[key] = tuple(value) if isinstance(value, list) else value
    return arguments


def _reject_field(name: str, flag: Flag) -> dict[str, Any]:
    """Say why the flag of a field of TransformerConfig has no effect or is refused, as arguments of Flag."""
    kind, reason = _find_reason(name)
    if kind is Kind.IGNORED:
        return {"kind": kind, "remedy": reason, "targets": ()}
    # The default changes nothing, and neither does a count of 0.
    harmless = () if flag.is_switch else (flag.default, 0) if flag.convert is int else (flag.default,)
    return {"kind": kind, "remedy": reason, "targets": (), "allowed": harmless}


def _find_reason(name: str) -> tuple[Kind, str]:
    """Find how a field of TransformerConfig that is not used is treated; exact names precede patterns."""
    reasons = _index_reasons()
    pattern = name if name in reasons else next(word for word in reasons if fnmatch.fnmatchcase(name, word))
    return reasons[pattern]


@functools.cache
def _index_reasons() -> Mapping[str, tuple[Kind, str]]:
    """Return the kinds and reasons of fields and patterns of fields, in the file's order."""
    groups = _list_groups(_read_file())
    return {word: (kind, reason) for kind, reason, words in groups for word in words if not word.startswith("--")}


def _list_groups(table: Mapping[str, Any]) -> Iterator[tuple[Kind, str, list[str]]]:
    for section, kind in _KINDS.items():
        for reason, words in table.get(section, {}).items():
            yield kind, reason, words.split()


def _split_mark(word: str) -> tuple[str, str, str]:
    """Split a listed flag into its name, the mark of its number of words, and the value that changes nothing."""
    for mark in "=+*":
        name, found, harmless = word.partition(mark)
        if found:
            return name, mark, harmless
    return word, "", ""


def _list_fields(config: type) -> Iterator[tuple["dataclasses.Field[Any]", object]]:
    hints = typing.get_type_hints(config)
    return ((field, hints[field.name]) for field in dataclasses.fields(config))


def _refuse_missing(flags: Iterable[Flag]) -> Iterator[Flag]:
    """Yield the flags; refuse those whose fields the installed megatron-core lacks."""
    configs = import_configs()
    fields = {f"{subject}.{field.name}" for subject in configs for field in dataclasses.fields(configs[subject])}
    for flag in flags:
        if any(target.partition(".")[0] in configs and target not in fields for target in flag.targets):
            remedy = (
                f"megatron-core {find_megatron_version()} does not have it; drop the flag or install another version"
            )
            flag = dataclasses.replace(flag, kind=Kind.REFUSED, allowed=(), targets=(), remedy=remedy)
        yield flag


def _read_window(word: str) -> int:
    """Convert Megatron's pair of tokens seen to the left and to the right into the count of all tokens seen."""
    left, right = (int(part) for part in word.strip("()").split(","))
    if right != 0:
        raise ValueError
    return left + 1


def _read_layer_frequency(word: str) -> int | tuple[int, ...]:
    """Read N (every N-th layer has experts), or a pattern such as ([0]*2+[1]*46); -1 leaves it to the model."""
    if word.strip() == "-1":
        return 1
    return _evaluate(ast.parse(word.strip(), mode="eval").body)


def _evaluate(node: ast.expr) -> Any:
    """Evaluate an expression of whole numbers, lists of them, + and *; refuse any other."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return tuple(_evaluate(element) for element in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        pair = {type(left), type(right)}
        if pair == ({tuple} if isinstance(node.op, ast.Add) else {tuple, int}):
            return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError


# The readers of a flag's words, by `type` in the file.
_TYPES: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "window": _read_window,
    "layer_frequency": _read_layer_frequency,
    "dtype": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}.__getitem__,
}
