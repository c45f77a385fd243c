"""Draws the curves of one or more runs, and their time by part."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.analysis import write_out
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.observe import metrics
from megatron_rl.observe.summary import Points, evaluations_of, results_of, rewards_of, time_by_span

_Records = Sequence[Mapping[str, Any]]
_FORMATS = (".png", ".svg", ".pdf")
# These parts of the time have the same colour in every picture; others get the remaining colours.
_SPANS = ("train", "wait", "publish", "update", "evaluate", "save", "other")


def picture(metrics_files: Mapping[str, Path], out: Path) -> None:
    """Draw rewards and evaluations of all runs over the iterations, and next to them an iteration's seconds by part.

    `out` appears only when it is complete.
    """
    if out.suffix not in _FORMATS:
        raise UsageError(f"--out {out}: a picture ends with {', '.join(_FORMATS)}")
    runs = {label: metrics.read_metrics(path) for label, path in metrics_files.items()}
    figure = make_figure()
    grid = figure.add_gridspec(1, 2, width_ratios=(5, 2))
    _draw_curves(figure.add_subplot(grid[0, 0]), runs)
    _draw_times(figure.add_subplot(grid[0, 1]), runs)
    save_figure(figure, out)


def save_figure(figure: Any, out: Path) -> None:
    """Write a picture, which appears only when it is complete."""
    write_out(out, lambda path: figure.savefig(path, dpi=150))


def make_figure() -> Any:
    """Make an empty picture, which needs no display."""
    try:
        module = importlib.import_module("matplotlib.figure")
        # This canvas needs no display.
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise PlatformError(
            f"pictures need matplotlib, which does not load ({error}): pip install matplotlib, or leave out --out"
        ) from error
    return module.Figure(figsize=(11, 4.5), layout="constrained")


def _draw_curves(axes: Any, runs: Mapping[str, _Records]) -> None:
    for index, (label, records) in enumerate(runs.items()):
        # Each curve is thinner than the one before, so that runs with equal results are all visible.
        look: dict[str, Any] = {"color": f"C{index}", "linewidth": 1.5 * (len(runs) - index)}
        prefix = f"{label}: " if len(runs) > 1 else ""
        curves: dict[str, tuple[Points, dict[str, Any]]] = {
            name: (points, {"alpha": 0.6, "linestyle": line})
            for line, (name, points) in zip(("-", "--"), results_of(records).items(), strict=False)
        }
        for line, (name, evaluated) in zip(("--", ":"), evaluations_of(records).items(), strict=False):
            curves[f"held out, {name}"] = (evaluated, {"marker": "o", "linestyle": line})
        for name, (points, style) in curves.items():
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{prefix}{name}", **look, **style)
    axes.set_xlabel("iteration")
    is_evaluated = any(points for records in runs.values() for points in evaluations_of(records).values())
    rewarded = "mean reward" + (", share of held-out prompts that pass" if is_evaluated else "")
    axes.set_ylabel(rewarded if any(rewards_of(records) for records in runs.values()) else "loss")
    axes.grid(alpha=0.3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.lines:
        axes.legend()


def _draw_times(axes: Any, runs: Mapping[str, _Records]) -> None:
    starts = {label: metrics.start_seconds(records) for label, records in runs.items()}
    # The start belongs to no iteration, so it is in no bar.
    labels = [f"{label}\nstart {starts[label]:.0f} s" if starts[label] else label for label in runs]
    means = [_mean_seconds(records) for records in runs.values()]
    spans = [*_SPANS, *sorted({span for mean in means for span in mean} - set(_SPANS))]
    below = [0.0] * len(runs)
    for index, span in enumerate(spans):
        heights = [mean.get(span, 0.0) for mean in means]
        if any(heights):
            axes.bar(labels, heights, bottom=below, width=0.6, color=f"C{index}", label=span)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("seconds of an iteration, mean")
    if any(below):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def _mean_seconds(records: _Records) -> dict[str, float]:
    timed = [record for record in records if metrics.seconds_by_span(record)]
    return {name: seconds / len(timed) for name, seconds in time_by_span(timed).items()}
