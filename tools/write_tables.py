"""Write the tables of docs/algorithms.md from the algorithms' own declarations.

python -m tools.write_tables
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.declaration import Algorithm, Preset
from megatron_rl.algorithm.library import ALGORITHMS
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.flag import Flag, derive_flags

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
_BEGIN, _END = "<!-- table of {name}: make flags writes it -->", "<!-- end -->"
_COLUMNS = ("advantage", "loss", "clamp_eps_lower", "clamp_eps_upper", "aggregation")


def write_tables(text: str) -> str:
    """Return the page with its tables written again, each between its two marks."""
    for name, rows in (
        ("presets", _presets()),
        ("advantages", _advantages()),
        ("losses", _losses()),
        ("preferences", _preferences()),
    ):
        begin = _BEGIN.format(name=name)
        before, _, rest = text.partition(begin)
        assert rest, f"{PAGE.name} has no line {begin}"
        _, end, after = rest.partition(_END)
        text = "\n".join([f"{before}{begin}", "", *rows, "", f"{end}{after}"])
    return text


def _presets() -> Iterator[str]:
    flags = _index_flags()
    titles = [flags[name].name for name in ("advantage", "loss", "aggregation")]
    yield f"| name | `{titles[0]}` | `{titles[1]}` | clipped below and above | `{titles[2]}` | also | paper |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for algorithm in ALGORITHMS.values():
        for number, preset in enumerate(algorithm.presets):
            yield _write_row(*_list_cells(preset, flags), _cite(algorithm, preset, number))


def _list_cells(preset: Preset, flags: Mapping[str, Flag]) -> Iterator[str]:
    values = preset.settings
    bounds = [f"{values[name]:g}" for name in ("clamp_eps_lower", "clamp_eps_upper") if name in values]
    yield from (f"`{preset.name}`", f"`{values['advantage']}`", f"`{values['loss']}`", ", ".join(bounds))
    yield f"`{values['aggregation']}`"
    others = {flags[name]: value for name, value in values.items() if name not in _COLUMNS}
    yield ", ".join(f"`{flag.name}`" if flag.is_switch else f"`{flag.name} {value}`" for flag, value in others.items())


def _cite(algorithm: Algorithm, preset: Preset, number: int) -> str:
    link = algorithm.paper.link if number == 0 else "the same"
    return link + (f", {preset.remark}" if preset.remark else "")


def _advantages() -> Iterator[str]:
    yield "| `--grpo-advantage` | | paper |"
    yield "| --- | --- | --- |"
    for algorithm in ALGORITHMS.values():
        for advantage in algorithm.advantages:
            yield _write_row(f"`{advantage.name}`", advantage.formula, algorithm.paper.link)


def _losses() -> Iterator[str]:
    flags = _index_flags()
    yield "| `--grpo-loss` | loss of a token | | reads | paper |"
    yield "| --- | --- | --- | --- | --- |"
    for algorithm in ALGORITHMS.values():
        for loss in algorithm.losses:
            reads = ", ".join(f"`{flags[name].name}`" for name in loss.reads)
            yield _write_row(f"`{loss.name}`", loss.formula, loss.remark, reads, algorithm.paper.link)


def _preferences() -> Iterator[str]:
    yield "| `--dpo-loss-type` | loss of a pair | paper |"
    yield "| --- | --- | --- |"
    for algorithm in ALGORITHMS.values():
        for preference in algorithm.preferences:
            yield _write_row(f"`{preference.name}`", preference.formula, algorithm.paper.link)


def _write_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _index_flags() -> Mapping[str, Any]:
    """Map each field of the settings to its flag."""
    flags = derive_flags(AlgorithmConfig, "algorithm")
    return {field.name: flag for field, flag in zip(dataclasses.fields(AlgorithmConfig), flags, strict=True)}


if __name__ == "__main__":
    PAGE.write_text(write_tables(PAGE.read_text()))
