"""Draw the pictures of the documents into docs/images: make figures

The measured ones take their numbers from docs/images/figures.json, where each stands with the command that measures it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
INK, PALE, BLUE, ORANGE, GREEN = "#24292f", "#f6f8fa", "#4c78a8", "#f58518", "#54a24b"
STYLE = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    # Text stays text, and the same numbers give the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron_rl",
}


def draw_all(folder: Path, suffix: str = ".svg") -> list[Path]:
    """Draw every picture into the folder; return the files."""
    figures = json.loads((IMAGES / "figures.json").read_text(encoding="utf-8"))
    with pyplot.rc_context(STYLE):
        drawn = {
            "processes": draw_processes(),
            "iteration": draw_iteration(),
            "gains": draw_gains(figures),
        }
        return [save(figure, folder / f"{name}{suffix}") for name, figure in drawn.items()]


def save(figure: Figure, path: Path) -> Path:
    """Write a picture on white, whatever the page's colour."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, facecolor="white", metadata=metadata, dpi=110)
    pyplot.close(figure)
    return path


def draw_gains(figures: dict[str, Any]) -> Figure:
    """Draw the measured gains, a panel each."""
    figure, panels = pyplot.subplots(1, len(figures), figsize=(11.6, 2.3), layout="constrained")
    colours = {"iteration": BLUE, "step": GREEN, "attention": ORANGE}
    for (name, one), panel in zip(figures.items(), panels, strict=True):
        labels, values = zip(*reversed(one["bars"]), strict=True)
        bars = panel.barh(labels, values, color=colours[name], height=0.62)
        panel.bar_label(bars, [f" {value:g}" for value in values])
        panel.set_title(one["title"], fontsize=9.5, loc="left")
        panel.set_xlim(0, max(1.0, max(values)) * 1.15)
        if name == "iteration":
            panel.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    return figure


def draw_processes() -> Figure:
    """Draw the two processes, and the messages between them."""
    figure, axes = _canvas(11.6, 3.5)
    _box(axes, 0.2, 0.25, 4.0, 3.0, "Trainer: torchrun pretrain_grpo.py", PALE)
    _box(
        axes,
        0.5,
        1.95,
        3.4,
        0.75,
        "Megatron's schedule, TP x PP x CP x EP x DP\npolicy, old policy, reference in one pass",
        "white",
    )
    _box(axes, 0.5, 0.55, 1.55, 1.05, "loss, update\nonce an\niteration", "white")
    _box(axes, 2.35, 0.55, 1.55, 1.05, "checkpoints,\nmetrics,\nsamples", "white")
    _box(axes, 7.4, 0.25, 4.0, 3.0, "Sidecar: python -m megatron_rl.sidecar", PALE)
    _box(axes, 7.7, 1.95, 1.6, 0.75, "rollout service\n(HTTP, token)", "white")
    _box(axes, 9.6, 1.95, 1.5, 0.75, "vLLM engines\n(supervised)", "white")
    _box(axes, 7.7, 0.55, 1.6, 1.05, "rewards,\nin confined\nprocesses", "white")
    _box(axes, 9.6, 0.55, 1.5, 1.05, "journal,\naudit log", "white")
    arrows = (
        (2.85, 1, "1  weights of version v, to all or none", BLUE),
        (2.2, 1, "2  the prompts of iteration v", BLUE),
        (1.5, -1, "3  groups, each as it is finished", ORANGE),
        (0.75, 1, "4  trained on: exactly once", GREEN),
    )
    for height, direction, text, colour in arrows:
        start, end = (4.3, 7.3) if direction > 0 else (7.3, 4.3)
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8}
        axes.annotate("", xy=(end, height), xytext=(start, height), arrowprops=style)
        axes.text(5.8, height + 0.1, text, ha="center", va="bottom", fontsize=9)
    return figure


def draw_iteration() -> Figure:
    """Draw who works when: the same groups, synchronous and periodic. A sketch, not a measurement."""
    figure, axes = _canvas(11.6, 2.5)
    _lanes(axes, 1.45, "synchronous", train_starts=[5.0, 5.8, 6.6, 7.4, 8.2])
    _lanes(axes, 0.2, "periodic", train_starts=[2.6, 3.4, 4.2, 5.0, 5.8])
    return figure


def _lanes(axes: Axes, bottom: float, name: str, train_starts: list[float]) -> None:
    """Draw two lanes: engines generate five groups, and the trainer takes them."""
    axes.text(0.05, bottom + 0.42, name, fontweight="bold", va="center")
    axes.text(1.65, bottom + 0.65, "engines", va="center", ha="right", fontsize=8.5)
    axes.text(1.65, bottom + 0.2, "trainer", va="center", ha="right", fontsize=8.5)
    _bar(axes, 1.75, bottom, 0.2, 0.85, BLUE, "")
    for index in range(5):
        _bar(axes, 2.0 + 0.6 * index, bottom + 0.47, 0.57, 0.38, ORANGE, f"{index + 1}")
    for index, start in enumerate(train_starts):
        _bar(axes, start, bottom, 0.77, 0.38, GREEN, f"{index + 1}")
    end = train_starts[-1] + 0.8
    _bar(axes, end, bottom, 0.3, 0.38, INK, "")
    axes.plot([end + 0.34] * 2, [bottom - 0.05, bottom + 0.9], color=INK, linewidth=0.8, linestyle=":")
    if name == "periodic":
        axes.text(
            7.2, bottom + 0.66, "blue: weights to the engines    orange: a group is generated", fontsize=8, va="center"
        )
        axes.text(7.2, bottom + 0.22, "green: it is trained on    black: the update", fontsize=8, va="center")


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = pyplot.figure(figsize=(width * 0.86, height * 0.86))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08", facecolor=colour, edgecolor=INK, linewidth=0.9
    )
    axes.add_patch(shape)
    if height > 2:
        axes.text(x + width / 2, y + height - 0.28, text, ha="center", va="center", fontweight="bold", fontsize=9)
    else:
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)


def _bar(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str) -> None:
    axes.barh(y + height / 2, width, left=x, height=height, color=colour)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=8.5)


if __name__ == "__main__":
    for drawn in draw_all(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES):
        print(drawn)
