"""The picture of `megatron-rl plan`: where the time of planned runs goes, and what they train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.observe.picture import make_figure, save_figure
from megatron_rl.plan.ledger import ENGINE_PARTS, TRAINER_PARTS, Result

_PARTS = tuple(dict.fromkeys((*TRAINER_PARTS, *ENGINE_PARTS)))


def draw(results: Mapping[str, Result], out: Path) -> None:
    """Draw a bar of the trainer's seconds for each, one of the engines', and tokens a second a device."""
    figure = make_figure()
    grid = figure.add_gridspec(1, 3, width_ratios=(3, 3, 2))
    trainer = figure.add_subplot(grid[0, 0])
    _draw_ledgers(trainer, results, of_engines=False)
    _draw_ledgers(figure.add_subplot(grid[0, 1], sharey=trainer), results, of_engines=True)
    speeds = figure.add_subplot(grid[0, 2])
    bars = speeds.barh(list(results), [result.tpspd for result in results.values()], color="C7")
    speeds.bar_label(bars, [f"{result.tpspd:.0f}" for result in results.values()], padding=3)
    speeds.set_title("trained tokens a second a device")
    speeds.margins(x=0.2)
    speeds.invert_yaxis()
    save_figure(figure, out)


def _draw_ledgers(axes: Any, results: Mapping[str, Result], of_engines: bool) -> None:
    ledgers = [result.mean(of_engines) for result in results.values()]
    before = [0.0] * len(ledgers)
    for index, part in enumerate(_PARTS):
        widths = [ledger.get(part, 0.0) for ledger in ledgers]
        if any(width > 0 for width in widths):
            axes.barh(list(results), widths, left=before, color=f"C{index}", label=part.replace("_", " "))
            before = [left + width for left, width in zip(before, widths, strict=True)]
    axes.set_title("engines" if of_engines else "trainer")
    axes.set_xlabel("seconds of an iteration")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
