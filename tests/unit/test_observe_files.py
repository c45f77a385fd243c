"""The files that a run leaves, and the sinks that its metrics go to."""

import json
import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.config.settings import ObserveConfig
from megatron_rl.errors import InputError, PlatformError
from megatron_rl.observe import metrics, sinks
from megatron_rl.observe.metrics import MetricsFile
from megatron_rl.observe.samples import SampledGroup, SampledResponse, SamplesFile
from megatron_rl.shared.records.append_file import FileInUse, read_lines
from tests.observed import metrics_record, write_metrics
from tests.processes import ROOT

# Files


@pytest.mark.parametrize("continued_from", [0, 3, 5])
def test_a_resumed_runs_file_is_that_of_a_run_that_was_never_stopped(tmp_path, continued_from):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_metrics(whole, range(8))
    write_metrics(resumed, range(5))
    with resumed.open("ab") as file:
        file.write(b'{"version": 5, "rew')
    with MetricsFile(resumed) as file:
        assert file.restart(continued_from) == 5 - continued_from
        for version in range(continued_from, 8):
            file.write(metrics_record(version, seconds=9.0))
    assert metrics.without_times(metrics.read_metrics(resumed)) == metrics.without_times(metrics.read_metrics(whole))
    assert metrics.read_metrics(resumed) != metrics.read_metrics(whole)


def test_a_torn_last_line_is_cut_off_when_the_file_is_opened(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"version": 2')
    assert [record["version"] for record in metrics.read_metrics(path)] == [0, 1]
    MetricsFile(path).close()
    assert path.read_bytes() == whole


def test_a_line_can_be_read_as_soon_as_write_returns(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(metrics_record(0))
        assert [record["version"] for record in metrics.read_metrics(tmp_path)] == [0]


def test_a_file_has_one_writer_and_its_versions_never_decrease(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        with pytest.raises(FileInUse, match="end that run"):
            MetricsFile(tmp_path / "metrics.jsonl")
        file.write(metrics_record(3))
        with pytest.raises(ValueError, match=r"version 2 cannot follow 3: call restart\(2\) first"):
            file.write(metrics_record(2))
        file.restart(2)
        file.write(metrics_record(2))


def test_the_contents_of_a_file_are_set_aside_under_the_next_number(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        assert file.set_aside() is None
        file.write(metrics_record(0))
        assert [file.set_aside(), file.set_aside()] == [tmp_path / "metrics.jsonl.1", tmp_path / "metrics.jsonl.2"]
        file.restart(0)
    copy = tmp_path / "metrics.jsonl.2"
    assert [record["version"] for record in metrics.read_metrics(copy)] == [0]
    assert copy.stat().st_mode & 0o077 == 0


def test_a_damaged_line_is_named_and_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 0}\nnonsense\n{"version": 2}\n')
    path.chmod(0o600)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(InputError, match="metrics.jsonl, line 2: .*correct the line"):
            MetricsFile(path)
    with pytest.raises(InputError, match="line 2"):
        metrics.read_metrics(path)
    assert path.read_bytes() == before


def test_a_restart_drops_all_lines_from_the_first_later_version_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 0}\n{"version": 5}\n{"version": 3}\n')
    path.chmod(0o600)
    with MetricsFile(path) as file:
        assert file.restart(4) == 2
    assert metrics.read_metrics(path) == [{"version": 0}]


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"version": 0, "loss": math.nan, "reward": {"mean": np.float32(math.inf), "all": [1.0, -math.inf]}})
        file.write({"version": 1, "loss": np.float32(0.5), "count": np.int64(3), "note": "text"})

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
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write({"version": 0, "values": values})
    assert metrics.read_metrics(tmp_path)[0]["values"] == values


def _group(row, num_responses, text="a"):
    responses = [SampledResponse(f"{text}{i}", float(i), {"exact": 1.0}) for i in range(num_responses)]
    return SampledGroup(row, f"prompt of {row}", responses)


def test_samples_are_bounded_over_all_writes_of_an_iteration(tmp_path):
    with SamplesFile(tmp_path / "samples.jsonl", limit=4) as file:
        file.write(0, [_group("r0", 3)])
        assert file.left(0) == 1
        assert file.left(1) == 4
        file.write(0, [_group("r1", 3), _group("r2", 3)])
        assert file.left(0) == 0
        file.write(1, [_group("r3", 2)])
    lines = read_lines(file.path)
    assert [(line["version"], line["row"], len(line["responses"])) for line in lines] == [
        (0, "r0", 3),
        (0, "r1", 1),
        (1, "r3", 2),
    ]
    assert lines[1]["prompt"] == "prompt of r1"
    assert {line["kind"] for line in lines} == {"training"}
    (response,) = lines[1]["responses"]
    assert (response["text"], response["reward"], response["components"]) == ("a0", 0.0, {"exact": 1.0})


def test_samples_of_an_evaluation_are_marked_and_bounded_apart_from_those_of_training(tmp_path):
    with SamplesFile(tmp_path / "samples.jsonl", limit=2) as file:
        file.write(0, [_group("held out", 1)], "evaluation")
        file.write(0, [_group("r0", 3)])
        assert (file.left(0), file.left(0, "evaluation")) == (0, 1)
        file.write(0, [_group("r1", 1)])
        file.write(0, [_group("held out too", 3)], "evaluation")
    lines = read_lines(file.path)
    assert [(line["kind"], line["row"], len(line["responses"])) for line in lines] == [
        ("evaluation", "held out", 1),
        ("training", "r0", 2),
        ("evaluation", "held out too", 1),
    ]


def test_a_resumed_run_drops_and_bounds_samples_as_it_does_metrics(tmp_path):
    with SamplesFile(tmp_path / "samples.jsonl", limit=2) as file:
        for version in range(3):
            file.write(version, [_group("r", 2)])
        before = file.path.read_bytes()
        assert file.restart(2) == 1
        file.write(2, [_group("r", 2)])
        assert file.path.read_bytes() == before


def test_any_text_that_was_sampled_is_a_line(tmp_path):
    text = 'half \ud83d, "quoted",\nnext line, \u2028, \x00, 答え'
    with SamplesFile(tmp_path / "samples.jsonl", limit=1) as file:
        file.write(0, [SampledGroup("r", text, [SampledResponse(text, math.nan)])])
    (line,) = read_lines(file.path)
    assert line["prompt"] == line["responses"][0]["text"] == text.replace("\ud83d", "?")
    assert line["responses"][0]["reward"] is None
    assert line["nonfinite"] == ["responses/0/reward"]


def test_no_samples_are_written_when_none_are_asked_for(tmp_path):
    with SamplesFile(tmp_path / "samples.jsonl", limit=0) as file:
        file.write(0, [_group("r", 2)])
        assert file.path.read_bytes() == b""


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
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


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


def test_a_sink_that_cannot_be_made_is_said_with_its_flag_and_left_out(monkeypatch, tmp_path):
    pytest.importorskip("tensorboard")

    def refuse(**named):
        raise RuntimeError("no network")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refuse))
    (tmp_path / "file").write_text("")
    said = []
    config = ObserveConfig(tensorboard_dir=tmp_path / "file" / "events", wandb_project="p")
    to = sinks.sinks_of(config, "run", 0, said.append)
    to.write(0, {"loss": 1.0})
    to.close()
    first, second = said
    assert first.startswith(f"--tensorboard-dir {tmp_path}/file/events fails and is left out: NotADirectoryError")
    assert second == "--wandb-project p fails and is left out: RuntimeError: no network"


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
    to = sinks.sinks_of(config, "a/run", 4, pytest.fail)
    to.write(4, {"version": 4, "reward": {"mean": 0.5}})
    to.close()
    to.close()
    place = {"project": "p", "entity": "me", "name": "a/run", "dir": str(tmp_path / "w")}
    assert calls == [
        {**place, "id": "a-run", "resume": "allow"},
        ("metric", "version", {}),
        ("metric", "*", {"step_metric": "version"}),
        ("log", {"reward/mean": 0.5, "version": 4}),
        "finish",
    ]
    assert (tmp_path / "w").is_dir()


def test_a_sink_that_fails_is_reported_once_and_left_out_and_the_others_continue():
    class Broken:
        def write(self, version, values):
            raise OSError("no room")

    said, written = [], []
    good = SimpleNamespace(write=lambda version, values: written.append(version), close=lambda: None)
    to = sinks.Sinks([Broken(), good], said.append)
    to.write(0, {})
    to.write(1, {})
    assert written == [0, 1]
    assert said == ["Broken fails and is left out from now on: OSError: no room"]
