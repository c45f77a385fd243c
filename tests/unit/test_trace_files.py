"""The files of a trace: they are read as written, on one clock, also after a kill, a resume, and in a long run."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.observe import trace
from megatron_rl.observe.timeline import Timeline
from megatron_rl.observe.trace import Exchange, Recorder, Span, TraceFile, ask_clock, estimate_offset, find_path


class Clock:
    """A clock that shows the time a test sets."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write(run: Path, process: str, versions: range, offset: float = 0.0, **facts: Any) -> None:
    """Write lines of 2 seconds each, of which the policy's forward pass takes half a second."""
    clock = Clock(100.0 + 2 * versions.start)
    recorder = Recorder(clock)
    forward = recorder.kind("compute", "forward", role="policy", chunk=0)
    with TraceFile(run, process, {"offset": offset, "error": None}) as file:
        file.restart(versions.start)
        for version in versions:
            recorder.add(forward, clock.now + 0.25, clock.now + 0.75, 3, 640)
            clock.now += 2
            file.write(version, recorder.take(), **facts)


def test_spans_are_read_as_they_were_written(tmp_path):
    write(tmp_path, "rank-0", range(2), replica=1)
    (process,) = trace.read_trace(tmp_path).processes
    first, second = process.windows
    assert (first.version, first.begin, first.end, first.facts["replica"]) == (0, 100, 102, 1)
    assert second.spans == (Span("compute", "forward", 102.25, 102.75, 3, 640, {"role": "policy", "chunk": 0}),)
    assert second.begin == first.end


def test_ranks_come_first_and_by_number(tmp_path):
    for process in ("sidecar", "rank-10", "rank-2"):
        write(tmp_path, process, range(1))
    assert [process.name for process in trace.read_trace(tmp_path).processes] == ["rank-2", "rank-10", "sidecar"]
    assert [process.name for process in trace.read_trace(tmp_path).ranks] == ["rank-2", "rank-10"]


def test_rank_0s_measurement_of_another_clock_counts_more_than_the_clocks_own_lines(tmp_path):
    write(tmp_path, "rank-0", range(2), offset=1000.0, clocks={"sidecar": [-50.0, 0.001]})
    write(tmp_path, "sidecar", range(3), offset=7.0)
    rank, sidecar = trace.read_trace(tmp_path).processes
    assert rank.windows[0].begin == 1100
    # No process measured it in iteration 2, and clocks run alike.
    assert [(window.begin, window.error) for window in sidecar.windows] == [(50, 0.001), (52, 0.001), (54, 0.001)]


def test_a_process_whose_clock_was_not_measured_says_so(tmp_path):
    write(tmp_path, "sidecar", range(1), offset=7.0)
    (window,) = trace.read_trace(tmp_path).processes[0].windows
    assert (window.begin, window.error) == (107, None)


def test_a_resumed_run_writes_the_file_of_a_run_that_was_never_stopped(tmp_path):
    write(tmp_path / "whole", "rank-0", range(6))
    write(tmp_path / "resumed", "rank-0", range(4))
    with find_path(tmp_path / "resumed", "rank-0").open("ab") as file:
        file.write(b'{"version": 4, "spa')
    assert len(trace.read_trace(tmp_path / "resumed").processes[0].windows) == 4
    write(tmp_path / "resumed", "rank-0", range(2, 6))
    assert trace.read_trace(tmp_path / "resumed") == trace.read_trace(tmp_path / "whole")


def test_only_iterations_that_every_process_has_are_common(tmp_path):
    write(tmp_path, "rank-0", range(4))
    write(tmp_path, "sidecar", range(1, 6))
    found = trace.read_trace(tmp_path)
    assert found.versions == [1, 2, 3]
    assert [len(process.windows) for process in found.select([2]).processes] == [1, 1]


def test_spans_beyond_the_most_of_a_line_are_counted(tmp_path):
    recorder = Recorder(Clock(), most=2)
    for _ in range(5):
        recorder.add(recorder.kind("main", "wait"), 100.0, 101.0)
    taken = recorder.take()
    assert (len(taken["spans"]), taken["dropped"]) == (2, 3)
    assert (recorder.take()["spans"], recorder.take()["dropped"]) == ([], 0)


def test_long_files_stay_below_their_bound_and_have_iterations_of_the_whole_run_in_common(tmp_path):
    num_lines, most = 400, 10_000
    for process in ("rank-0", "sidecar"):
        recorder = Recorder(Clock())
        # The sidecar's lines are longer.
        with TraceFile(
            tmp_path, process, {"offset": 0.0, "more": "x" * (90 if process == "sidecar" else 0)}, most
        ) as file:
            for version in range(num_lines):
                file.write(version, recorder.take())
                assert file.size <= most
    found = trace.read_trace(tmp_path)
    assert all(len(process.windows) < num_lines / 4 for process in found.processes)
    assert set(range(0, num_lines, 64)) | set(range(num_lines - 8, num_lines)) <= set(found.versions)


def test_a_file_that_is_thinned_continues_in_its_place_and_has_one_writer(tmp_path):
    recorder = Recorder(Clock())
    with TraceFile(tmp_path, "rank-0", {"offset": 0.0}) as file:
        for version in range(20):
            file.write(version, recorder.take())
        file.thin(0)
        file.write(20, recorder.take())
        with pytest.raises(ValueError, match="version 3 cannot follow 20"):
            file.write(3, recorder.take())
    assert [window.version for window in trace.read_trace(tmp_path).processes[0].windows] == [0, *range(12, 21)]
    assert find_path(tmp_path, "rank-0").stat().st_mode & 0o077 == 0


def test_a_folder_without_a_trace_and_a_line_of_another_format_are_named(tmp_path):
    with pytest.raises(InputError, match="has no trace: wait for the end of the first iteration"):
        trace.read_trace(tmp_path)
    write(tmp_path, "rank-0", range(1))
    path = find_path(tmp_path, "rank-0")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}) + "\n")
    with pytest.raises(InputError, match=r"rank-0\.jsonl was written by another .* is 9, and this version reads 1"):
        trace.read_trace(tmp_path)


def test_spans_of_the_loop_are_recorded_and_parts_change_no_metric(tmp_path):
    clock = Clock()
    recorder = Recorder(clock)
    timeline = Timeline(clock, recorder)
    with timeline.span("train"):
        clock.now += 1
        with timeline.span("wait", 5):
            clock.now += 2
        with timeline.part("schedule"):
            clock.now += 4
    assert timeline.take() == {"iteration": 7, "train": 5, "wait": 2, "other": 0}
    with TraceFile(tmp_path, "rank-0", {"offset": 0.0}) as file:
        file.write(0, recorder.take())
    assert sorted(trace.read_trace(tmp_path).processes[0].windows[0].spans, key=lambda span: span.begin) == [
        Span("main", "train", 100, 107),
        Span("main", "wait", 101, 103, 5),
        Span("main", "schedule", 103, 107),
    ]


# Clocks

_SECONDS = st.floats(0, 10)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(_SECONDS, _SECONDS, _SECONDS), min_size=1, max_size=8))
def test_an_offset_is_wrong_by_no_more_than_it_says(offset, delays):
    now, exchanges = 0.0, []
    for pause, there, back in delays:
        asked = now + pause
        now = asked + there + back
        exchanges.append(Exchange(asked, asked + there + offset, now))
    found = estimate_offset(exchanges)
    # The rounding of numbers as large as the offset.
    assert abs(found.seconds - offset) <= found.error + 1e-9
    assert found.error == min(exchange.answered - exchange.asked for exchange in exchanges) / 2


def test_the_other_clock_is_asked_between_two_readings_of_the_own_one():
    clock = Clock()

    def other():
        clock.now += 1
        return -clock.now

    assert ask_clock(clock, other, 2) == [Exchange(100, -101, 101), Exchange(101, -102, 102)]
