"""The advice on another division of a run's devices, and the runs that are refused."""

import dataclasses
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.analysis.device_advice import Costs, DeviceSplit, RunDevices, advise, estimate_error, predict
from megatron_rl.cli import main
from megatron_rl.errors import ExitCode, InputError
from megatron_rl.observe.run_folder import CONFIG_FILE, SavedConfig, Value, write_saved_config
from megatron_rl.observe.trace import Process, Span, Trace, Window, read_trace
from tests.divided_run import Divided, run_divided
from tests.observed import write_metrics

# Engines need 13 s for an iteration and ranks 2 s; then 5 s and 9 s.
OF_SAMPLING = Divided(num_engines=2, num_replicas=4, group_seconds=0.3)
OF_TRAINING = Divided(num_engines=6, num_replicas=2, group_seconds=0.7)
# Responses that are all sampled at once, engines that slow down with each response, and lengths that differ much.
OTHERS = (
    Divided(3, 3, 1.2, num_prompts=48, max_running=64, lengths=(20, 400), seconds_per_response=6e-4),
    Divided(2, 6, 0.1, group_size=4, lengths=(20, 400), seconds_per_response=2e-4),
    Divided(8, 4, 0.3, group_size=4, max_running=64, seconds_per_response=6e-4),
    Divided(6, 6, 0.6, max_running=8, lengths=(200, 220)),
)


def measure(folder, run: Divided) -> Trace:
    """Run it, and return its trace without the first iteration."""
    run_divided(folder, run)
    whole = read_trace(folder)
    return whole.select(whole.versions[1:])


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> Trace:
    return measure(tmp_path_factory.mktemp("sampled"), OF_SAMPLING)


def read_rows(lines: Iterable[str]) -> dict[DeviceSplit, float]:
    """Read the predicted seconds of each division, the present one first."""
    rows = [line.split() for line in lines if line.lstrip()[:1].isdecimal()]
    return {DeviceSplit(int(row[0]), int(row[1])): float(row[5]) for row in rows}


def run_each(folder, run: Divided, splits: Iterable[DeviceSplit]) -> dict[DeviceSplit, float]:
    return {
        split: run_divided(
            folder / f"{split.num_engines}-{split.num_replicas}", dataclasses.replace(run, **vars(split))
        )
        for split in splits
    }


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (OF_SAMPLING, "try 2 ranks and --rollout-num-engines 4"),
        (OF_TRAINING, "try 4 ranks and --rollout-num-engines 4"),
    ],
)
def test_the_advised_division_is_nearly_the_fastest_of_runs_of_all(run, advice, tmp_path) -> None:
    lines = list(advise(measure(tmp_path / "measured", run), run.describe()))
    predicted = read_rows(lines)
    measured = run_each(tmp_path, run, predicted)
    assert len(predicted) >= 3
    for split, seconds in predicted.items():
        assert 0.95 * measured[split] < seconds < 1.15 * measured[split], split
    now, *splits = predicted
    best = min(splits, key=predicted.__getitem__)
    assert measured[best] < 0.8 * measured[now]
    assert measured[best] < 1.05 * min(measured.values())
    assert advice in lines


@pytest.mark.parametrize("run", OTHERS)
def test_a_division_is_hardly_slower_than_predicted_and_an_advised_one_never_slower_than_the_present(
    run, tmp_path
) -> None:
    lines = list(advise(measure(tmp_path / "measured", run), run.describe()))
    predicted = read_rows(lines)
    measured = run_each(tmp_path, run, predicted)
    for split, seconds in predicted.items():
        assert 0.85 * measured[split] < seconds < 1.5 * measured[split], split
    now, *splits = predicted
    best = min(splits, key=predicted.__getitem__)
    if any(line.startswith("try ") for line in lines):
        assert measured[best] < measured[now]
    else:
        assert "no other division gains more than the error: keep this one" in lines


def test_the_output_states_its_error_and_what_it_assumes(sampled) -> None:
    lines = list(advise(sampled, OF_SAMPLING.describe()))
    assert lines[0].startswith("measured: 8 iterations of ")
    assert lines[1].startswith("error: ")
    assert lines[-1].startswith("assumes: ")
    assert "The error of another division was not measured" in lines[-1]


# The rule.

COSTS = Costs(
    iteration=14.0, sampling=10.0, full=8.0, first=2.0, computing=5.0, schedule=0.5, micro_batch=0.5, serial=3.0,
    num_parts=24, parts_at_once=2,
)  # fmt: skip
NOW = DeviceSplit(4, 4)


@pytest.mark.parametrize(
    ("split", "seconds", "side"),
    [
        # Sampling and one more micro-batch, or the first group and training.
        (NOW, 3 + 10 + 0.5, "sampling"),
        (DeviceSplit(4, 2), 3 + 2 + 10 + 0.5, "training"),
        # Two waves in place of three; with 5 engines there are still three.
        (DeviceSplit(6, 4), 3 + 10 - 8 * (1 - 2 / 3) + 0.5, "sampling"),
        (DeviceSplit(5, 4), 3 + 10 + 0.5, "sampling"),
        (DeviceSplit(2, 4), 3 + 20 + 0.5, "sampling"),
    ],
)
def test_the_longer_side_counts_and_what_does_not_overlap_is_added(split, seconds, side) -> None:
    assert predict(COSTS, NOW, split) == (pytest.approx(seconds), side)


@pytest.mark.parametrize(("num_groups", "engines", "more"), [(2, 2, 4), (4, 2, 3), (8, 4, 7)])
def test_more_engines_gain_nothing_unless_groups_need_fewer_waves(num_groups, engines, more) -> None:
    costs = dataclasses.replace(COSTS, num_parts=num_groups, parts_at_once=1)
    now = DeviceSplit(engines, 4)
    assert predict(costs, now, DeviceSplit(more, 4)) == predict(costs, now, now)


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 64), st.integers(1, 64)
)
def test_every_division_uses_all_devices_and_changes_no_side_by_more_than_a_factor_of_two(
    num_engines, num_replicas, of_engine, of_replica, num_groups, num_parts
) -> None:
    devices = RunDevices(DeviceSplit(num_engines, num_replicas), of_engine, of_replica, 1, num_groups, 1)
    for split in devices.list_splits(num_parts):
        assert devices.count_of_engines(split) + devices.count_of_trainer(split) == devices.total
        assert num_engines <= 2 * split.num_engines <= 4 * num_engines
        assert num_replicas <= 2 * split.num_replicas <= 4 * num_replicas
        assert split.num_engines <= num_parts
        assert num_groups % split.num_replicas == 0


@pytest.mark.parametrize(("factor", "error"), [(1.0, 0.0), (1.1, 0.1), (0.8, 0.25)])
def test_the_error_comes_from_iterations_that_the_prediction_has_not_used(factor, error) -> None:
    exact = dataclasses.replace(COSTS, iteration=13.5)
    times = {name: factor * value for name, value in vars(exact).items() if name not in ("num_parts", "parts_at_once")}
    measured = [exact] * 4 + [dataclasses.replace(exact, **times)] * 4
    assert estimate_error(measured, NOW) == pytest.approx(error)
    # A rule that leaves something out is off for both halves.
    assert estimate_error([dataclasses.replace(COSTS, iteration=15.0)] * 8, NOW) == pytest.approx(0.1)


# Refusals.


def change(section: str, name: str, text: str) -> SavedConfig:
    config = OF_SAMPLING.describe()
    changed = {**config.sections[section], name: Value(text, "default")}
    return SavedConfig(num_devices=config.num_devices, sections={**config.sections, section: changed})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "needs the run's config.json .*name the folder of a run"),
        (SavedConfig(num_devices=1), "needs the run's config.json"),
        (change("loop", "schedule", "sync"), "do not overlap; measure a run of --schedule periodic"),
        (change("sampling", "tail", "resume"), "ahead of their iteration; measure a run of --rollout-tail stop"),
        (change("rollout", "colocate", "share"), "measure a run without --rollout-colocate"),
        (change("service", "endpoint", "http://host:1"), "measure a run that starts its own"),
        (change("rollout", "num_engines", "-"), "no number rollout.num_engines"),
        (change("rollout", "num_engines", "3"), "4 ranks and 2 engines, and config.json says 4 and 3"),
        (change("rollout", "tensor_parallel_size", "3"), "no other division of the 10 devices is near enough"),
    ],
)
def test_a_run_whose_devices_cannot_be_divided_is_refused_with_the_way_out(sampled, config, message) -> None:
    with pytest.raises(InputError, match=message):
        list(advise(sampled, config))


def alter(trace: Trace, alter_window: Callable[[Process, Window], Window]) -> Trace:
    return Trace(
        tuple(
            Process(process.name, tuple(alter_window(process, window) for window in process.windows))
            for process in trace.processes
        )
    )


def publish_for_long(process: Process, window: Window) -> Window:
    """Let ranks publish for as long as they waited."""
    spans = (dataclasses.replace(span, name="publish") if span.name == "wait" else span for span in window.spans)
    return dataclasses.replace(window, spans=tuple(spans))


def lose_an_engine(process: Process, window: Window) -> Window:
    if "engines" not in window.facts or window.version != 5:
        return window
    return dataclasses.replace(window, facts={"engines": {"engine-0": 16}})


def test_a_run_that_something_else_holds_up_is_refused(sampled) -> None:
    with pytest.raises(InputError, match="change that first: publish: ranks bring weights"):
        list(advise(alter(sampled, publish_for_long), OF_SAMPLING.describe()))
    with pytest.raises(InputError, match="4 ranks and 1 or 2 engines"):
        list(advise(alter(sampled, lose_an_engine), OF_SAMPLING.describe()))


def test_a_short_run_and_one_that_changed_are_refused(sampled) -> None:
    config = OF_SAMPLING.describe()
    with pytest.raises(InputError, match="it needs 8 iterations after the first, which warms up, and has 4"):
        list(advise(sampled.select(range(1, 5)), config))
    pivot = sampled.processes[0].windows[4].begin

    def stretch(process: Process, window: Window) -> Window:
        def move(moment: float) -> float:
            return moment if moment <= pivot else pivot + 1.3 * (moment - pivot)

        def move_span(span: Span) -> Span:
            return dataclasses.replace(span, begin=move(span.begin), end=move(span.end))

        return dataclasses.replace(
            window, begin=move(window.begin), end=move(window.end), spans=tuple(map(move_span, window.spans))
        )

    with pytest.raises(InputError, match=r"off by 2\d% of an iteration, more than 15%.*iterations are alike"):
        list(advise(alter(sampled, stretch), config))


def test_iterations_that_a_journal_restored_or_that_have_a_second_line_are_left_out(sampled) -> None:
    config = OF_SAMPLING.describe()

    def restore(process: Process, window: Window) -> Window:
        if process.is_rank or window.version != 3:
            return window
        return dataclasses.replace(window, spans=tuple(span for span in window.spans if span.name == "iteration"))

    def write_twice(process: Process) -> Process:
        return Process(process.name, (*process.windows, dataclasses.replace(process.windows[-1], spans=())))

    for trace in (alter(sampled, restore), Trace(tuple(map(write_twice, sampled.processes)))):
        with pytest.raises(InputError, match="it needs 8 iterations after the first, which warms up, and has 7"):
            list(advise(trace, config))


def test_a_trace_of_ranks_alone_is_refused(sampled) -> None:
    ranks = Trace(tuple(process for process in sampled.processes if process.is_rank))
    with pytest.raises(InputError, match="no file of the sidecar"):
        list(advise(ranks, OF_SAMPLING.describe()))


def test_the_command_advises_on_a_runs_folder(tmp_path, capsys) -> None:
    write_metrics(tmp_path / "metrics.jsonl", range(9))
    assert main(["explain", str(tmp_path), "--devices"]) == ExitCode.INPUT
    assert "start the run with --trace on" in capsys.readouterr().err
    run_divided(tmp_path, OF_SAMPLING)
    assert main(["explain", str(tmp_path), "--devices"]) == ExitCode.INPUT
    assert "needs the run's config.json" in capsys.readouterr().err
    write_saved_config(tmp_path / CONFIG_FILE, OF_SAMPLING.describe())
    assert main(["explain", str(tmp_path), "--devices"]) == ExitCode.OK
    assert "try 2 ranks and --rollout-num-engines 4" in capsys.readouterr().out
