"""Says what another division of a run's devices between engines and trainer would give.

Pure: from a trace and a configuration to lines of text. docs/metrics.md has the rule and what it assumes. Invariants:

- the stated error is that of iterations which the prediction has not used;
- more engines shorten only the time in which engines are full, and only if the groups need fewer waves;
- fewer engines lengthen all sampling, in proportion;
- neither side more than doubles or halves, and every device is used.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

from megatron_rl.analysis.explain import WAITS, describe_lack_of_time, is_of_conversations, list_findings
from megatron_rl.analysis.ledger import compute_ledger
from megatron_rl.errors import InputError, count_noun
from megatron_rl.observe.run_folder import CONFIG_FILE, SavedConfig
from megatron_rl.observe.trace import COMPUTE, GROUPS, SERVICE, Trace

WORST_ERROR = 0.15
"""The rule advises nothing about a run of which it is off by more."""
MOST_CHANGE = 2
"""The largest factor by which a side may grow or shrink."""

# Findings that another division may remedy; any other means that something else holds the run up.
_OF_DIVISION = {"starved", "first", "tail"}
_ASSUMES = (
    "assumes: the same model, prompts, lengths and devices. A step of an engine takes as long as now. Replicas divide "
    "the computing evenly. Publish, optimizer and all else that does not overlap take as long as now. The error of "
    "another division was not measured: run it for some iterations and compare. `megatron-rl doctor --fit` says "
    "whether its ranks fit their memory"
)

# The values that a run must have: the subject and the name, the text, and the reason with the way out.
_NEEDED = {
    ("loop", "schedule"): (
        "periodic", "sampling and training do not overlap; measure a run of --schedule periodic"
    ),
    ("sampling", "tail"): (
        "stop", "it samples groups ahead of their iteration; measure a run of --rollout-tail stop"
    ),
    ("rollout", "colocate"): (
        "off", "engines share the ranks' devices; measure a run without --rollout-colocate"
    ),
    ("service", "endpoint"): (
        None, "the devices of a sidecar that was started by itself are unknown; measure a run that starts its own"
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """The devices of a run: engines, and replicas of the trainer."""

    num_engines: int
    num_replicas: int


@dataclasses.dataclass(frozen=True)
class RunDevices:
    """The present division of a run's devices, and what another one must divide into."""

    now: DeviceSplit
    devices_of_engine: int
    devices_of_replica: int
    step_of_groups: int
    """The groups of a micro-batch, at least one; replicas divide the groups of an update in multiples of it."""
    groups_of_update: int
    responses_apart: int
    """The parts of a group that engines sample independently: its responses if they are conversations."""

    @property
    def total(self) -> int:
        return self.count_of_engines(self.now) + self.count_of_trainer(self.now)

    def count_of_engines(self, split: DeviceSplit) -> int:
        return split.num_engines * self.devices_of_engine

    def count_of_trainer(self, split: DeviceSplit) -> int:
        return split.num_replicas * self.devices_of_replica

    def list_splits(self, num_parts: int) -> Iterator[DeviceSplit]:
        """Yield the other divisions that use all devices; no engine may be without a part of a group."""
        now = self.now
        for num_replicas in range(math.ceil(now.num_replicas / MOST_CHANGE), now.num_replicas * MOST_CHANGE + 1):
            left = self.total - num_replicas * self.devices_of_replica
            num_engines, rest = divmod(left, self.devices_of_engine)
            is_near = now.num_engines <= MOST_CHANGE * num_engines <= MOST_CHANGE**2 * now.num_engines
            divides = self.groups_of_update % (num_replicas * self.step_of_groups) == 0
            split = DeviceSplit(num_engines, num_replicas)
            if split != now and not rest and is_near and divides and num_engines <= num_parts:
                yield split


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of an iteration in the mean, and what its engines sample."""

    iteration: float
    sampling: float
    """The time from the submission until the last group has its rewards."""
    full: float
    """The part of it in which an engine is full or groups queue."""
    first: float
    """Ranks' wait for the first group."""
    computing: float
    """Forward and backward passes of a rank."""
    schedule: float
    """A rank's time within schedules in which it does not compute: pipeline stages, reducing gradients."""
    micro_batch: float
    """The training of one micro-batch by all stages, which remains after the last group."""
    serial: float
    """All that overlaps with neither sampling nor training."""
    num_parts: float
    """Groups, or responses if engines share a group's."""
    parts_at_once: float
    """Those that an engine samples at once."""

    def count_waves(self, num_engines: int) -> int:
        """Count the waves in which engines sample all parts, if each part took equally long."""
        return math.ceil(self.num_parts / (num_engines * self.parts_at_once) - 1e-9)


def predict(costs: Costs, now: DeviceSplit, then: DeviceSplit) -> tuple[float, str]:
    """Return the seconds of an iteration after a change, and which side holds it up.

    Sampling and training overlap from the first group to the last one, and the rest is added.
    """
    sampling, first = costs.sampling, costs.first
    waves = costs.count_waves(then.num_engines) / costs.count_waves(now.num_engines)
    factor = max(now.num_engines / then.num_engines, waves)
    if then.num_engines > now.num_engines:
        sampling -= costs.full * (1 - min(1.0, factor))
    else:
        sampling, first = sampling * factor, first * factor
    training = first + costs.computing * now.num_replicas / then.num_replicas + costs.schedule
    sampling += costs.micro_batch
    return costs.serial + max(sampling, training), "sampling" if sampling > training else "training"


def advise(trace: Trace, config: SavedConfig | None) -> Iterator[str]:
    """Yield the lines of the advice; an InputError says why a run allows none. `trace` lacks the first iteration."""
    devices = read_devices(config)
    if trace.sidecar is None:
        raise InputError("the trace has no file of the sidecar: measure a run whose sidecar has --trace on")
    trace = trace.select(_list_whole(trace))
    _check_trace(trace, config, devices)
    measured = [_measure(trace, version, devices.responses_apart) for version in trace.versions]
    costs, now = _average(measured), devices.now
    error = estimate_error(measured, now)
    if error > WORST_ERROR:
        raise InputError(
            f"the rule of --devices is off by {error:.0%} of an iteration, more than {WORST_ERROR:.0%}: something else "
            "holds iterations up, or they changed during the run. See `megatron-rl ledger RUN`, and measure a run "
            "whose iterations are alike"
        )
    splits = list(devices.list_splits(round(costs.num_parts)))
    if not splits:
        raise InputError(
            f"no other division of the {devices.total} devices is near enough, with {devices.devices_of_engine} for an "
            f"engine and {devices.devices_of_replica} for a replica. Each side may at most double or halve, and "
            f"replicas must divide the {count_noun(devices.groups_of_update, 'group')} of an update: measure a run "
            "with more devices, or change --grpo-prompts-per-step"
        )
    base, _ = predict(costs, now, now)
    yield f"measured: {count_noun(len(measured), 'iteration')} of {costs.iteration:.3g} s; the rule gives {base:.3g} s"
    yield f"error: {error:.1%}, the larger one of predicting each half of the iterations from the other half"
    yield f"{'engines':>8}{'replicas':>10}{'devices':>12}{'seconds':>10}{'change':>9}  held up by"
    for split in (now, *splits):
        seconds, side = predict(costs, now, split)
        counts = f"{devices.count_of_engines(split)} + {devices.count_of_trainer(split)}"
        change = "now" if split == now else f"{seconds / base - 1:+.1%}"
        yield f"{split.num_engines:>8}{split.num_replicas:>10}{counts:>12}{seconds:>10.3g}{change:>9}  {side}"
    best = min(splits, key=lambda split: predict(costs, now, split)[0])
    if 1 - predict(costs, now, best)[0] / base > error:
        ranks = count_noun(devices.count_of_trainer(best), "rank")
        yield f"try {ranks} and --rollout-num-engines {best.num_engines}"
    else:
        yield "no other division gains more than the error: keep this one"
    yield _ASSUMES


def estimate_error(measured: Sequence[Costs], now: DeviceSplit) -> float:
    """Predict each half of the iterations from the other half alone, and return the larger error, as a share."""
    middle = len(measured) // 2
    halves = measured[:middle], measured[middle:]
    return max(
        abs(predict(_average(used), now, now)[0] / _average(other).iteration - 1)
        for used, other in (halves, halves[::-1])
    )


def read_devices(config: SavedConfig | None) -> RunDevices:
    """Read the division of a run's devices; an InputError names what keeps another one from being judged."""
    if config is None or config.num_devices is None or _find(config, "iteration", "num_replicas") is None:
        raise InputError(
            f"--devices needs the run's {CONFIG_FILE} with the number of its ranks: name the folder of a run of "
            "--stage grpo"
        )
    for (section, name), (expected, reason) in _NEEDED.items():
        if _find(config, section, name) != expected:
            raise InputError(f"--devices cannot judge this run: {reason}")
    num_replicas = _read(config, "iteration", "num_replicas")
    group_size = _read(config, "algorithm", "group_size")
    return RunDevices(
        now=DeviceSplit(_read(config, "rollout", "num_engines"), num_replicas),
        devices_of_engine=_read(config, "rollout", "tensor_parallel_size"),
        devices_of_replica=config.num_devices // num_replicas,
        step_of_groups=max(1, _read(config, "training", "micro_batch_size") // group_size),
        groups_of_update=_read(config, "iteration", "prompts_per_update"),
        responses_apart=group_size if is_of_conversations(config) else 1,
    )


def _find(config: SavedConfig, section: str, name: str) -> str | None:
    value = config.sections.get(section, {}).get(name)
    return None if value is None or value.text == "-" else value.text


def _read(config: SavedConfig, section: str, name: str) -> int:
    text = _find(config, section, name)
    if text is None or not text.isdecimal():
        raise InputError(f"{CONFIG_FILE} has no number {section}.{name}: measure a run of this version of megatron_rl")
    return int(text)


def _check_trace(trace: Trace, config: SavedConfig | None, devices: RunDevices) -> None:
    """Raise an InputError if the trace has other devices, is too short, or shows that something else holds it up."""
    assert trace.sidecar is not None
    if (lack := describe_lack_of_time(trace)) is not None:
        raise InputError(lack)
    counts = {len(window.facts.get("engines", {})) for window in trace.sidecar.windows}
    if counts != {devices.now.num_engines} or len(trace.ranks) != devices.count_of_trainer(devices.now):
        raise InputError(
            f"the trace has {len(trace.ranks)} ranks and {' or '.join(map(str, sorted(counts)))} engines, and "
            f"{CONFIG_FILE} says {devices.count_of_trainer(devices.now)} and {devices.now.num_engines}: measure a run "
            "whose engines are all on its own host and do not change"
        )
    for finding in list_findings(trace, (), config):
        if finding.name not in _OF_DIVISION:
            raise InputError(f"something else holds this run up, so change that first: {finding.sentence}")


def _list_whole(trace: Trace) -> list[int]:
    """List the iterations with one line in each file whose groups were sampled, not read from a journal.

    The last iteration may have another line, of the time after it.
    """
    assert trace.sidecar is not None
    sampled = {
        window.version
        for window in trace.sidecar.windows
        if {"iteration", "generate"} <= {span.name for span in window.spans}
    }
    files = [[window.version for window in process.windows] for process in trace.processes]
    return [version for version in trace.versions if version in sampled and all(f.count(version) == 1 for f in files)]


def _measure(trace: Trace, version: int, responses_apart: int) -> Costs:
    one = trace.select([version])
    accounts = compute_ledger(one)
    assert one.sidecar is not None
    (window,) = one.sidecar.windows
    submitted = next(span.begin for span in window.spans if (span.lane, span.name) == (SERVICE, "iteration"))
    groups = [span for span in window.spans if span.lane == GROUPS and not span.details.get("evaluation")]
    sampled = [span for span in groups if span.name == "generate"]
    responses_of_part = statistics.fmean(span.details["size"] for span in sampled)
    capacity = statistics.fmean(window.facts["engines"].values())
    num_stages = 1 + max(rank.windows[0].facts.get("stage") or 0 for rank in one.ranks)
    ranks = [account for account in accounts if account.is_rank]

    def spend(*causes: str) -> float:
        return statistics.fmean(sum(rank.seconds[cause] for cause in causes) for rank in ranks)

    of_ranks = [{span.number for span in rank.spans if span.lane == COMPUTE} for rank in one.ranks]
    computing, schedule, wall = spend("busy"), spend("bubble"), statistics.fmean(rank.wall for rank in ranks)
    return Costs(
        iteration=wall,
        sampling=max(span.end for span in groups) - submitted,
        full=statistics.fmean(account.seconds["busy"] for account in accounts if not account.is_rank),
        first=spend("first"),
        computing=computing,
        schedule=schedule,
        micro_batch=computing * num_stages / statistics.fmean(map(len, of_ranks)),
        serial=wall - computing - schedule - spend(*WAITS),
        num_parts=len({span.number for span in sampled}) * responses_apart,
        parts_at_once=max(1, capacity // responses_of_part),
    )


def _average(measured: Sequence[Costs]) -> Costs:
    return Costs(
        **{
            field.name: statistics.fmean(getattr(costs, field.name) for costs in measured)
            for field in dataclasses.fields(Costs)
        }
    )
