"""The views of a run for people: its progress, the times of its parts, the summary, pictures."""

import contextlib
import dataclasses
import io
import json
import os
import pty
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console

from megatron_rl import cli
from megatron_rl.analysis import picture
from megatron_rl.analysis.report.data import RunFiles
from megatron_rl.config.settings import ObserveConfig
from megatron_rl.errors import ExitCode
from megatron_rl.observe import metrics, progress, summary
from megatron_rl.observe.summary import chart
from megatron_rl.observe.timeline import Timeline
from tests.observed import metrics_record, write_metrics
from tests.processes import ROOT

# Time


class _Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_each_moment_is_counted_once_and_the_parts_add_up():
    clock = _Clock()
    timeline = Timeline(clock)

    def spend(seconds):
        clock.now += seconds

    spend(1)
    with timeline.span("train"):
        spend(2)
        with timeline.span("wait"):
            spend(4)
            with timeline.span("train"):
                spend(8)
        spend(16)
        assert timeline.read("train") == 26.0
    spend(32)
    assert (timeline.read("train"), timeline.read("save")) == (26.0, 0.0)
    assert timeline.take() == {"iteration": 63.0, "train": 26.0, "wait": 4.0, "other": 33.0}
    assert timeline.take() == {"iteration": 0.0, "other": 0.0}


def test_a_span_that_raises_is_over_and_an_open_one_continues_in_the_next_iteration():
    clock = _Clock()
    timeline = Timeline(clock)
    with contextlib.suppress(KeyError), timeline.span("publish"):
        clock.now += 1
        raise KeyError
    with timeline.span("train"):
        clock.now += 2
        assert timeline.take() == {"iteration": 3.0, "publish": 1.0, "train": 2.0, "other": 0.0}
        clock.now += 4
    timeline.restart()
    clock.now += 8
    assert timeline.take() == {"iteration": 8.0, "other": 8.0}
    timeline.restart(41.5)
    clock.now += 1
    assert timeline.take() == {"iteration": 1.0, "other": 1.0, "start": 41.5}
    assert timeline.take() == {"iteration": 0.0, "other": 0.0}


# Progress


def _lines(**config):
    stream = io.StringIO()
    return progress.progress_of(ObserveConfig(**config), 10, stream), stream


def test_without_a_terminal_an_aligned_line_is_printed_each_interval_and_at_the_end():
    shown, stream = _lines(log_interval=4)
    for version in range(10):
        shown.begin(version, 8)
        shown.phase("generating")
        shown.counts(3, 1, "5 groups")
        shown.end(version, metrics_record(version, seconds=10.0**version))
    shown.end(10, {"version": 10, "evaluation": {"pass": 0.75, "mean": 0.5, "num_samples": 4}})
    shown.close()
    lines = stream.getvalue().splitlines()
    begins = [line.partition("  reward")[0] for line in lines[:3]]
    assert begins == ["iteration  4/10", "iteration  8/10", "iteration 10/10"]
    assert lines[0] == (
        "iteration  4/10  reward   0.300  loss -1.000e-01  tokens/s    1,000 generated    2,000 trained   4000.00 s  "
        "waited  12%  truncated  25%  groups of equal rewards 1"
    )
    assert lines[0].index("loss") == lines[2].index("loss")
    assert lines[3] == "    after 10/10  evaluation pass@4 0.750 reward 0.500"


SUPERVISED = {
    "version": 4, "loss": 1.25, "demonstrations": 8, "evaluation": {"loss": 1.5, "num_tokens": 40},
    "time": {"iteration": 2.0, "train": 1.5, "other": 0.5, "trained_tokens_per_second": 1234.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "record", "line"),
    [
        (
            0, {},
            "iteration  1/10  reward       -  loss          -  tokens/s        - generated        - trained         - s"
            "  waited   -%  truncated   -%",
        ),
        (
            4, SUPERVISED,
            "iteration  5/10  loss  1.250e+00  tokens/s    1,234 trained      2.00 s  held-out loss 1.500",
        ),
        (10, {"version": 10, "evaluation": {"loss": 1.0}}, "    after 10/10  held-out loss 1.000"),
    ],
    ids=["missing numbers are dashes", "a supervised run has no rewards", "after the last iteration"],
)  # fmt: skip
def test_the_line_of_an_iteration_has_what_the_run_measures(version, record, line):
    assert progress.line_of(version, 10, record) == line


def test_progress_none_shows_messages_only(capsys):
    shown = progress.progress_of(ObserveConfig(progress="none"), 2, sys.stdout)
    shown.begin(0, 4)
    shown.end(0, metrics_record(0))
    shown.say("warning: mismatch")
    shown.close()
    assert capsys.readouterr() == ("", "warning: mismatch\n")


def test_the_display_shows_the_run_its_groups_and_what_is_waited_for():
    now = progress.Shown(
        total=80, version=12, num_groups=64, finished=37, trained=32, waiting_for="5 groups", phase="generating",
        begun=10.0, phase_begun=20.0, seconds=12.0, metrics=metrics_record(3),
    )  # fmt: skip
    for width in (40, 80, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(progress.display(now, 33.0))
        rows = console.file.getvalue().splitlines()
        assert (len(rows), rows[-1]) == (4, "")
        assert max(map(len, rows)) <= width
    text = console.file.getvalue()
    for part in (
        "iteration 13 of 80", "13:13 left", "32 of 64 groups trained", "37 finished",
        "generating 0:13, waiting for 5 groups", "reward 0.300", "tokens/s 1,000 generated, 2,000 trained",
    ):  # fmt: skip
        assert part in text, part


def test_a_terminal_gets_a_live_display_that_its_own_thread_redraws(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    read = []

    def drain():
        while True:
            try:
                read.append(os.read(reader, 65536))
            except OSError:
                return

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    with os.fdopen(writer, "w") as stream:
        shown = progress.progress_of(ObserveConfig(), 3, stream)
        started = time.monotonic()
        with contextlib.closing(shown):
            shown.begin(0, 2)
            for count in range(20000):
                shown.counts(count, 0, "")
            shown.phase("evaluating")
            time.sleep(0.6)
            shown.say("a [warning]")
            shown.end(0, metrics_record(0))
        shown.close()
        seconds = time.monotonic() - started
    thread.join(60)
    os.close(reader)
    text = b"".join(read).decode()
    for part in ("iteration 1 of 3", "19999 finished", "evaluating", "a [warning]", "iteration 1/3  reward   0.000"):
        assert part in text, part
    # At most 4 a second, and those of the start, of the two lines and of the end.
    assert text.count("groups trained") <= 4 * seconds + 8 < 20000
    # The cursor is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_another_process_that_prints_while_the_display_is_up_begins_a_line():
    stream = io.StringIO()
    shown = progress.LiveProgress(3, 1, stream)
    shown.begin(0, 2)
    shown.say("a line for people")
    assert "0 of 2 groups trained" in stream.getvalue()
    # As after a kill: nothing closes the display.
    assert stream.getvalue().endswith("\n")
    shown.close()


def test_updates_of_two_threads_to_the_display_are_both_kept(monkeypatch):
    shown = progress.LiveProgress(3, 1, io.StringIO())
    replace = dataclasses.replace

    def slowly(now, **changes):
        time.sleep(0.05)
        return replace(now, **changes)

    monkeypatch.setattr(progress.dataclasses, "replace", slowly)
    other = threading.Thread(target=shown.counts, args=(5, 0, ""))
    other.start()
    shown.phase("train")
    other.join()
    assert (shown._shown.phase, shown._shown.finished) == ("train", 5)


@pytest.mark.parametrize("kind", ["lines", "live"])
def test_a_reader_that_is_gone_ends_the_progress_and_not_the_loop(kind, capfd, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    shown = progress.progress_of(ObserveConfig(progress=kind), 3, stream)
    for version in range(3):
        shown.begin(version, 2)
        shown.counts(0, 1, "")
        shown.end(version, metrics_record(version))
    shown.say("still said")
    shown.close()
    errors = capfd.readouterr().err
    assert errors.count("progress is no longer shown: BrokenPipeError") == 1
    assert "still said" in errors
    assert "Traceback" not in errors
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_terminal_that_goes_while_nothing_is_said_is_noticed(capfd, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    shown = progress.progress_of(ObserveConfig(progress="live"), 3, stream)
    shown.begin(0, 2)
    os.close(reader)
    for _ in range(1200):
        shown.counts(0, 1, "")
        time.sleep(0.05)
        errors = capfd.readouterr().err
        if errors:
            break
    assert "progress is no longer shown: BrokenPipeError" in errors
    assert "Traceback" not in errors
    shown.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


# The end


def test_the_summary_has_results_times_and_places(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, range(5))
    places = {"checkpoint": tmp_path / "nothing", "metrics": path}
    stream = io.StringIO()
    summary.print_summary(metrics.read_metrics(path), places, stream)
    assert (
        stream.getvalue()
        == f"""
results
  reward                   0.000  at version 0,  0.400  at version 4
  evaluation, pass@1       0.000  at version 0,  0.400  at version 4
  evaluation, mean reward  0.200  at version 0,  0.200  at version 4

time by part
  train  10.0 s   50.0%
  wait    2.5 s   12.5%
  other   7.5 s   37.5%
  all    20.0 s  100.0%

files
  checkpoint  {tmp_path}/nothing (missing)
  metrics     {path}
"""
    )


def test_the_summary_repeats_its_notes_last():
    lines = summary.summary_lines([metrics_record(0)], {}, ["--eval-interval 5 has no effect"])
    assert lines[-2:] == ["notes", "  --eval-interval 5 has no effect"]


def test_the_summary_counts_the_time_of_the_start_apart_from_iterations():
    record = metrics_record(0)
    record["time"]["start"] = 12.0
    assert "start" not in metrics.seconds_by_span(record)
    lines = summary.summary_lines([record, metrics_record(1), record], {})
    times = lines[lines.index("time by part") + 1 :]
    assert times[0] == "  start  24.0 s   66.7%"
    assert times[-1] == "  all    36.0 s  100.0%"


def test_the_summary_has_what_drafts_brought_among_the_results_and_not_among_the_times():
    records = [metrics_record(version) for version in range(3)]
    for record in records[1:]:
        length = 1.5 + record["version"]
        record["time"] |= {"drafted_tokens": 8, "accepted_tokens": 4, "accepted_length": length}
        assert metrics.seconds_by_span(record) == metrics.seconds_by_span(records[0])
    lines = summary.summary_lines(records, {})
    (line,) = (line for line in lines if "drafts" in line)
    assert " ".join(line.split()) == "drafts, accepted length 2.500 at version 1, 3.500 at version 2"


def test_a_run_without_numbers_has_an_empty_summary():
    assert summary.summary_lines([], {}) == []
    assert summary.summary_lines([{"version": 3}], {}) == []


def test_a_chart_of_linear_values_is_a_straight_line():
    assert chart("reward", {"run": [(0, 0.0), (5, 5.0), (10, 10.0)]}, width=11, height=6).splitlines() == [
        "reward",
        "10 |          *",
        "   |        **",
        "   |      **",
        " 4 |    **",
        "   |  **",
        " 0 |**",
        "   +-----------",
        "    0iteration10",
    ]


def test_a_chart_of_two_runs_tells_them_apart():
    lines = chart("reward", {"a": [(0, 0.0), (9, 1.0)], "b": [(0, 0.0), (9, 0.0)]}).splitlines()
    assert lines[0] == "reward   * a   o b   = several"
    assert len(lines) == 1 + 12 + 2
    assert lines[1].endswith("*")
    assert "=ooo" in lines[12]


@pytest.mark.parametrize("points", [[], [(3, 0.5)], [(0, 0.5), (9, 0.5)], [(v, v % 7) for v in range(1000)]])
def test_a_chart_of_any_values_fits_its_size(points):
    lines = chart("reward", {"run": points}).splitlines()
    assert len(lines) in (1, 4, 15)
    assert max(map(len, lines)) <= 70


def test_a_chart_of_one_value_has_one_row():
    assert chart("reward", {"run": [(3, 0.5)]}, width=11).splitlines() == [
        "reward", "0.5 |*", "    +-----------", "     3iteration",
    ]  # fmt: skip


def test_evaluations_that_are_equal_are_one_curve():
    records = [{"version": version, "evaluation": {"pass": 0.5, "mean": 0.5, "num_samples": 1}} for version in (0, 5)]
    assert summary.evaluations_of(records) == {"mean reward (pass@1)": [(0, 0.5), (5, 0.5)]}
    records[1]["evaluation"]["mean"] = 0.25
    assert list(summary.evaluations_of(records)) == ["pass@1", "mean reward"]


def test_the_command_prints_the_curves_of_runs_and_draws_them(tmp_path, capsys):
    for name, seconds in (("periodic", 1.0), ("sync", 2.0)):
        write_metrics(tmp_path / name / "metrics.jsonl", range(6), seconds)
    runs = [str(tmp_path / "periodic"), f"slow={tmp_path / 'sync' / 'metrics.jsonl'}"]
    assert cli.main(["picture", *runs]) == ExitCode.OK
    printed = capsys.readouterr().out
    for title in ("reward", "evaluation, pass@1", "evaluation, mean reward"):
        assert f"{title}   * periodic   o slow" in printed
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "curves.png"
    assert cli.main(["picture", *runs, "--out", str(out)]) == ExitCode.OK
    assert out.read_bytes().startswith(b"\x89PNG")
    figure = out.with_suffix(".svg")
    picture.picture({"periodic": tmp_path / "periodic"}, figure)
    for curve in ("reward", "held out, pass@1", "held out, mean reward"):
        assert f"<!-- {curve} -->" in figure.read_text()
    figure.unlink()
    assert list(out.parent.iterdir()) == [out]


def test_the_command_names_what_it_cannot_draw(tmp_path, capsys):
    write_metrics(tmp_path / "a" / "run" / "metrics.jsonl", range(2))
    write_metrics(tmp_path / "b" / "run" / "metrics.jsonl", range(2))
    (tmp_path / "empty.jsonl").write_text("")
    first, second = str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")
    for words, code, text in (
        ([first, second], ExitCode.USAGE, f"both called run: write LABEL={second}"),
        ([str(tmp_path / "none.jsonl")], ExitCode.INPUT, "none.jsonl cannot be read: No such file"),
        ([str(tmp_path / "empty.jsonl")], ExitCode.INPUT, "has no line yet"),
        ([first, "--out", "curves.txt"], ExitCode.USAGE, "a picture ends with .png"),
    ):
        assert cli.main(["picture", *words]) == code
        assert text in capsys.readouterr().err


def test_a_picture_of_runs_without_rewards_or_times_is_drawn_too(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"version": 0}\n')
    picture.picture({"run": tmp_path}, tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_pictures_and_sinks_import_their_packages_when_they_are_asked_for():
    script = (
        "import sys; from megatron_rl.analysis import picture\n"
        "from megatron_rl.observe import metrics, progress, samples, sinks, summary, timeline\n"
        "assert not {'torch', 'matplotlib', 'wandb', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_the_display_counts_no_groups_where_there_are_none():
    def shown(num_groups: int) -> str:
        stream = io.StringIO()
        Console(file=stream, width=120).print(progress.display(progress.Shown(total=10, num_groups=num_groups), 0.0))
        return stream.getvalue()

    assert "groups trained" in shown(4)
    assert "groups trained" not in shown(0)


def test_the_summary_says_what_became_of_the_losses():
    lines = summary.summary_lines(
        [{**SUPERVISED, "version": 0}, {**SUPERVISED, "loss": 0.5}, {"version": 5, "evaluation": {"loss": 0.75}}], {}
    )
    rows = [" ".join(line.split()) for line in lines]
    assert "loss 1.250 at version 0, 0.500 at version 4" in rows
    assert "held-out loss 1.500 at version 0, 0.750 at version 5" in rows
    assert not any("reward" in line for line in lines)


def test_the_curves_are_those_of_the_losses(tmp_path):
    lines = [{**SUPERVISED, "version": version, "loss": 1.0 / (1 + version)} for version in range(3)]
    text = summary.text_curves({"run": [*lines, {"version": 3, "evaluation": {"loss": 0.75}}]})
    assert text.startswith("loss\n")
    assert "\n\nheld-out loss\n" in text
    assert "reward" not in text
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (*lines, {"version": 3, "evaluation": {"loss": 0.75}})))
    assert RunFiles("run", tmp_path).read(None, None)["num_iterations"] == 3
    picture.picture({"run": path}, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").exists()
