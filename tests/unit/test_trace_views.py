"""The views of a trace: the ledger as a table, the spans in Perfetto and in a report."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.analysis import perfetto
from megatron_rl.analysis.report import traces
from megatron_rl.cli import main
from megatron_rl.observe import trace
from megatron_rl.observe.trace import FOLDER, FORMAT, Process, Recorder, Span, Trace, TraceFile, Window
from tests.observed import write_metrics


def write_rank(run: Path) -> None:
    """Write two iterations of 10 s: a publish of 1 s, a forward pass of 4 s."""
    now = 0.0
    recorder = Recorder(lambda: now)
    with TraceFile(run, "rank-0", {"offset": 0.0}) as file:
        for version in range(2):
            recorder.add(recorder.kind("main", "publish"), now, now + 1)
            recorder.add(recorder.kind("main", "schedule"), now + 1, now + 10)
            recorder.add(recorder.kind("compute", "forward", role="policy", chunk=0), now + 2, now + 6, 3, 640)
            now += 10
            file.write(version, recorder.take())


def write_sidecar(run: Path) -> None:
    """Write two groups that overlap on one engine, and one after them."""
    now = 0.0
    recorder = Recorder(lambda: now)
    queue = recorder.kind("groups", "queue")
    generate = recorder.kind("groups", "generate", engine="engine-0", size=4)
    for prompt, (begin, end) in enumerate([(1, 5), (2, 6), (5, 8)]):
        recorder.add(queue, 0, begin, prompt)
        recorder.add(generate, begin, end, prompt, 100)
    now = 20.0
    with TraceFile(run, "sidecar", {"offset": 0.0}) as file:
        file.write(0, recorder.take(), engines={"engine-0": 8})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_rank(tmp_path)
    write_sidecar(tmp_path)
    write_metrics(tmp_path / "metrics.jsonl", range(2))
    return tmp_path


def converted(run: Path) -> list[dict]:
    return perfetto.convert(trace.read_trace(run))["traceEvents"]


def test_the_ledger_is_a_table_of_shares_and_an_object_of_seconds(run, capsys):
    assert main(["ledger", str(run)]) == 0
    of_rank, of_engine = (line for line in capsys.readouterr().out.splitlines() if "-0 " in line)
    assert of_rank.split()[:3] == ["rank-0", "20.00", "40.0%"]
    assert of_engine.split()[:2] == ["engine-0", "20.00"]
    assert main(["ledger", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank-0"]["wall"], found["rank-0"]["seconds"]["busy"]) == (20, 8)
    assert found["rank-0"]["details"]["busy: forward policy"] == 8
    assert found["engine-0"]["seconds"]["tail"] + found["engine-0"]["seconds"]["busy"] == 7


def test_only_the_newest_iterations_are_accounted_for_if_so_asked(run, capsys):
    assert main(["ledger", str(run), "--json", "--last", "1"]) == 0
    # The sidecar has no line of the last iteration.
    assert json.loads(capsys.readouterr().out)["rank-0"]["wall"] == 10


def test_every_span_is_an_event_with_its_times_and_details(run):
    spans = [event for event in converted(run) if event["ph"] == "X"]
    assert len(spans) == 6 + 6
    (first, _) = (event for event in spans if event["name"] == "forward policy")
    assert (first["ts"], first["dur"], first["cat"]) == (2e6, 4e6, "compute")
    assert first["args"] == {"role": "policy", "chunk": 0, "number": 3, "amount": 640}


def test_events_of_a_thread_lie_one_within_another_or_follow_each_other(run):
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in converted(run):
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    # Two threads of the rank; the first two groups overlap, and the third one takes the place of the first.
    assert len(threads) == 2 + 3 + 2
    for events in threads.values():
        for begin, end in events:
            assert not any(begin < other < end < other_end for other, other_end in events)


def test_counters_say_how_many_responses_are_in_flight(run):
    counters = [event for event in converted(run) if event["ph"] == "C" and "in flight" in event["name"]]
    assert {event["name"] for event in counters} == {"responses in flight: engine-0"}
    assert [event["args"]["count"] for event in counters] == [4, 8, 4, 8, 4, 0]


def test_processes_and_threads_have_names(run):
    names = Counter(event["args"]["name"] for event in converted(run) if event["name"] == "process_name")
    assert names == {"rank-0": 1, "sidecar": 1}
    threads = {event["args"]["name"] for event in converted(run) if event["name"] == "thread_name"}
    assert {"main", "compute", "groups: engine-0 1", "groups: engine-0 2"} <= threads


def test_the_command_writes_a_file_and_says_how_to_open_it(run, capsys):
    out = run / "trace.json"
    assert main(["trace", str(run), "--out", str(out)]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"] == converted(run)


def test_a_file_that_cannot_be_written_is_named(run, capsys):
    assert main(["trace", str(run), "--out", str(run / "metrics.jsonl" / "trace.json")]) != 0
    assert "trace.json cannot be written: " in capsys.readouterr().err


def test_an_empty_trace_has_no_events():
    assert perfetto.convert(Trace(()))["traceEvents"] == []


def trace_of(seconds, num_groups=2):
    """Build a rank and a sidecar, one iteration after the other, iteration i of `seconds[i]`."""
    rank, sidecar, now = [], [], 100.0
    for version, length in enumerate(seconds):
        spans = (
            Span("main", "train", now, now + length),
            Span("main", "schedule", now + 0.1, now + 0.9 * length),
            Span("compute", "forward", now + 0.2, now + 0.3, 0, 7, {"role": "policy"}),
        )
        rank.append(Window(version, now, now + length, spans, error=0.001))
        groups = tuple(
            Span("groups", name, now + 0.1, now + 0.2 + 0.01 * place, place, 5, details)
            for place in range(num_groups)
            for name, details in (("generate", {"engine": "engine-0", "size": 4, "evaluation": None}), ("reward", {}))
        )
        sidecar.append(Window(version, now, now + length, groups, {"engines": {"engine-0": 64}}, num_dropped=3))
        now += length
    return Trace((Process("rank-0", tuple(rank)), Process("sidecar", tuple(sidecar))))


def test_the_first_the_slowest_and_the_newest_iterations_are_shown():
    seconds = [1.0] * 30
    seconds[11], seconds[5] = 9.0, 8.0
    assert traces._choose(trace_of(seconds)) == [0, 5, 11, *range(24, 30)]
    assert traces._choose(Trace(())) == []


def test_an_iteration_has_the_spans_of_every_process_since_its_begin():
    shown = traces.describe_iteration(trace_of([1.0, 2.0]), 1)
    assert (shown["version"], shown["seconds"], shown["error"]) == (1, 2.0, 0.001)
    lanes = dict(shown["lanes"])
    assert list(lanes) == ["rank-0 main", "rank-0 compute", "engine-0 groups", "groups: reward"]
    assert lanes["rank-0 main"] == [
        [0, "train", 0, 2_000_000, None, None, {}],
        [1, "schedule", 100_000, 1_700_000, None, None, {}],
    ]
    assert lanes["rank-0 compute"] == [[0, "forward", 200_000, 100_000, 0, 7, {"role": "policy"}]]
    assert [(row, number) for row, _, _, _, number, _, _ in lanes["engine-0 groups"]] == [(0, 1), (1, 0)]
    assert shown["num_left_out"] == 3


def test_the_longest_of_too_many_spans_stay_and_the_others_are_counted():
    shown = traces.describe_iteration(trace_of([1.0], num_groups=100), 0, most=20)
    spans = [span for _, spans in shown["lanes"] for span in spans]
    assert len(spans) == 20
    assert shown["num_left_out"] == 3 + 203 - 20
    assert min(span[3] for span in spans) >= 990_000
    equal = Window(0, 0.0, 1.0, tuple(Span("main", "wait", 0.1, 0.2) for _ in range(50)))
    (lane,) = traces.describe_iteration(Trace((Process("rank-0", (equal,)),)), 0, most=5)["lanes"]
    assert len(lane[1]) == 5


def test_rows_are_free_when_a_span_takes_them():
    spans = [Span("a", "s", begin, end) for begin, end in [(0, 10), (1, 3), (2, 5), (3, 4), (10, 11)]]
    rows = [(row, span.begin) for row, span in traces.stack(spans)]
    assert rows == [(0, 0), (1, 1), (2, 2), (1, 3), (0, 10)]


def test_a_run_without_a_trace_has_none_and_one_of_another_format_is_named(tmp_path):
    assert traces.summarize_trace(tmp_path) is None
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / "rank-0.jsonl"
    path.write_text(json.dumps({"version": 0, "format": FORMAT + 1}) + "\n")
    assert "was written by another version of megatron_rl" in traces.summarize_trace(tmp_path)["problem"]
    line = {"version": 0, "format": FORMAT, "process": "rank-0", "offset": 0.0, "error": None, "begin": 1.0, "end": 3.0}
    kinds = [{"lane": "main", "name": "publish"}]
    path.write_text(json.dumps({**line, "dropped": 0, "kinds": kinds, "spans": [[0, 0, 500_000]]}) + "\n{torn")
    found = traces.summarize_trace(tmp_path)
    (account,) = found["accounts"]
    assert account[:3] == ["rank-0", "rank", 2.0]
    assert (account[3]["publish"], account[3]["other"]) == (0.5, 1.5)
    assert [iteration["version"] for iteration in found["iterations"]] == [0]
