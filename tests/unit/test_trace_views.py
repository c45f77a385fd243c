"""The views of a trace for people and programs: the ledger as a table, the spans in Perfetto."""

import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.analysis import perfetto
from megatron_rl.cli import main
from megatron_rl.observe import trace
from megatron_rl.observe.trace import Recorder, Trace, TraceFile
from tests.observed import write_metrics


def write_rank(run: Path) -> None:
    """Write two iterations of 10 s: a publish of 1 s, a forward pass of 4 s."""
    now = 0.0
    recorder = Recorder(lambda: now)
    file = TraceFile(run, "rank-0", {"offset": 0.0})
    for version in range(2):
        recorder.add(recorder.kind("main", "publish"), now, now + 1)
        recorder.add(recorder.kind("main", "schedule"), now + 1, now + 10)
        recorder.add(recorder.kind("compute", "forward", role="policy", chunk=0), now + 2, now + 6, 3, 640)
        now += 10
        file.write(version, recorder.take())
    file.close()


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
    file = TraceFile(run, "sidecar", {"offset": 0.0})
    file.write(0, recorder.take(), engines={"engine-0": 8})
    file.close()


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
    assert main(["trace", str(run), "--out", str(run / "nowhere" / "trace.json")]) != 0
    assert "trace.json cannot be written: No such file" in capsys.readouterr().err


def test_an_empty_trace_has_no_events():
    assert perfetto.convert(Trace(()))["traceEvents"] == []
