"""What a person sees of a run, and the files that it leaves."""

import contextlib
import io
import json
import math
import os
import pty
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from megatron_rl import cli
from megatron_rl.config import ObserveConfig
from megatron_rl.errors import ExitCode, InputError, PlatformError, UsageError
from megatron_rl.observe import line_file, metrics, picture, progress, report, sinks
from megatron_rl.observe.chart import chart
from megatron_rl.observe.metrics import MetricsFile
from megatron_rl.observe.samples import SampledGroup, SampledResponse, SamplesFile
from megatron_rl.observe.timeline import Timeline
from megatron_rl.rollout.append_file import FileInUse
from tests.processes import ROOT


def _metrics(version, seconds=1.0):
    record = {
        "version": version,
        "fingerprint": "f" * 64,
        "reward": {"mean": 0.1 * version, "all_equal_groups": 1},
        "loss": -0.1,
        "time": {
            "iteration": 4 * seconds,
            "wait": 0.5 * seconds,
            "train": 2 * seconds,
            "other": 1.5 * seconds,
            "generated_tokens_per_second": 1000.0,
            "trained_tokens_per_second": 2000.0,
        },
    }
    return record | ({"evaluation": {"mean": 0.2, "pass": 0.1 * version, "num_prompts": 8}} if version % 2 == 0 else {})


def _write(path, versions, seconds=1.0):
    file = MetricsFile(path)
    for version in versions:
        file.write(_metrics(version, seconds))
    file.close()


# Files


@pytest.mark.parametrize("continued_from", [0, 3, 5])
def test_a_resumed_runs_file_is_that_of_a_run_that_was_never_stopped(tmp_path, continued_from):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    _write(whole, range(8))
    _write(resumed, range(5))
    with resumed.open("ab") as file:
        file.write(b'{"version": 5, "rew')
    file = MetricsFile(resumed)
    assert file.restart(continued_from) == 5 - continued_from
    for version in range(continued_from, 8):
        file.write(_metrics(version, seconds=9.0))
    file.close()
    assert metrics.without_times(metrics.read(resumed)) == metrics.without_times(metrics.read(whole))
    assert metrics.read(resumed) != metrics.read(whole)


def test_a_torn_last_line_is_cut_off_when_the_file_is_opened(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"version": 2')
    assert [record["version"] for record in metrics.read(path)] == [0, 1]
    MetricsFile(path).close()
    assert path.read_bytes() == whole


def test_a_line_is_with_the_kernel_when_write_returns(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(_metrics(0))
    assert [record["version"] for record in metrics.read(tmp_path)] == [0]
    file.close()


def test_a_file_has_one_writer_and_its_versions_never_decrease(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(FileInUse, match="end that run"):
        MetricsFile(tmp_path / "metrics.jsonl")
    file.write(_metrics(3))
    with pytest.raises(ValueError, match=r"version 2 after 3: restart\(2\) comes first"):
        file.write(_metrics(2))
    file.restart(2)
    file.write(_metrics(2))
    file.close()


def test_a_damaged_line_is_named_and_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 0}\nnonsense\n{"version": 2}\n')
    path.chmod(0o600)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(InputError, match="metrics.jsonl, line 2: .*mend the line"):
            MetricsFile(path)
    with pytest.raises(InputError, match="line 2"):
        metrics.read(path)
    assert path.read_bytes() == before


def test_what_is_dropped_is_the_end_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 0}\n{"version": 5}\n{"version": 3}\n')
    path.chmod(0o600)
    file = MetricsFile(path)
    assert file.restart(4) == 2
    file.close()
    assert metrics.read(path) == [{"version": 0}]


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"version": 0, "loss": math.nan, "reward": {"mean": np.float32(math.inf), "all": [1.0, -math.inf]}})
    file.write({"version": 1, "loss": np.float32(0.5), "count": np.int64(3), "note": "text"})
    file.close()

    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {
        "version": 0,
        "loss": None,
        "reward": {"mean": None, "all": [1.0, None]},
        "nonfinite": ["loss", "reward/mean", "reward/all/1"],
    }
    assert second == {"version": 1, "loss": 0.5, "count": 3, "note": "text"}


def test_a_number_comes_back_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).normal(size=100).tolist()
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"version": 0, "values": values})
    file.close()
    assert metrics.read(tmp_path)[0]["values"] == values


def _group(row, num_responses, text="a"):
    responses = [SampledResponse(f"{text}{i}", float(i), {"exact": 1.0}) for i in range(num_responses)]
    return SampledGroup(row, f"prompt of {row}", responses)


def test_samples_are_bounded_over_all_writes_of_an_iteration(tmp_path):
    file = SamplesFile(tmp_path / "samples.jsonl", limit=4)
    file.write(0, [_group("r0", 3)])
    assert file.left(0) == 1
    assert file.left(1) == 4
    file.write(0, [_group("r1", 3), _group("r2", 3)])
    assert file.left(0) == 0
    file.write(1, [_group("r3", 2)])
    file.close()
    lines = line_file.read_lines(file.path)
    assert [(line["version"], line["row"], len(line["responses"])) for line in lines] == [
        (0, "r0", 3),
        (0, "r1", 1),
        (1, "r3", 2),
    ]
    assert lines[1]["prompt"] == "prompt of r1"
    assert lines[1]["responses"] == [{"text": "a0", "reward": 0.0, "components": {"exact": 1.0}}]


def test_samples_of_a_resumed_run_are_dropped_and_bounded_as_metrics_are(tmp_path):
    file = SamplesFile(tmp_path / "samples.jsonl", limit=2)
    for version in range(3):
        file.write(version, [_group("r", 2)])
    before = file.path.read_bytes()
    assert file.restart(2) == 1
    file.write(2, [_group("r", 2)])
    assert file.path.read_bytes() == before
    file.close()


def test_any_text_that_was_sampled_is_a_line(tmp_path):
    text = 'half \ud83d, "quoted",\nnext line, \u2028, \x00, 答え'
    file = SamplesFile(tmp_path / "samples.jsonl", limit=1)
    file.write(0, [SampledGroup("r", text, [SampledResponse(text, math.nan)])])
    file.close()
    (line,) = line_file.read_lines(file.path)
    assert line["prompt"] == line["responses"][0]["text"] == text.replace("\ud83d", "?")
    assert line["responses"][0]["reward"] is None
    assert line["nonfinite"] == ["responses/0/reward"]


def test_no_samples_are_written_when_none_are_asked_for(tmp_path):
    file = SamplesFile(tmp_path / "samples.jsonl", limit=0)
    file.write(0, [_group("r", 2)])
    assert file.path.read_bytes() == b""
    file.close()


# Sinks


def test_nested_metrics_become_groups_of_numbers():
    values = {"version": 3, "run": "r", "loss": 1, "is_late": True, "a": {"b": {"c": np.float32(0.5)}, "none": None}}
    assert metrics.flat(values) == {"loss": 1, "a/b/c": 0.5}


def test_tensorboard_gets_every_number_and_a_resumed_run_hides_what_it_does_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last, loss in ((0, 4, 1.0), (2, 5, 2.0)):
        to = sinks.sinks_of(ObserveConfig(tensorboard_dir=tmp_path), "run", first, pytest.fail)
        for version in range(first, last):
            to.write(version, {"version": version, "loss": loss, "reward": {"mean": 0.5}})
        to.close()
        # Event files of one second are told apart by their number in a process only.
        time.sleep(1.1)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss", "reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0),
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
        (4, 2.0),
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (ObserveConfig(tensorboard_dir=ROOT), "--tensorboard-dir needs the package tensorboard"),
        (ObserveConfig(wandb_project="p"), "--wandb-project needs the package wandb"),
    ],
)
def test_a_sink_whose_package_is_missing_names_it(monkeypatch, config, text):
    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(sinks.importlib, "import_module", missing)
    with pytest.raises(PlatformError, match=f"{text}.*pip install"):
        sinks.sinks_of(config, "run", 0, pytest.fail)


def test_wandb_resumes_the_run_of_this_id_over_its_versions(monkeypatch, tmp_path):
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *words, **named: calls.append(("metric", *words, named)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append("finish"),
    )
    wandb = SimpleNamespace(init=lambda **named: calls.append(named) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = ObserveConfig(wandb_project="p", wandb_entity="me", wandb_save_dir=str(tmp_path / "w"))
    to = sinks.sinks_of(config, "a/run", 4, pytest.fail, {"lr": 1.0})
    to.write(4, {"version": 4, "reward": {"mean": 0.5}})
    to.close()
    to.close()
    assert calls == [
        {
            "project": "p",
            "entity": "me",
            "name": "a/run",
            "dir": str(tmp_path / "w"),
            "id": "a-run",
            "resume": "allow",
            "config": {"lr": 1.0},
        },
        ("metric", "version", {}),
        ("metric", "*", {"step_metric": "version"}),
        ("log", {"reward/mean": 0.5, "version": 4}),
        "finish",
    ]
    assert (tmp_path / "w").is_dir()


def test_a_sink_that_fails_is_said_once_and_left_out_and_the_others_go_on():
    class Broken:
        def write(self, version, values):
            raise OSError("no room")

    said, written = [], []
    good = SimpleNamespace(write=lambda version, values: written.append(version), close=lambda: None)
    to = sinks.Sinks([Broken(), good], said.append)
    to.write(0, {})
    to.write(1, {})
    assert written == [0, 1]
    assert said == ["Broken fails and is left out from here on: OSError: no room"]


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
    spend(32)
    assert timeline.take() == {"iteration": 63.0, "train": 26.0, "wait": 4.0, "other": 33.0}
    assert timeline.take() == {"iteration": 0.0, "other": 0.0}


def test_a_span_that_raises_is_over_and_one_that_is_open_goes_on_in_the_next_iteration():
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


# Progress


def _lines(**config):
    stream = io.StringIO()
    return progress.progress_of(ObserveConfig(**config), 10, stream), stream


def test_without_a_terminal_there_is_an_aligned_line_an_interval_and_one_at_the_end():
    shown, stream = _lines(log_interval=4)
    for version in range(10):
        shown.begin(version, 8)
        shown.phase("generating")
        shown.counts(finished=3, trained=1, waiting_for="5 groups")
        shown.end(version, _metrics(version, seconds=10.0**version))
    shown.end(10, {"version": 10, "evaluation": {"pass": 0.75}})
    shown.close()
    lines = stream.getvalue().splitlines()
    begins = [line.partition("  reward")[0] for line in lines[:3]]
    assert begins == ["iteration  4/10", "iteration  8/10", "iteration 10/10"]
    assert lines[0] == (
        "iteration  4/10  reward   0.300  loss -1.000e-01  tokens/s    1,000 generated    2,000 trained   4000.00 s  "
        "waited  12%  groups of equal rewards 1"
    )
    assert lines[0].index("loss") == lines[2].index("loss")
    assert lines[3] == "    after 10/10  evaluation 0.750"


def test_a_line_says_which_numbers_there_are_not():
    assert progress.line_of(0, 9, {}) == (
        "iteration 1/9  reward       -  loss          -  tokens/s        - generated        - trained         - s  "
        "waited   -%"
    )


def test_none_shows_nothing_but_what_is_said(capsys):
    shown = progress.progress_of(ObserveConfig(progress="none"), 2, sys.stdout)
    shown.begin(0, 4)
    shown.end(0, _metrics(0))
    shown.say("warning: mismatch")
    shown.close()
    assert capsys.readouterr() == ("", "warning: mismatch\n")


def test_the_display_shows_the_run_its_groups_and_what_is_waited_for():
    now = progress.Shown(
        total=80,
        version=12,
        num_groups=64,
        finished=37,
        trained=32,
        waiting_for="5 groups",
        phase="generating",
        begun=10.0,
        phase_begun=20.0,
        seconds=12.0,
        metrics=_metrics(3),
    )
    for width in (40, 80, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(progress.display(now, 33.0))
        rows = console.file.getvalue().splitlines()
        assert len(rows) == 3
        assert max(map(len, rows)) <= width
    text = console.file.getvalue()
    for part in (
        "iteration 13 of 80",
        "13:13 left",
        "32 of 64 groups trained",
        "37 finished",
        "generating 0:13, waiting for 5 groups",
        "reward 0.300",
        "tokens/s 1,000 generated, 2,000 trained",
    ):
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
        with shown:
            shown.begin(0, 2)
            started = time.monotonic()
            for count in range(20000):
                shown.counts(finished=count)
            assert time.monotonic() - started < 2
            shown.phase("evaluating")
            time.sleep(0.6)
            shown.say("a [warning]")
            shown.end(0, _metrics(0))
        shown.close()
    thread.join(5)
    os.close(reader)
    text = b"".join(read).decode()
    for part in ("iteration 1 of 3", "19999 finished", "evaluating", "a [warning]", "iteration 1/3  reward   0.000"):
        assert part in text, part
    # At most 4 a second, and those of start, of the two lines and of the end.
    assert text.count("groups trained") <= 4 + 4
    # The cursor is shown again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("kind", ["lines", "live"])
def test_a_reader_that_is_gone_ends_the_progress_and_not_the_loop(kind, capfd, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    shown = progress.progress_of(ObserveConfig(progress=kind), 3, stream)
    for version in range(3):
        shown.begin(version, 2)
        shown.counts(trained=1)
        shown.end(version, _metrics(version))
    shown.say("still said")
    shown.close()
    errors = capfd.readouterr().err
    assert errors.count("progress is not shown any more: BrokenPipeError") == 1
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
    for _ in range(100):
        shown.counts(trained=1)
        time.sleep(0.05)
        errors = capfd.readouterr().err
        if errors:
            break
    assert "progress is not shown any more: BrokenPipeError" in errors
    assert "Traceback" not in errors
    shown.close()
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_flags_of_what_a_person_sees_are_checked_when_they_are_read():
    with pytest.raises(UsageError, match="--log-interval 0 is below 1"):
        ObserveConfig(log_interval=0)
    with pytest.raises(UsageError, match="--log-samples -1 is below 0"):
        ObserveConfig(log_samples=-1)


# The end


def test_the_report_says_what_it_came_to_where_the_time_went_and_where_everything_lies(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(path, range(5))
    places = report.Places(metrics=path, checkpoint=tmp_path / "nothing")
    stream = io.StringIO()
    report.print_report(metrics.read(path), places, stream)
    assert (
        stream.getvalue()
        == f"""
what it came to
  reward      0.000  at version 0,  0.400  at version 4
  evaluation  0.000  at version 0,  0.400  at version 4

where the time went
  train  10.0 s   50.0%
  wait    2.5 s   12.5%
  other   7.5 s   37.5%
  all    20.0 s  100.0%

where everything lies
  checkpoint  {tmp_path}/nothing (not there)
  metrics     {path}
"""
    )


def test_a_report_of_nothing_is_nothing():
    assert report.report_lines([], report.Places()) == []
    assert report.report_lines([{"version": 3}], report.Places()) == []


def test_a_chart_of_a_line_is_a_line():
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
def test_a_chart_of_anything_fits(points):
    lines = chart("reward", {"run": points}).splitlines()
    assert len(lines) in (1, 15)
    assert max(map(len, lines)) <= 70


def test_the_command_prints_the_curves_of_runs_and_draws_them(tmp_path, capsys):
    for name, seconds in (("periodic", 1.0), ("sync", 2.0)):
        _write(tmp_path / name / "metrics.jsonl", range(6), seconds)
    runs = [str(tmp_path / "periodic"), f"slow={tmp_path / 'sync' / 'metrics.jsonl'}"]
    assert cli.main(["picture", *runs]) == ExitCode.OK
    assert "reward   * periodic   o slow" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "curves.png"
    assert cli.main(["picture", *runs, "--out", str(out)]) == ExitCode.OK
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(out.parent.iterdir()) == [out]


def test_the_command_names_what_it_cannot_draw(tmp_path, capsys):
    _write(tmp_path / "a" / "run" / "metrics.jsonl", range(2))
    _write(tmp_path / "b" / "run" / "metrics.jsonl", range(2))
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
        "import sys; from megatron_rl.observe import metrics, picture, progress, report, samples, sinks, timeline\n"
        "assert not {'torch', 'matplotlib', 'wandb', 'tensorboard'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
