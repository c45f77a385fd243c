"""The translation of another project's run: the settings of its script, and the command line for this package."""

import contextlib
import dataclasses
import functools
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.command_line import flags
from megatron_rl.errors import UsageError
from megatron_rl.flag import Flag, index_by_name
from megatron_rl.platforms import select

_FILE = Path(__file__).with_name("translations.toml")
_ON, _OFF, _NOTHING = ("true", "on", "1"), ("false", "off", "0"), ("null", "none", "~")


@dataclasses.dataclass
class Translation:
    """A command line, and the settings that it omits."""

    source: str
    """The project that the script was written for."""
    words: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Our flags, each with its values."""
    nodes: int = 1
    """The number of hosts that train."""
    ranks: int = 1
    """The number of ranks on each host."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Other notes for the reader."""
    meaningless: list[str] = dataclasses.field(default_factory=list)
    """Settings that change nothing here."""
    changed: list[str] = dataclasses.field(default_factory=list)
    """Settings that change training and are not carried over, each with the reason."""
    missing: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Missing settings, each with the flags that settle it."""

    def write(self, flag: str, *values: object) -> None:
        self.words[flag] = [_format(value) for value in values]

    def write_unless_default(self, flag: str, value: object) -> None:
        """Write a flag unless its value is the default here."""
        known = index_flags()[flag]
        # A value that cannot be read is written too: our parser reports it.
        with contextlib.suppress(UsageError):
            if known.read([_format(value)]) == known.default:
                return
        self.write(flag, value)

    def count(self, flag: str, otherwise: int | None = None) -> int | None:
        text = self.words.get(flag, [""])[0]
        return int(text) if text.isdigit() else otherwise

    def require(self, text: str, *settled_by: str) -> None:
        """Note what a user must add or change, unless one of these flags settles it."""
        self.missing[text] = settled_by


class TheirSettings:
    """The settings of a script, with the project's defaults for the rest, and a record of those that were read."""

    def __init__(self, given: Mapping[str, str], defaults: Mapping[str, str]):
        self.given = given
        self.all: Mapping[str, str] = {**defaults, **given}
        self.asked: set[str] = set()

    def text(self, key: str) -> str:
        """Return a setting's text; return "" if it is missing, or if its text means none."""
        self.asked.add(key)
        text = self.all.get(key, "")
        return "" if text.lower() in _NOTHING and key not in _NAMED_NONE else text

    def is_on(self, key: str) -> bool:
        return self.text(key).lower() in _ON

    def number(self, key: str) -> float | None:
        """Return a setting's number; return None if it is not a number, for instance a variable of the shell."""
        try:
            number = float(self.text(key).replace("_", ""))
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    def count(self, key: str) -> int | None:
        number = self.number(key)
        return int(number) if number is not None and number.is_integer() else None


# Settings that have a value with the name none.
_NAMED_NONE = ("scale_rewards", "policy.megatron_cfg.moe_router_load_balancing_type")


@functools.cache
def read_table(project: str) -> Mapping[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))[project]


@functools.cache
def index_flags() -> Mapping[str, Flag]:
    # The flags depend on the installed megatron-core.
    select("cpu").install()
    return index_by_name(flags.list_flags())


def carry_settings(table: Mapping[str, Any], theirs: TheirSettings, to: Translation) -> None:
    """Carry over the settings that have a flag of their own here, and name those that do not."""
    quiet = set(table["unsaid"].split())
    for key in theirs.all:
        entry = table["settings"].get(key)
        if entry is not None:
            _carry(to, key, theirs, {"flag": entry} if not isinstance(entry, dict) else entry)
        elif key in theirs.asked:
            continue
        elif key in theirs.given and (key in quiet or key in table["defaults"]):
            to.meaningless.append(key)
        elif key in theirs.given:
            to.changed.append(f"{key} = {theirs.given[key]}: this package has no such setting")


def _carry(to: Translation, key: str, theirs: TheirSettings, entry: Mapping[str, Any]) -> None:
    value = theirs.text(key)
    values = entry.get("values")
    if values is not None:
        known = value.lower() if value.lower() in (*_ON, *_OFF) else value
        if known not in values:
            to.changed.append(f"{key} = {value}: {entry.get('else') or _list_values(values)}")
            return
        value = values[known]
    if not value:
        if key in theirs.given:
            to.meaningless.append(key)
        return
    name = entry["flag"]
    if index_flags()[name].is_switch:
        if value.lower() in _ON:
            to.write(name)
    elif key in theirs.given:
        to.write(name, value)
    else:
        to.write_unless_default(name, value)


def _list_values(values: Mapping[str, str]) -> str:
    listed = ", ".join(values)
    return f"here it is always {listed}" if len(values) == 1 else f"only {listed} can be carried over"


def place_devices(to: Translation, nodes: int, per_node: int, is_shared: bool, for_engines: int = 0) -> None:
    """Divide the devices of a run between ranks and engines, which do not share any here.

    `is_shared` says that they take turns on the same devices in the other project. If not, `for_engines` is the number
    of the engines' own devices.
    """
    of_engine = to.count("--rollout-tensor-parallel-size", 1) or 1
    of_model = math.prod(to.count(f"--{name}-parallel-size", 1) or 1 for name in ("tensor-model", "pipeline-model"))
    of_model *= to.count("--context-parallel-size", 1) or 1
    to.nodes, to.ranks = nodes, per_node
    if not is_shared:
        if for_engines:
            to.write_unless_default("--rollout-num-engines", max(1, for_engines // of_engine))
        return
    if nodes > 1:
        to.nodes = nodes - nodes // 2
        to.require(
            f"{to.source} trains and samples alternately on {nodes} hosts of {per_node} devices; here {to.nodes} of "
            f"them train: start the engines on the others, and write --rollout-endpoint with their address",
            "--rollout-endpoint",
        )
        return
    for num_engines in range(per_node // 2 // of_engine, 0, -1):
        ranks = per_node - num_engines * of_engine
        if ranks % of_model == 0:
            to.ranks = ranks
            to.write_unless_default("--rollout-num-engines", num_engines)
            to.notes.append(
                f"{to.source} trains and samples alternately on {per_node} devices; here {ranks} train while the other "
                f"{per_node - ranks} sample."
            )
            return
    to.require(
        f"an engine has {of_engine} devices and a model's ranks have {of_model}, but there are {per_node}: write "
        "smaller parallel sizes, --rollout-endpoint, or --rollout-colocate, with which both share devices",
        "--rollout-endpoint",
        "--rollout-colocate",
    )


def _format(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
