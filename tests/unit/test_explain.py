"""The findings of a run: none of a healthy one, the fault of a sick one, and the length that one must have."""

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.analysis.explain import LEAST_ITERATIONS, LEAST_SECONDS, PRECISION, count_wanted, list_findings
from megatron_rl.cli import main
from megatron_rl.flag import index_by_name
from megatron_rl.observe.run_folder import SavedConfig, Value
from megatron_rl.observe.trace import COMPUTE, GROUPS, MAIN, SIDECAR, Process, Span, Trace, Window
from tests.observed import write_metrics
from tests.synthetic_run import write_trace

# Seconds of an iteration of 100 s: a healthy rank is nearly always busy.
HEALTHY = {"publish": 3.0, "first": 5.0, "starved": 2.0, "tail": 3.0, "bubble": 5.0, "optimizer": 3.0, "save": 1.0}


def rank(name: str = "rank-0", replica: int = 0, **seconds: float) -> Process:
    """Build one iteration of a rank; it computes for the rest of 100 s."""
    spans, now = [], 0.0

    def pass_time(length: float, lane: str, name: str, number: int | None = None, **details: Any) -> None:
        nonlocal now
        if length:
            spans.append(Span(lane, name, now, now + length, number, None, details))
        now += length

    parts = HEALTHY | seconds
    pass_time(parts["publish"], MAIN, "publish")
    pass_time(parts.get("evaluation", 0.0), MAIN, "evaluate")
    pass_time(parts["first"], MAIN, "wait", 0)
    pass_time(parts["starved"], MAIN, "wait", 1)
    pass_time(parts["tail"], MAIN, "wait", 2)
    pass_time(parts["bubble"], MAIN, "schedule")
    pass_time(parts["optimizer"], MAIN, "update")
    pass_time(parts["save"], MAIN, "save")
    now += parts.get("other", 0.0)
    pass_time(100 - now, COMPUTE, "forward", 0, role="policy", chunk=0)
    return Process(name, (Window(0, 0.0, 100.0, tuple(spans), {"replica": replica}),))


def sidecar(first: float = 5.0, starved: float = 2.0, reward: float = 0.01, sampling: float = 40.0) -> Process:
    """Build two engines with room for one group: full until ranks have starved, and then one of them."""
    begin = HEALTHY["publish"]
    full = begin + first + starved
    spans = (
        Span(GROUPS, "generate", begin, full, 0, 100, {"engine": "engine-0", "size": 8}),
        Span(GROUPS, "generate", begin, begin + sampling, 1, 100, {"engine": "engine-1", "size": 8}),
        Span(GROUPS, "reward", full, full + reward, 0),
    )
    return Process(SIDECAR, (Window(0, 0.0, 100.0, spans, {"engines": {"engine-0": 8, "engine-1": 8}}),))


def healthy_record(version: int) -> dict[str, Any]:
    return {
        "version": version, "groups": 64, "reward": {"mean": 0.5, "all_equal_groups": 16},
        "responses": {"truncated": 0.05}, "mismatch": {"mean": 1e-4}, "entropy": 1.0,
    }  # fmt: skip


HEALTHY_RECORDS = [healthy_record(version) for version in range(16)]
HEALTHY_TRACE = Trace((rank(), sidecar()))


def names(trace: Trace | None = HEALTHY_TRACE, records: Any = HEALTHY_RECORDS) -> list[str]:
    return [finding.name for finding in list_findings(trace, records)]


def grown(field: str, first: Mapping[str, float] | float, last: Mapping[str, float] | float) -> list[dict[str, Any]]:
    """Build metrics of a run whose second half has another value."""
    return [healthy_record(version) | {field: first if version < 8 else last} for version in range(16)]


def test_a_healthy_run_has_no_findings() -> None:
    assert names() == []


@pytest.mark.parametrize(
    ("cause", "seconds"),
    [("publish", 20.0), ("tail", 30.0), ("bubble", 30.0), ("evaluation", 20.0), ("other", 3.0), ("first", 30.0)],
)
def test_a_cause_that_takes_more_than_its_bound_is_the_one_that_is_said(cause, seconds) -> None:
    of_engines = sidecar(first=seconds) if cause == "first" else sidecar()
    # A publish, or an evaluation, delays what follows.
    shift = {"publish": seconds - HEALTHY["publish"], "evaluation": seconds}.get(cause, 0.0)
    trace = Trace((rank(**{cause: seconds}), sidecar(first=5.0 + shift) if shift else of_engines))
    (finding,) = list_findings(trace, HEALTHY_RECORDS)
    assert finding.name == cause
    assert finding.value == pytest.approx(seconds / 100)
    assert finding.sentence.startswith(f"{cause}: ranks ")
    assert f"{seconds:.0f}% of the time, above {finding.bound:.0%}" in finding.sentence


@pytest.mark.parametrize(
    ("platform", "rollout", "flag"),
    [
        (None, {}, "--rollout-transport nccl or hccl"),
        ("cuda", {"transport": "shm", "engine": "vllm"}, "--rollout-transport nccl)"),
        ("npu", {"transport": "shm", "engine": "vllm"}, "--rollout-transport hccl)"),
        # A CPU has no such transport, the run uses it already, or the engines have no device.
        ("cpu", {"transport": "shm", "engine": "vllm"}, None),
        ("cuda", {"transport": "nccl", "engine": "vllm"}, None),
        ("cuda", {"transport": "shm", "engine": "scripted"}, None),
    ],
)
def test_weights_are_to_be_streamed_where_the_platform_can(platform, rollout, flag) -> None:
    values = {name: Value(text, "default") for name, text in rollout.items()}
    config = SavedConfig(platform=platform, sections={"rollout": values})
    (finding,) = list_findings(Trace((rank(publish=20.0), sidecar())), HEALTHY_RECORDS, config)
    assert finding.name == "publish"
    assert ("--rollout-transport" in finding.sentence) == (flag is not None)
    assert flag is None or flag in finding.sentence
    assert "--grpo-prompts-per-step" in finding.sentence


def test_a_slow_disk_shows_in_checkpoints() -> None:
    (finding,) = list_findings(Trace((rank(save=20.0), sidecar())), HEALTHY_RECORDS)
    assert (finding.name, finding.value) == ("checkpoint", pytest.approx(0.2))
    assert "--async-save" in finding.sentence


def test_starved_ranks_are_told_how_many_engines_they_want() -> None:
    (finding,) = list_findings(Trace((rank(starved=60.0), sidecar(starved=60.0, sampling=65.0))), HEALTHY_RECORDS)
    assert finding.name == "starved"
    # Each of 2 engines samples for 65 s, and the rank has 29 s of other work.
    assert "add 3 engines to the 2 (--rollout-num-engines 5)" in finding.sentence


@pytest.mark.parametrize(
    ("num_groups", "advice"),
    [
        (3, "add 1 engine to the 2 (--rollout-num-engines 3)"),
        (2, "give the 2 engines more than 2 groups an iteration (--grpo-prompts-per-step)"),
        (1, "give the 2 engines more than 1 group an iteration (--grpo-prompts-per-step)"),
    ],
)
def test_no_more_engines_are_advised_than_an_iteration_has_groups(num_groups, advice) -> None:
    records = [record | {"groups": num_groups, "reward": {"mean": 0.5}} for record in HEALTHY_RECORDS]
    (finding,) = list_findings(Trace((rank(starved=60.0), sidecar(starved=60.0, sampling=65.0))), records)
    assert finding.name == "starved"
    assert advice in finding.sentence
    # The conversations of a group are spread over all engines.
    config = SavedConfig(sections={"environment": {"source": Value("-", ""), "agent": Value("mine.py:run", "--")}})
    (finding,) = list_findings(Trace((rank(starved=60.0), sidecar(starved=60.0, sampling=65.0))), records, config)
    assert "add 3 engines to the 2" in finding.sentence


def test_replicas_that_compute_for_other_times_are_uneven() -> None:
    ranks = (rank("rank-0", 0), rank("rank-1", 1, bubble=18.0))
    assert names(Trace((*ranks, sidecar()))) == []
    ranks = (rank("rank-0", 0), rank("rank-1", 1, bubble=30.0))
    (finding,) = list_findings(Trace((*ranks, sidecar())), HEALTHY_RECORDS)
    assert finding.name == "uneven replicas"
    assert "replica 0 computes 1.47 times as long as replica 1" in finding.sentence


def of_engines(num_groups: int, slower: float) -> Trace:
    """Build a trace of `num_groups` on each of two engines, one of which takes `slower` times as long."""
    process = sidecar()
    spans = tuple(
        Span(GROUPS, "generate", 10.0, 10.0 + seconds, number, 800, {"engine": engine, "size": 8})
        for engine, seconds in (("engine-0", 20.0), ("engine-1", 20.0 * slower))
        for number in range(num_groups)
    )
    window = dataclasses.replace(process.windows[0], spans=spans)
    return Trace((rank(), dataclasses.replace(process, windows=(window,))))


def test_an_engine_that_is_slower_than_another_is_named() -> None:
    assert "slow engine" not in names(of_engines(8, 1.4))
    # Too few groups to judge by.
    assert "slow engine" not in names(of_engines(7, 3.0))
    finding = next(one for one in list_findings(of_engines(8, 3.0), HEALTHY_RECORDS) if one.name == "slow engine")
    assert finding.value == pytest.approx(3.0)
    assert "engine-1 takes 600 ms" in finding.sentence


def test_a_reward_that_takes_long_beside_sampling_is_slow() -> None:
    assert names(Trace((rank(), sidecar(reward=2.0)))) == []
    (finding,) = list_findings(Trace((rank(), sidecar(reward=30.0))), HEALTHY_RECORDS)
    assert (finding.name, "--reward-workers" in finding.sentence) == ("slow reward", True)


def of_conversations(step: float, place: float = 0.0) -> Trace:
    """Build conversations of two turns on an engine: each waits for its place, then samples, steps, samples."""
    spans, now = [], 0.0
    while now < 100:
        for name, seconds, details in (
            ("environment", place, {"call": "place"}), ("generate", 1.0, {"engine": "engine-0", "size": 1}),
            ("environment", step, {"call": "step"}), ("generate", 1.0, {"engine": "engine-0", "size": 1}),
        ):  # fmt: skip
            spans.append(Span(GROUPS, name, now, now + seconds, len(spans) // 4, None, details))
            now += seconds
    engines = Process(SIDECAR, (Window(0, 0.0, now, tuple(spans), {"engines": {"engine-0": 8}}),))
    waited = Span(MAIN, "wait", 0.0, now, 1)
    return Trace((Process("rank-0", (Window(0, 0.0, now, (waited,)),)), engines))


def explain_environments(trace: Trace) -> list[str]:
    findings = list_findings(trace, HEALTHY_RECORDS)
    return [finding.sentence for finding in findings if finding.name == "slow environment"]


def test_an_environment_for_which_engines_wait_is_slow_if_ranks_wait_too() -> None:
    assert explain_environments(of_conversations(step=0.1)) == []
    (sentence,) = explain_environments(of_conversations(step=2.0))
    assert sentence.startswith("slow environment: engines wait for environments 50% of the time, above 10%: ")
    assert "most of it is step, which takes 2 s in the median, and a turn is sampled in 1 s" in sentence
    (sentence,) = explain_environments(of_conversations(step=0.5, place=5.0))
    assert "a conversation waits for its place for 5 s in the median" in sentence
    assert ("--rollout-env-concurrency" in sentence, "--rollout-env-workers" in sentence) == (True, False)
    # The rank computes nearly all of the time, so nothing is lost.
    trained = of_conversations(step=2.0)
    window = trained.processes[0].windows[0]
    computing = dataclasses.replace(window, spans=(Span(MAIN, "train", 0.0, window.end),))
    ranks = dataclasses.replace(trained.processes[0], windows=(computing,))
    assert explain_environments(Trace((ranks, trained.processes[1]))) == []


def test_a_group_of_conversations_is_sampled_from_its_first_turn_to_its_last() -> None:
    trace = of_conversations(step=10.0)
    window = trace.processes[1].windows[0]
    # Twelve seconds of sampling a group: turns of one second do not make a reward of two slow.
    reward = Span(GROUPS, "reward", 12.0, 14.0, 0)
    engines = dataclasses.replace(
        trace.processes[1], windows=(dataclasses.replace(window, spans=(*window.spans, reward)),)
    )
    assert "slow reward" not in names(Trace((trace.processes[0], engines)))


@pytest.mark.parametrize(
    ("name", "records", "flag"),
    [
        ("failing environment", grown("responses", {"failed": 0.0}, {"failed": 0.1}), "--rollout-env-on-error"),
        ("limits", grown("responses", {"limit": 0.0}, {"limit": 0.6, "truncated": 0.7}), "--rollout-env-max-turns"),
        ("mismatch", grown("mismatch", {"mean": 1e-3}, {"mean": 4e-3}), "--rl-inference-logprobs-is-correction"),
        ("entropy", grown("entropy", 2.0, 0.1), "--grpo-entropy-coef"),
        ("entropy", grown("entropy_policy", 2.0, 0.1), "--grpo-entropy-coef"),
        ("no signal", grown("reward", {"all_equal_groups": 0}, {"all_equal_groups": 48}), "same-reward"),
        ("truncated", grown("responses", {"truncated": 0.0}, {"truncated": 0.5}), "--rollout-max-tokens"),
    ],
)
def test_metrics_out_of_bounds_are_said_with_a_flag(name, records, flag) -> None:
    (finding,) = list_findings(HEALTHY_TRACE, records)
    assert finding.name == name
    assert flag in finding.sentence


@pytest.mark.parametrize(
    "records",
    [
        # It grows, and stays next to nothing.
        grown("mismatch", {"mean": 1e-6}, {"mean": 1e-4}),
        grown("mismatch", {"mean": 4e-3}, {"mean": 5e-3}),
        grown("entropy", 2.0, 1.0),
        grown("entropy", 0.1, 2.0),
        grown("reward", {"all_equal_groups": 64}, {"all_equal_groups": 16}),
        grown("responses", {"truncated": 0.9}, {"truncated": 0.1}),
        grown("responses", {"limit": 0.0}, {"limit": 0.4, "failed": 0.04, "truncated": 0.6}),
        # Too short to have a beginning and an end.
        grown("entropy", 2.0, 0.1)[6:12],
    ],
)
def test_values_within_bounds_are_not_reported(records) -> None:
    assert names(records=records) == []


def test_without_a_trace_metrics_are_explained_alone() -> None:
    assert names(None, grown("entropy", 2.0, 0.1)) == ["entropy"]


def test_every_flag_that_is_named_exists() -> None:
    from megatron_rl.command_line.flags import list_flags

    known = index_by_name(list_flags())
    sick = rank(publish=11.0, first=21.0, starved=11.0, tail=16.0, bubble=21.0, save=6.0, evaluation=11.0, other=2.0)
    records = [
        healthy_record(version)
        | {
            "mismatch": {"mean": 1e-3 * version}, "entropy": 1 / (version + 1), "groups": 1,
            "reward": {"all_equal_groups": 1},
            "responses": {"truncated": 3.0, "failed": 1.0, "limit": 1.0},
        }
        for version in range(16)
    ]  # fmt: skip
    trace = Trace((sick, rank("rank-1", 1), sidecar(reward=30.0)))
    findings = [*list_findings(trace, records), *list_findings(of_conversations(step=2.0), ())]
    words = " ".join(finding.sentence for finding in findings).replace("(", " ").replace(")", " ")
    named = {word.rstrip(".,:") for word in words.split() if word.startswith("--")} - {"--json"}
    assert len(named) > 10
    assert named <= set(known)


def test_the_command_says_when_a_run_has_no_trace(tmp_path, capsys) -> None:
    write_metrics(tmp_path / "metrics.jsonl", range(2))
    assert main(["explain", str(tmp_path)]) == 0
    assert "where the time went is not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ([], 8),
        ([60.0] * 3, 8),
        # Four seconds in all.
        ([0.3] * 3, 14),
        ([0.3] * 100, 14),
        # Quartiles 6 and 14 around 10: the spread is 0.593, and 0.593 / 0.15 is 3.95.
        ([2.0, 6.0, 10.0, 14.0, 18.0], 16),
        # A checkpoint in every fifth iteration does not count as a spread.
        ([10.0, 10.0, 10.0, 10.0, 50.0] * 2, 8),
    ],
)
def test_short_iterations_and_those_that_differ_are_wanted_in_larger_numbers(seconds, wanted):
    assert count_wanted(seconds) == wanted


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=40))
def test_the_required_number_of_iterations_is_long_enough_and_tells_their_mean(seconds):
    wanted, median = count_wanted(seconds), statistics.median(seconds)
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    assert wanted >= LEAST_ITERATIONS
    assert wanted * median >= LEAST_SECONDS * (1 - 1e-9)
    assert (third - first) / 1.349 / median / math.sqrt(wanted) <= PRECISION * (1 + 1e-9)
    # No more than each of the three bounds asks for.
    fewer = wanted - 1
    assert (
        wanted == LEAST_ITERATIONS
        or fewer * median < LEAST_SECONDS
        or (third - first) / 1.349 / median / math.sqrt(fewer) > PRECISION * (1 - 1e-9)
    )


def explain(folder, num_iterations, capsys):
    """Explain a run that waits without a reason, of equal rewards and truncated responses; return the output."""
    folder.mkdir()
    write_metrics(folder / "metrics.jsonl", range(num_iterations))
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics.replace('"loss"', '"groups": 1, "loss"'))
    write_trace(folder, num_iterations)
    assert main(["explain", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_of_few_iterations_is_not_judged_and_learns_how_many_are_wanted(tmp_path, capsys):
    assert explain(tmp_path / "four", 4, capsys) == [
        "note: too little to judge where the time went: it needs 8 iterations after the first, which warms up, and has "
        "3 of 1 s: train for longer (--train-iters)",
        "note: too little to judge the metrics: it needs 8 iterations, and has 4: train for longer (--train-iters)",
    ]
    # The metrics have enough before the trace has: its first iteration warms up.
    time, *metrics = explain(tmp_path / "eight", 8, capsys)
    assert "needs 8 iterations after the first, which warms up, and has 7 of 1 s, whose times spread by 0%" in time
    assert [line.partition(":")[0] for line in metrics] == ["no signal", "truncated"]


def test_a_run_of_enough_iterations_is_judged(tmp_path, capsys):
    names = [line.partition(":")[0] for line in explain(tmp_path / "nine", 9, capsys)]
    assert names == ["other", "no signal", "truncated"]
