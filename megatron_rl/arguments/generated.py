"""Flags that come from the fields of megatron-core's own dataclasses, whichever version is installed."""

import dataclasses
import fnmatch
import typing
from collections.abc import Iterator
from typing import Any

from megatron_rl.arguments.fields import (
    ALLOWED,
    ARCHITECTURE,
    DEFAULTS,
    IGNORED,
    OPTIMIZER,
    REFUSED,
    SWITCHED_OFF,
    USED,
    WITHOUT_FLAG,
)
from megatron_rl.config.flag import Flag, Kind, flag_of_field

Field = tuple["dataclasses.Field[Any]", object]


def installed_version() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def configs() -> dict[str, type]:
    """megatron-core's dataclasses, under the names that targets use."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


def flags() -> Iterator[Flag]:
    """The flags of every field that has one, whatever becomes of it."""
    classes = configs()
    for field, annotation in _fields(classes["transformer"]):
        names = field.metadata.get("argparse_meta", {}).get("arg_names", ())
        flag = flag_of_field(field, annotation, f"transformer.{field.name}", names)
        if flag is not None and field.name not in WITHOUT_FLAG:
            yield dataclasses.replace(flag, **_treatment(field.name, flag))
    for field, annotation in _fields(classes["optimizer"]):
        flag = flag_of_field(field, annotation, f"optimizer.{field.name}")
        if flag is not None and field.name in OPTIMIZER:
            yield dataclasses.replace(flag, help=OPTIMIZER[field.name], **_changes(field.name, flag))


def _fields(config: type) -> Iterator[Field]:
    hints = typing.get_type_hints(config)
    return ((field, hints[field.name]) for field in dataclasses.fields(config))


def _treatment(name: str, flag: Flag) -> dict[str, Any]:
    """What becomes of the flag of a field of TransformerConfig, as changes to it."""
    if name == "normalization":
        return {"help": "The norms.", "targets": ("described.normalization",), **_changes(name, flag), "default": None}
    if name in ARCHITECTURE:
        path, text = ARCHITECTURE[name]
        const = name not in SWITCHED_OFF
        return {"help": text, "targets": (f"architecture.{path}",), "const": const, "default": None}
    if name in USED:
        return {"help": USED[name], **_changes(name, flag)}
    if name in IGNORED:
        return {"kind": Kind.IGNORED, "remedy": IGNORED[name], "targets": ()}
    remedy = next(remedy for pattern, remedy in REFUSED.items() if fnmatch.fnmatchcase(name, pattern))
    # Nothing is asked for by the value that holds without the flag, nor by a count of none.
    harmless = () if flag.is_switch else (flag.default, 0) if flag.convert is int else (flag.default,)
    return {"kind": Kind.REFUSED, "remedy": remedy, "targets": (), "allowed": harmless}


def _changes(name: str, flag: Flag) -> dict[str, Any]:
    allowed, remedy = ALLOWED.get(name, (None, ""))
    return {"default": DEFAULTS.get(name, flag.default), "allowed": allowed, "remedy": remedy}
