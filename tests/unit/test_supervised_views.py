"""The views of --stage sft for people: the line of an iteration, the live display, the summary."""

import io
import json

from rich.console import Console

from megatron_rl.analysis.picture import picture
from megatron_rl.analysis.report.data import RunFiles
from megatron_rl.observe.progress import Shown, display, line_of
from megatron_rl.observe.summary import summary_lines, text_curves

LINE = {
    "version": 4, "loss": 1.25, "demonstrations": 8, "evaluation": {"loss": 1.5, "num_tokens": 40},
    "time": {"iteration": 2.0, "train": 1.5, "other": 0.5, "trained_tokens_per_second": 1234.0},
}  # fmt: skip


def test_the_line_of_an_iteration_has_its_loss_and_nothing_about_rewards():
    assert line_of(4, 10, LINE) == (
        "iteration  5/10  loss  1.250e+00  tokens/s    1,234 trained      2.00 s  held-out loss 1.500"
    )
    assert line_of(10, 10, {"version": 10, "evaluation": {"loss": 1.0}}) == "    after 10/10  held-out loss 1.000"


def test_the_display_counts_no_groups_where_there_are_none():
    def shown(num_groups: int) -> str:
        stream = io.StringIO()
        Console(file=stream, width=120).print(display(Shown(total=10, num_groups=num_groups), 0.0))
        return stream.getvalue()

    assert "groups trained" in shown(4)
    assert "groups trained" not in shown(0)


def test_the_summary_says_what_became_of_the_losses():
    lines = summary_lines(
        [{**LINE, "version": 0}, {**LINE, "loss": 0.5}, {"version": 5, "evaluation": {"loss": 0.75}}], {}
    )
    rows = [line.split() for line in lines]
    assert ["loss", "1.250", "at", "version", "0,", "0.500", "at", "version", "4"] in rows
    assert ["held-out", "loss", "1.500", "at", "version", "0,", "0.750", "at", "version", "5"] in rows
    assert not any("reward" in line for line in lines)


def test_the_curves_are_those_of_the_losses(tmp_path):
    lines = [{**LINE, "version": version, "loss": 1.0 / (1 + version)} for version in range(3)]
    text = text_curves({"run": [*lines, {"version": 3, "evaluation": {"loss": 0.75}}]})
    assert text.startswith("loss\n")
    assert "\n\nheld-out loss\n" in text
    assert "reward" not in text
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*lines, {"version": 3, "evaluation": {"loss": 0.75}})))
    assert RunFiles("run", tmp_path).read(None, None)["num_iterations"] == 3
    picture({"run": path}, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").exists()
