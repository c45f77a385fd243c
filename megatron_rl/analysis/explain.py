"""Finds the bounds that a run breaks. A finding is a sentence with its number, its bound and the flag to try.

Pure: from a trace's accounts and the lines of metrics.jsonl to findings. A healthy run has none. docs/metrics.md has
the table of bounds.

Shares of time are judged if the number of iterations that were measured is at least each of these three:

- `LEAST_ITERATIONS`;
- the number that takes `LEAST_SECONDS` together;
- the number that brings the standard error of an iteration's mean time down to `PRECISION`, by the spread of the times.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_rl.analysis.ledger import Account, compute_ledger
from megatron_rl.errors import count_noun
from megatron_rl.observe.metrics import number_at
from megatron_rl.observe.run_folder import SavedConfig
from megatron_rl.observe.trace import GROUPS, Span, Trace

# Shares of a rank's time.
STARVED, FIRST, TAIL, PUBLISH, BUBBLE, CHECKPOINT, EVALUATION, OTHER = 0.1, 0.2, 0.15, 0.1, 0.2, 0.05, 0.1, 0.01
# The growth from begin to end that is too much, unless the end is below the floor.
MISMATCH_FLOOR, MISMATCH_GROWTH = 1e-3, 2.0
# The end over the beginning.
ENTROPY = 0.3
WITHOUT_SIGNAL, TRUNCATED = 0.5, 0.2
# The share of engines' time in which they wait for environments while ranks wait, too; shares of conversations.
ENVIRONMENT, FAILED, LIMITED = 0.1, 0.05, 0.5
# The busiest replica over the least busy one.
UNEVEN = 1.2
# Rewards over sampling, medians of a group.
REWARD = 0.25
# A token's time on the slowest engine over that on the fastest, medians of at least LEAST_GROUPS groups.
SLOW_ENGINE, LEAST_GROUPS = 1.5, 8

# A run with fewer iterations has no begin and no end to compare.
LEAST_ITERATIONS = 8
# A pause of 40 ms, which any operating system makes, is then below 1 % of the time, the smallest bound of a share.
LEAST_SECONDS = 4.0
# A share of the mean. Bounds are 5 % of the time and more, so they need no better precision.
PRECISION = 0.15
# Fewer times have no spread.
_LEAST_TO_SPREAD = 4
# The distance between the quartiles of a normal distribution, in deviations.
_DEVIATIONS_BETWEEN_QUARTILES = 1.349

# The transport that streams weights to engines, by platform.
_STREAMS = {"cuda": "nccl", "npu": "hccl"}

# The causes of a rank that waits for groups.
WAITS = ("first", "starved", "environment", "tail")

_Records = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A broken bound, with its value and the remedies."""

    name: str
    value: float
    bound: float
    sentence: str


def list_findings(trace: Trace | None, records: _Records, config: SavedConfig | None = None) -> list[Finding]:
    """Return the findings, the ledger's first. `config` is the run's configuration, if it is known."""
    found: list[Finding] = []
    if trace is not None:
        accounts = compute_ledger(trace)
        found += _explain_ledger(accounts, config, _count_groups(records, config))
        found += _explain_replicas(trace, accounts)
        found += _explain_engines(trace)
        found += _explain_rewards(trace)
        found += _explain_environments(trace, accounts)
    return [*found, *_explain_metrics(records)]


def _count_groups(records: _Records, config: SavedConfig | None) -> int | None:
    """Return the groups of an iteration, in the median; None if they are unknown, or if engines share a group's turns.

    An engine gets a whole group unless its responses are conversations, each of which may be on another engine.
    """
    if is_of_conversations(config):
        return None
    counts = _values(records, "groups")
    return round(statistics.median(counts)) if counts else None


def is_of_conversations(config: SavedConfig | None) -> bool:
    """Return True if responses are conversations, so that engines share the turns of a group."""
    rollouts = {} if config is None else config.sections.get("environment", {})
    return any(name in rollouts and rollouts[name].text != "-" for name in ("source", "agent", "verifiers"))


def _explain_ledger(
    accounts: Sequence[Account], config: SavedConfig | None, num_groups: int | None
) -> Iterator[Finding]:
    ranks = [account for account in accounts if account.is_rank]
    engines = [account for account in accounts if not account.is_rank]
    if not ranks:
        return
    share = {cause: statistics.fmean(rank.share(cause) for rank in ranks) for cause in ranks[0].seconds}
    if share["starved"] > STARVED:
        yield _of_time("starved", share["starved"], STARVED, "wait for groups while engines sample at full load", [
            _say_engines(ranks, engines, num_groups),
            "let each sample more at a time (--rollout-max-num-seqs)",
        ])  # fmt: skip
    sayings = {
        "first": (FIRST, "wait for an iteration's first group", [
            "shorten responses (--rollout-max-tokens)", "pay it less often: more prompts (--grpo-prompts-per-step)",
        ]),
        "tail": (TAIL, "wait for the last groups while engines run dry", [
            "use more prompts than are in flight (--grpo-prompts-per-step)",
            "bound the longest responses (--rollout-max-tokens)",
        ]),
        "publish": (PUBLISH, "bring weights to engines", [
            *_say_stream(config), "publish less often: more prompts (--grpo-prompts-per-step)",
        ]),
        "bubble": (BUBBLE, "wait for other stages and ranks within a schedule", [
            "use more and smaller micro-batches (--micro-batch-size)",
            "divide stages (--num-virtual-stages-per-pipeline-rank)",
        ]),
        "checkpoint": (CHECKPOINT, "write checkpoints to a disk that is too slow for their number", [
            "write them meanwhile (--async-save)", "write fewer (--save-interval)",
        ]),
        "evaluation": (EVALUATION, "wait for evaluations", [
            "evaluate less often (--eval-interval)", "on fewer prompts (--eval-num-prompts)",
        ]),
        "other": (OTHER, "do what has no name", ["report it, with `megatron-rl ledger RUN --json`"]),
    }  # fmt: skip
    for cause, (bound, what, remedies) in sayings.items():
        if share[cause] > bound:
            yield _of_time(cause, share[cause], bound, what, remedies)


def _of_time(name: str, value: float, bound: float, what: str, remedies: Sequence[str]) -> Finding:
    sentence = f"{name}: ranks {what} {value:.0%} of the time, above {bound:.0%}: {', or '.join(remedies)}"
    return Finding(name, value, bound, sentence)


def _say_engines(ranks: Sequence[Account], engines: Sequence[Account], num_groups: int | None) -> str:
    """Say how many engines would sample as fast as ranks train, if the present ones sample all the time.

    If `num_groups` is known, more engines than that would be idle.
    """
    if num_groups is not None and num_groups <= len(engines):
        return (
            f"give the {count_noun(len(engines), 'engine')} more than {count_noun(num_groups, 'group')} an iteration "
            "(--grpo-prompts-per-step)"
        )
    sampling = statistics.fmean(engine.seconds["busy"] for engine in engines) if engines else 0.0
    training = statistics.fmean(rank.wall - sum(rank.seconds[cause] for cause in (*WAITS, "publish")) for rank in ranks)
    if not sampling or training <= 0:
        return "add engines (--rollout-num-engines)"
    wanted = max(len(engines) + 1, math.ceil(len(engines) * sampling / training))
    if num_groups is not None:
        wanted = min(wanted, num_groups)
    return f"add {count_noun(wanted - len(engines), 'engine')} to the {len(engines)} (--rollout-num-engines {wanted})"


def _say_stream(config: SavedConfig | None) -> Iterator[str]:
    """Name the transport that streams weights to engines, if the run could use one and does not."""
    rollout = {} if config is None else config.sections.get("rollout", {})
    texts = {name: value.text for name, value in rollout.items()}
    if config is None or config.platform is None:
        yield "stream them, on accelerators (--rollout-transport nccl or hccl)"
    elif config.platform in _STREAMS and texts.get("transport") == "shm" and texts.get("engine") == "vllm":
        yield f"stream them (--rollout-transport {_STREAMS[config.platform]})"


def _explain_replicas(trace: Trace, accounts: Sequence[Account]) -> Iterator[Finding]:
    replicas: defaultdict[int, list[float]] = defaultdict(list)
    seconds = {account.name: account.seconds["busy"] for account in accounts if account.is_rank}
    for rank in trace.ranks:
        replicas[rank.windows[-1].facts.get("replica", 0)].append(seconds[rank.name])
    busy = {replica: statistics.fmean(values) for replica, values in replicas.items()}
    least = min(busy, key=lambda replica: busy[replica], default=0)
    most = max(busy, key=lambda replica: busy[replica], default=0)
    if busy and busy[least] > 0 and (ratio := busy[most] / busy[least]) > UNEVEN:
        yield Finding(
            "uneven replicas", ratio, UNEVEN,
            f"uneven replicas: replica {most} computes {ratio:.2f} times as long as replica {least}, above {UNEVEN:g}: "
            "give groups to whichever replica is free (--consume-order completion), or make micro-batches smaller "
            "(--micro-batch-size), and compare the devices of both",
        )  # fmt: skip


def _explain_engines(trace: Trace) -> Iterator[Finding]:
    by_engine: defaultdict[str, list[float]] = defaultdict(list)
    for span in _training_groups(trace):
        if span.name == "generate" and span.amount:
            by_engine[span.details["engine"]].append(span.seconds * span.details["size"] / span.amount)
    seconds = {name: statistics.median(values) for name, values in by_engine.items() if len(values) >= LEAST_GROUPS}
    fastest = min(seconds, key=lambda name: seconds[name], default="")
    slowest = max(seconds, key=lambda name: seconds[name], default="")
    if seconds and seconds[fastest] > 0 and (ratio := seconds[slowest] / seconds[fastest]) > SLOW_ENGINE:
        yield Finding(
            "slow engine", ratio, SLOW_ENGINE,
            f"slow engine: {slowest} takes {1e3 * seconds[slowest]:.3g} ms for a token of a response and {fastest} "
            f"{1e3 * seconds[fastest]:.3g} ms, {ratio:.1f} times as long, above {SLOW_ENGINE:g}: compare their devices "
            "and other processes there (--rollout-devices), and their logs",
        )  # fmt: skip


def _explain_rewards(trace: Trace) -> Iterator[Finding]:
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for span in _training_groups(trace):
        seconds[span.name].append(span.seconds)
    if not seconds["reward"] or not seconds["generate"]:
        return
    reward, sampling = statistics.median(seconds["reward"]), _measure_sampling(trace)
    # Milliseconds do not matter next to an iteration, however fast the engines are.
    if reward > REWARD * sampling and reward > 0.1:
        yield Finding(
            "slow reward", reward / sampling, REWARD,
            f"slow reward: a group is scored in {reward:.2f} s and sampled in {sampling:.2f} s, "
            f"{reward / sampling:.0%} of it, above {REWARD:.0%}: use more processes (--reward-workers), or a faster "
            "function (--reward)",
        )  # fmt: skip


def _measure_sampling(trace: Trace) -> float:
    """Return the median seconds from the begin of a group's first turn to the end of its last."""
    ends: dict[tuple[int, int | None], tuple[float, float]] = {}
    for window in trace.sidecar.windows if trace.sidecar is not None else ():
        for span in window.spans:
            if _is_training(span) and span.name == "generate":
                begin, end = ends.get((window.version, span.number), (span.begin, span.end))
                ends[window.version, span.number] = min(begin, span.begin), max(end, span.end)
    return statistics.median(end - begin for begin, end in ends.values())


def _explain_environments(trace: Trace, accounts: Sequence[Account]) -> Iterator[Finding]:
    engines = [account.share("environment") for account in accounts if not account.is_rank]
    waits = [sum(map(account.share, WAITS)) for account in accounts if account.is_rank]
    if not engines or not waits or min(share := statistics.fmean(engines), statistics.fmean(waits)) <= ENVIRONMENT:
        return
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    turns: list[float] = []
    for span in _training_groups(trace):
        if span.name == "environment":
            seconds[span.details["call"]].append(span.seconds)
        elif span.name == "generate":
            turns.append(span.seconds)
    slowest = max(seconds, key=lambda call: sum(seconds[call]))
    of_call = f"{statistics.median(seconds[slowest]):.2g} s in the median"
    place = "a conversation waits for its place"
    what = f"{place} for {of_call}" if slowest == "place" else f"most of it is {slowest}, which takes {of_call}"
    sampled = f", and a turn is sampled in {statistics.median(turns):.2g} s" if turns else ""
    remedies = ["let more conversations run at once (--rollout-env-concurrency, --grpo-prompts-per-step)"]
    if slowest != "place":
        remedies += ["use more processes (--rollout-env-workers)", "make the environment faster (--rollout-env)"]
    yield Finding(
        "slow environment", share, ENVIRONMENT,
        f"slow environment: engines wait for environments {share:.0%} of the time, above {ENVIRONMENT:.0%}: {what}"
        f"{sampled}: {', or '.join(remedies)}",
    )  # fmt: skip


def _training_groups(trace: Trace) -> Iterator[Span]:
    """Yield the spans of groups, except those of evaluations."""
    for span in trace.sidecar.spans if trace.sidecar is not None else ():
        if _is_training(span):
            yield span


def _is_training(span: Span) -> bool:
    return span.lane == GROUPS and not span.details.get("evaluation")


def _explain_metrics(records: _Records) -> Iterator[Finding]:
    later = records[len(records) // 2 :]
    num_groups = sum(_values(later, "groups"))
    equal = sum(_values(later, "reward", "all_equal_groups")) / num_groups if num_groups else 0.0
    # A teacher has a signal wherever it differs from the policy, and a critic where rewards are not as it expects.
    has_other = any("teacher_kl" in record or "critic" in record for record in records)
    if equal > WITHOUT_SIGNAL and not has_other:
        yield Finding(
            "no signal", equal, WITHOUT_SIGNAL,
            f"no signal: in {equal:.0%} of groups all responses get the same reward, above {WITHOUT_SIGNAL:.0%}: "
            "replace such groups (--grpo-filter-groups-with-same-reward), sample more responses a group "
            "(--grpo-group-size), or change how hard prompts are (--prompts)",
        )  # fmt: skip
    yield from _explain_conversations(records)
    truncated = [
        value - (number_at(record, "responses", "limit") or 0.0)
        for record in records[-_quarter(records) :]
        if (value := number_at(record, "responses", "truncated")) is not None
    ]
    if truncated and (share := statistics.fmean(truncated)) > TRUNCATED:
        yield Finding(
            "truncated", share, TRUNCATED,
            f"truncated: {share:.0%} of responses end at the bound of tokens, above {TRUNCATED:.0%}: raise "
            "--rollout-max-tokens, or let a reward favour short ones (--reward)",
        )  # fmt: skip
    yield from _explain_trends(records)


def _explain_conversations(records: _Records) -> Iterator[Finding]:
    last = records[-_quarter(records) :]
    failed, limited = _values(last, "responses", "failed"), _values(last, "responses", "limit")
    if failed and (share := statistics.fmean(failed)) > FAILED:
        yield Finding(
            "failing environment", share, FAILED,
            f"failing environment: it fails in {share:.0%} of conversations, above {FAILED:.0%}{_find_reason(last)}: "
            "read all reasons in the sidecar's log, raise --rollout-env-timeout if calls take too long, or end the run "
            "at the first (--rollout-env-on-error stop)",
        )  # fmt: skip
    if limited and (share := statistics.fmean(limited)) > LIMITED:
        yield Finding(
            "limits", share, LIMITED,
            f"limits: {share:.0%} of conversations end before their environment does, above {LIMITED:.0%}: raise "
            "--rollout-env-max-turns, or --rollout-max-tokens",
        )  # fmt: skip


def _find_reason(records: _Records) -> str:
    reasons = [record["responses"]["failure"] for record in records if "failure" in record.get("responses", {})]
    return f" ({reasons[0]})" if reasons else ""


def _explain_trends(records: _Records) -> Iterator[Finding]:
    mismatch = _ends(_values(records, "mismatch", "mean"))
    if mismatch is not None and mismatch[1] > MISMATCH_FLOOR and mismatch[1] > MISMATCH_GROWTH * mismatch[0]:
        first, last = mismatch
        yield Finding(
            "mismatch", last / first if first else math.inf, MISMATCH_GROWTH,
            f"mismatch: engine's and trainer's log-probs differed by {first:.2g} at first and by {last:.2g} at last, "
            f"more than {MISMATCH_GROWTH:g} times as much: weigh tokens for it "
            "(--rl-inference-logprobs-is-correction), give engines the trainer's precision (--rollout-dtype), or lower "
            "--lr",
        )  # fmt: skip
    # The exact entropy if it is measured; the estimate comes from the sampled tokens.
    entropy = _ends(_values(records, "entropy_policy") or _values(records, "entropy"))
    if entropy is not None and entropy[0] > 0 and entropy[1] < ENTROPY * entropy[0]:
        first, last = entropy
        yield Finding(
            "entropy", last / first, ENTROPY,
            f"entropy: it fell from {first:.2g} to {last:.2g} nats a token, below {ENTROPY:.0%} of its first value: "
            "raise --grpo-clamp-eps-upper, reward entropy (--grpo-entropy-coef), hold to the reference "
            "(--grpo-kl-beta), or lower --lr",
        )  # fmt: skip


def _quarter(records: _Records) -> int:
    return max(1, len(records) // 4)


def _values(records: _Records, *names: str) -> list[float]:
    return [value for record in records if (value := number_at(record, *names)) is not None]


def _ends(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the medians of the first and the last quarter."""
    if len(values) < LEAST_ITERATIONS:
        return None
    count = len(values) // 4
    return statistics.median(values[:count]), statistics.median(values[-count:])


# Runs that are too short to judge.


def describe_lack_of_time(trace: Trace) -> str | None:
    """Say what a trace without its first iteration lacks to be judged; return None if it lacks nothing."""
    versions = set(trace.versions)
    seconds = [
        window.end - window.begin
        for rank in trace.ranks[:1]
        for window in rank.windows
        if window.version in versions and window.end > window.begin
    ]
    wanted = count_wanted(seconds)
    if len(seconds) >= wanted:
        return None
    times = f" of {statistics.median(seconds):.2g} s" if seconds else ""
    spread = _compute_spread(seconds)
    differing = f", whose times spread by {spread:.0%}" if spread is not None else ""
    return (
        f"too little to judge where the time went: it needs {wanted} iterations after the first, which warms up, and "
        f"has {len(seconds)}{times}{differing}: train for longer (--train-iters)"
    )


def describe_lack_of_records(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Say what the metrics lack to be judged; return None if they lack nothing."""
    # Not the last line, which may be an evaluation alone.
    count = sum("reward" in record or "loss" in record for record in records)
    if count >= LEAST_ITERATIONS:
        return None
    return (
        f"too little to judge the metrics: it needs {LEAST_ITERATIONS} iterations, and has {count}: train for longer "
        "(--train-iters)"
    )


def count_wanted(seconds: Sequence[float]) -> int:
    """Count the iterations that a judgement needs, from the times of the measured ones."""
    wanted = LEAST_ITERATIONS
    if seconds:
        wanted = max(wanted, math.ceil(LEAST_SECONDS / statistics.median(seconds)))
    spread = _compute_spread(seconds)
    if spread is not None:
        wanted = max(wanted, math.ceil((spread / PRECISION) ** 2))
    return wanted


def _compute_spread(seconds: Sequence[float]) -> float | None:
    """Compute the deviation over the median; by quartiles, so that a checkpoint or an evaluation does not count."""
    if len(seconds) < _LEAST_TO_SPREAD:
        return None
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return (third - first) / _DEVIATIONS_BETWEEN_QUARTILES / median
