"""All flags: our own, Megatron's that are used, and Megatron's that are not."""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_rl.arguments import generated, listed, spelled
from megatron_rl.config.flag import Flag, Kind, flags_of
from megatron_rl.config.settings import Subjects


def all_flags() -> list[Flag]:
    """Every flag once. What our own configuration defines goes before Megatron's spelling, and that before fields."""
    everything = (*own_flags(), *_present(spelled.flags()), *generated.flags(), *listed.flags())
    return list(_without_repeats(everything))


def own_flags() -> Iterator[Flag]:
    """The flags of `megatron_rl.config.settings`, which are there without megatron."""
    for subject, config in typing.get_type_hints(Subjects).items():
        yield from flags_of(config, subject)


def _present(flags: Iterable[Flag]) -> Iterator[Flag]:
    """The flags, those refused whose fields the installed megatron-core lacks."""
    fields = {subject: _field_names(config) for subject, config in generated.configs().items()}
    for flag in flags:
        missing = [target for target in flag.targets if not _has(target, fields)]
        if missing:
            version = generated.installed_version()
            remedy = f"megatron-core {version} does not have it; drop the flag or install another megatron-core"
            flag = dataclasses.replace(flag, kind=Kind.REFUSED, allowed=(), targets=(), remedy=remedy)
        yield flag


def _field_names(config: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _has(target: str, fields: Mapping[str, set[str]]) -> bool:
    subject, _, field = target.partition(".")
    return subject not in fields or field in fields[subject]


def _without_repeats(flags: Iterable[Flag]) -> Iterator[Flag]:
    taken: set[str] = set()
    for flag in flags:
        names = [name for name in flag.names if name not in taken]
        taken.update(names)
        if names:
            yield dataclasses.replace(flag, name=names[0], aliases=tuple(names[1:]))


@dataclasses.dataclass(frozen=True)
class Given:
    """A value and the flag it came from, as it was written."""

    value: Any
    source: str
