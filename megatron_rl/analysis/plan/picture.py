"""The picture of `megatron-rl plan`: the time of planned runs by part, and their throughput."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.analysis.picture import make_figure, save_figure
from megatron_rl.analysis.plan.results import ENGINE_PARTS, TRAINER_PARTS, Result

_PARTS = tuple(dict.fromkeys((*TRAINER_PARTS, *ENGINE_PARTS)))


def draw(results: Mapping[str, Result], out: Path) -> None:
    """Draw for each run the trainer's seconds, the engines' seconds, and the tokens per second and device."""
    figure = make_figure()
    grid = figure.add_gridspec(1, 3, width_ratios=(3, 3, 2))
    trainer = figure.add_subplot(grid[0, 0])
    drawn = _draw_ledgers(trainer, results, of_engines=False)
    engines = figure.add_subplot(grid[0, 1], sharey=trainer)
    drawn |= _draw_ledgers(engines, results, of_engines=True)
    speeds = figure.add_subplot(grid[0, 2], sharey=trainer)
    bars = speeds.barh(list(results), [result.tpspd for result in results.values()], color="C7")
    speeds.bar_label(bars, [f"{result.tpspd:.0f}" for result in results.values()], padding=3)
    speeds.set_title("tokens/s/device")
    speeds.margins(x=0.25)
    for axes in (engines, speeds):
        axes.tick_params(labelleft=False)
    # The three have one axis.
    trainer.invert_yaxis()
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=len(drawn))
    save_figure(figure, out)


def _draw_ledgers(axes: Any, results: Mapping[str, Result], of_engines: bool) -> dict[str, Any]:
    """Draw the ledgers; return the bars of each part above 0, by its name."""
    ledgers = [result.mean(of_engines) for result in results.values()]
    before, drawn = [0.0] * len(ledgers), {}
    for index, part in enumerate(_PARTS):
        widths = [ledger.get(part, 0.0) for ledger in ledgers]
        if any(width > 0 for width in widths):
            drawn[part] = axes.barh(list(results), widths, left=before, color=f"C{index}")
            before = [left + width for left, width in zip(before, widths, strict=True)]
    axes.set_title("engines" if of_engines else "trainer")
    axes.set_xlabel("seconds of an iteration")
    return drawn
