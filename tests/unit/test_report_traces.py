"""The parts of a report about traces: the ledger, and the spans of some iterations."""

import json

from megatron_rl.analysis.report import traces
from megatron_rl.observe.trace import FOLDER, FORMAT, Process, Span, Trace, Window


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
