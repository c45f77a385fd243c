"""Compare runs of the demo: a table of their results, and their curves."""

import argparse
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.analysis.picture import make_figure, save_figure
from megatron_rl.observe.metrics import read_metrics

_COLUMNS = 4


def add_flags(parser: argparse.ArgumentParser, out: Path) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=out, help="runs whose result lies here are not repeated")


def compare(variants: Mapping[str, Sequence[str]], seeds: Sequence[int], out: Path) -> dict[str, list[float]]:
    """Run each of them with each seed, by its words for the demo; return accuracies on the held-out problems."""
    folders = {name: [out / f"{name.replace(' ', '-')}-{seed}" for seed in seeds] for name in variants}
    for name, words in variants.items():
        for seed, folder in zip(seeds, folders[name], strict=True):
            if not (folder / "result.json").exists():
                command = [sys.executable, "-m", "examples.arithmetic.demo"]
                subprocess.run([*command, "--seed", str(seed), "--out", str(folder), *words], check=True)
    _draw({name: [_read_curve(folder / "run") for folder in of_seeds] for name, of_seeds in folders.items()}, out)
    heads = [f"seed {seed}" for seed in seeds]
    print(f"\n{'held-out problems answered (prompts sampled)':<48}" + "".join(f"{head:>18}" for head in heads))
    found = {}
    for name, of_seeds in folders.items():
        found[name] = [json.loads((folder / "result.json").read_text())["after"] for folder in of_seeds]
        cells = [
            f"{accuracy:.1%} ({_count_prompts(folder / 'run')})"
            for accuracy, folder in zip(found[name], of_seeds, strict=True)
        ]
        print(f"{name:<48}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"the curves: {out / 'curves.svg'}")
    return found


def _read_curve(run: Path) -> list[tuple[int, float]]:
    """Share of the held-out problems answered, by iteration."""
    return [(record["version"], record["evaluation"]["pass"]) for record in read_metrics(run) if "evaluation" in record]


def _draw(curves: Mapping[str, Sequence[list[tuple[int, float]]]], out: Path) -> None:
    """Draw a panel for each, with its seeds in color before all others in gray."""
    columns = min(_COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = make_figure()
    figure.set_size_inches(2.75 * columns, 2.1 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel in panels[len(curves) :]:
        panel.set_visible(False)
    for panel, (name, of_seeds) in zip(panels, curves.items(), strict=False):
        for curve in itertools.chain.from_iterable(curves.values()):
            panel.plot(*zip(*curve, strict=True), color="0.85", linewidth=0.8)
        for number, curve in enumerate(of_seeds):
            panel.plot(*zip(*curve, strict=True), color=f"C{number}", marker="o", markersize=3)
        panel.set_title(name, fontsize="medium")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    figure.supxlabel("iteration")
    figure.supylabel("share of held-out problems answered")
    save_figure(figure, out / "curves.svg")


def _count_prompts(run: Path) -> int:
    """Count the prompts that were sampled, those that were not trained on among them."""
    return sum(record.get("prompts", {}).get("considered", record.get("groups", 0)) for record in read_metrics(run))
