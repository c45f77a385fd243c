"""The ledger: every moment of a rank and of an engine has one cause. Traces are made by hand, with times in seconds."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.analysis.ledger import ENGINE_CAUSES, RANK_CAUSES, Pieces, compute_ledger, find_innermost
from megatron_rl.observe.trace import COMPUTE, GROUPS, MAIN, SERVICE, SIDECAR, Process, Span, Trace, Window


def main(name: str, begin: float, end: float, number: int | None = None) -> Span:
    return Span(MAIN, name, begin, end, number)


def compute(name: str, begin: float, end: float, role: str = "policy") -> Span:
    return Span(COMPUTE, name, begin, end, 0, 100, {"role": role, "chunk": 0})


def generate(engine: str, begin: float, end: float, size: int = 4, **details: bool) -> Span:
    return Span(GROUPS, "generate", begin, end, 0, 50, {"engine": engine, "size": size, **details})


def queue(begin: float, end: float) -> Span:
    return Span(GROUPS, "queue", begin, end, 0)


def environment(begin: float, end: float, **details: bool) -> Span:
    return Span(GROUPS, "environment", begin, end, 0, None, {"call": "step", **details})


def rank(*spans: Span, end: float = 10.0, name: str = "rank-0") -> Process:
    return Process(name, (Window(0, 0.0, end, spans),))


def sidecar(*spans: Span, end: float = 10.0, **capacities: int) -> Process:
    return Process(SIDECAR, (Window(0, 0.0, end, spans, {"engines": capacities}),))


def seconds_of(name: str, *processes: Process) -> dict[str, float]:
    """Return the causes of a rank or engine that have any time."""
    accounts = {account.name: account for account in compute_ledger(Trace(processes))}
    return {cause: seconds for cause, seconds in accounts[name].seconds.items() if seconds}


def test_each_part_of_an_iteration_is_its_cause() -> None:
    loop = (
        main("publish", 0, 1), main("evaluate", 1, 2), main("submit", 2, 2.25), main("train", 2.25, 9),
        main("wait", 2.5, 3, 0), main("schedule", 3, 7), main("forward-recv", 3, 3.5), main("agree", 7, 7.25),
        main("optimizer", 7.25, 8), main("update", 7.5, 7.75), main("complete", 8.5, 9), main("save", 9, 9.75),
    )  # fmt: skip
    passes = (compute("forward", 3.5, 4, "reference"), compute("forward", 4, 5), compute("backward", 5, 6.5))
    (account,) = compute_ledger(Trace((rank(*loop, *passes),)))
    assert account.seconds == {
        "publish": 1, "evaluation": 1, "first": 0.75, "busy": 3, "bubble": 1.25, "optimizer": 0.75, "report": 0.5,
        "checkpoint": 0.75, "starved": 0, "environment": 0, "tail": 0,
        # Before the first wait, between optimizer and report, and after the last span.
        "other": 0.25 + 0.5 + 0.25,
    }  # fmt: skip
    assert account.details["busy: forward reference"] == 0.5
    assert account.details["bubble: forward-recv"] == 0.5
    assert account.details["bubble: schedule"] == 0.5
    assert set(account.seconds) == set(RANK_CAUSES)
    assert account.wall == 10


def test_handing_out_demonstrations_is_a_report_and_not_a_bubble() -> None:
    loop = (main("train", 0, 10), main("pack", 0, 2), main("schedule", 2, 10), main("pack", 3, 3))
    passes = (compute("forward", 2, 6), compute("backward", 6, 10))
    assert seconds_of("rank-0", rank(*loop, *passes)) == {"report": 2, "busy": 8}


def test_computing_on_the_device_counts_as_busy_whatever_the_host_waits_for() -> None:
    found = seconds_of(
        "rank-0", rank(main("schedule", 0, 10), main("wait", 2, 8, 3), compute("forward", 1, 5)), sidecar(e=8)
    )
    assert found == {"busy": 4, "tail": 3, "bubble": 3}


def test_a_later_wait_is_starved_while_engines_are_full_or_groups_queue_and_tail_once_they_run_dry() -> None:
    groups = (
        queue(0, 4), generate("a", 0, 4), generate("a", 0, 6), generate("a", 4, 9), generate("b", 0, 7),
        generate("b", 0, 8),
    )  # fmt: skip
    # Each engine samples two groups of 4 at a time. From 4 on nothing queues; at 6 the first engine has room.
    found = seconds_of("rank-0", rank(main("wait", 0, 1, 0), main("wait", 1, 10, 1)), sidecar(*groups, a=8, b=8))
    assert found == {"first": 1, "starved": 5, "tail": 4}


def test_as_long_as_a_group_queues_ranks_starve_even_if_an_engine_has_room() -> None:
    engines = sidecar(queue(0, 6), generate("a", 0, 10), a=8)
    assert seconds_of("rank-0", rank(main("wait", 0, 10, 1)), engines) == {"starved": 6, "tail": 4}


def test_waits_are_starved_where_nothing_is_known_of_engines() -> None:
    assert seconds_of("rank-0", rank(main("wait", 0, 10, 1))) == {"starved": 10}


def test_other_ranks_wait_for_the_evaluation_of_rank_0() -> None:
    first = rank(main("evaluate", 1, 6), main("submit", 6, 7))
    second = rank(main("publish", 0, 1), main("submit", 1, 7), name="rank-1")
    assert seconds_of("rank-1", first, second) == {"publish": 1, "evaluation": 5, "first": 1, "other": 3}


def test_each_moment_of_an_engine_has_its_cause() -> None:
    spans = (
        Span(SERVICE, "publish", 0, 1, 0), Span(SERVICE, "evaluation", 1, 3, 0), generate("a", 1, 2, evaluation=True),
        queue(3.5, 5), generate("a", 3.5, 6), generate("a", 3.5, 7), generate("b", 3.75, 9),
        Span("b", "down", 9, 9.5),
    )  # fmt: skip
    both = sidecar(*spans, a=8, b=8)
    assert seconds_of("a", both) == {
        "publish": 1,
        "evaluation": 2,
        # Queued groups until 5, two of its own until 6; then one, and then the other engine's last.
        "busy": 2.5,
        "tail": 3,
        "idle": 0.5 + 1,
    }
    assert seconds_of("b", both) == {
        "publish": 1, "evaluation": 2, "idle": 0.5 + 0.25 + 0.5, "busy": 1.25, "tail": 4, "other": 0.5,
    }  # fmt: skip


def test_an_engine_that_has_room_for_less_than_a_group_is_full() -> None:
    assert seconds_of("a", sidecar(generate("a", 0, 10, size=4), a=7)) == {"busy": 10}
    assert seconds_of("a", sidecar(generate("a", 0, 10, size=4), a=8)) == {"tail": 10}


def test_time_belongs_to_environments_while_more_conversations_are_with_them_than_with_engines() -> None:
    spans = (
        generate("a", 0, 2, size=1), generate("b", 0, 3, size=1), environment(1, 6), environment(1, 4),
        environment(1, 4), generate("a", 6, 7, size=1), environment(6, 7), queue(8, 9), environment(8, 10),
    )  # fmt: skip
    both = sidecar(*spans, a=4, b=4)
    # Three are with environments from 1 to 4, beside two and then one with engines; from 6 to 7 it is one each.
    assert seconds_of("a", both) == {"tail": 2, "environment": 5 + 1, "idle": 2}
    assert seconds_of("b", both) == {"tail": 2, "environment": 5 + 1, "idle": 2}
    waits = rank(main("wait", 0, 1, 0), main("wait", 1, 10, 1))
    assert seconds_of("rank-0", waits, both) == {"first": 1, "environment": 6, "starved": 1, "tail": 2}


def test_a_full_engine_is_busy_and_an_evaluation_is_one_however_many_conversations_wait_for_environments() -> None:
    environments = [environment(0, 10) for _ in range(5)]
    assert seconds_of("a", sidecar(generate("a", 0, 10, size=1), *environments, a=1)) == {"busy": 10}
    evaluated = [environment(0, 10, evaluation=True), Span(SERVICE, "evaluation", 0, 10, 0)]
    assert seconds_of("a", sidecar(*evaluated, a=1)) == {"evaluation": 10}


def test_a_group_larger_than_an_engine_fills_it() -> None:
    assert seconds_of("a", sidecar(generate("a", 0, 10, size=16), a=8)) == {"busy": 10}


def test_time_between_two_starts_is_nobodys() -> None:
    windows = (
        Window(0, 0.0, 2.0, (main("publish", 0, 2),)),
        Window(1, 7.0, 9.0, (main("publish", 7, 8),)),
    )
    (account,) = compute_ledger(Trace((Process("rank-0", windows),)))
    assert (account.wall, account.seconds["publish"], account.seconds["other"]) == (4, 3, 1)


@st.composite
def nested(draw: st.DrawFn, begin: int = 0, end: int = 60, depth: int = 3) -> list[Span]:
    """Draw spans that lie one within another or follow each other."""
    cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
    spans = []
    for first, last in zip(cuts[::2], cuts[1::2], strict=False):
        name = draw(st.sampled_from(["publish", "submit", "train", "schedule", "wait", "update", "odd"]))
        spans.append(main(name, first, last, draw(st.integers(0, 2))))
        if depth and last > first:
            spans += draw(nested(first, last, depth - 1))
    return spans


@st.composite
def intervals(draw: st.DrawFn) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.lists(st.integers(0, 60), max_size=12, unique=True)))
    return list(zip(cuts[::2], cuts[1::2], strict=False))


@st.composite
def groups(draw: st.DrawFn) -> list[Span]:
    """Draw groups of an iteration and of an evaluation on two engines, and the times when they waited."""
    spans: list[Span] = []
    for _ in range(draw(st.integers(0, 8))):
        since, taken, end = sorted(draw(st.lists(st.integers(0, 60), min_size=3, max_size=3)))
        details = {"evaluation": True} if draw(st.booleans()) else {}
        spans.append(Span(GROUPS, "queue", since, taken, 0, None, details))
        spans.append(generate(draw(st.sampled_from("ab")), taken, end, **details))
        spans += [environment(end, min(60, end + 5), **details)] * draw(st.integers(0, 2))
    return spans


@given(nested(), intervals(), groups(), intervals())
def test_the_causes_of_a_process_add_up_to_its_wall_time(loop, passes, sampled, published) -> None:
    computed = [compute("forward", begin, end) for begin, end in passes]
    served = [Span(SERVICE, "publish", begin, end, 0) for begin, end in published]
    accounts = compute_ledger(Trace((rank(*loop, *computed, end=60.0), sidecar(*sampled, *served, end=60.0, a=8, b=4))))
    assert [account.name for account in accounts] == ["rank-0", "a", "b"]
    for account in accounts:
        assert round(sum(account.seconds.values()) * 1e9) == round(account.wall * 1e9) == 60 * 10**9
        assert set(account.seconds) == set(RANK_CAUSES if account.is_rank else ENGINE_CAUSES)
        assert min(account.seconds.values()) >= 0
    rank_account = accounts[0]
    assert sum(rank_account.details.values()) == pytest.approx(60)
    assert rank_account.seconds["busy"] == sum(end - begin for begin, end in passes)


@given(nested())
def test_each_moment_belongs_to_the_innermost_span(spans) -> None:
    pieces = Pieces(find_innermost(spans))
    for moment in range(60):
        (found,) = [value for _, _, value in pieces.over(moment * 10**9 + 1, moment * 10**9 + 2)]
        open_then = [span for span in spans if span.begin <= moment < span.end]
        if not open_then:
            assert found is None
        else:
            assert isinstance(found, Span)
            assert found.seconds == min(span.seconds for span in open_then)
            assert found in open_then


def _values(pieces: Pieces, begin: int, end: int) -> Iterable[object]:
    return [(first, last, value) for first, last, value in pieces.over(begin, end)]


def test_pieces_divide_a_time_without_gaps() -> None:
    pieces = Pieces([(2, 4, "x"), (6, 8, "y")])
    assert _values(pieces, 0, 10) == [(0, 2, None), (2, 4, "x"), (4, 6, None), (6, 8, "y"), (8, 10, None)]
    assert _values(pieces, 3, 7) == [(3, 4, "x"), (4, 6, None), (6, 7, "y")]
    assert _values(pieces, 4, 5) == [(4, 5, None)]
    assert _values(Pieces([]), 1, 2) == [(1, 2, None)]
