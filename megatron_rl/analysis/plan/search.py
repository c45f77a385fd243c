"""The split of a number of devices into trainers and engines that trains the most tokens a second.

Every split that the model divides into and that fits the memory is estimated by a formula. The most promising ones
are simulated, and ranked by their simulated throughput.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from megatron_rl.analysis.plan.chips import ASSUMED, DeviceFigures
from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, Setting
from megatron_rl.analysis.plan.figures import DeviceSplit, TrainedAdapters, estimate
from megatron_rl.analysis.plan.memory import count_running, fits_trainer
from megatron_rl.analysis.plan.pipeline import count_slot, slot_seconds
from megatron_rl.analysis.plan.results import Result
from megatron_rl.analysis.plan.simulate import check_setting, simulate
from megatron_rl.config.rank_bytes import Micro
from megatron_rl.errors import UsageError
from megatron_rl.types import Architecture

_TENSOR, _PIPELINE, _CONTEXT = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4)
# More responses at once than this gain little, and vLLM needs memory for each.
_MOST_RUNNING = 512


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The run to plan, and its devices."""

    architecture: Architecture
    chip: DeviceFigures
    num_devices: int
    devices_per_host: int
    setting: Setting
    """Its prompts, lengths and schedule; the search fills in the split of the devices."""
    longest_prompt: int
    longest_response: int
    num_frozen: int = 0
    recomputes: bool = False
    adapters: TrainedAdapters | None = None
    """The adapters; None if all weights are trained."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A split with its setting, its costs and, once simulated, its result."""

    split: DeviceSplit
    setting: Setting
    costs: Costs
    result: Result | None = None

    @property
    def estimated(self) -> float:
        """Return an iteration's rough seconds: the longer of sampling and training, if they overlap."""
        return _estimate_seconds(self.setting, self.costs)


def search(
    wanted: Wanted, num_simulated: int = 16, num_iterations: int = 3, say: Callable[[str], None] = lambda text: None
) -> list[Candidate]:
    """Return the most promising splits, simulated, the best first."""
    candidates = list(_list_candidates(wanted))
    if not candidates:
        raise UsageError(
            f"no split of {wanted.num_devices} devices of {wanted.chip.gib:g} GiB fits: take more devices, "
            "--recompute, a smaller --micro-batch-size or shorter responses, or a --grpo-prompts-per-step that more "
            "numbers of replicas divide"
        )
    candidates.sort(key=lambda one: one.estimated)
    say(f"{len(candidates)} splits fit; the {min(num_simulated, len(candidates))} most promising are simulated")
    chosen = [
        dataclasses.replace(one, result=simulate(one.setting, one.costs, num_iterations))
        for one in candidates[:num_simulated]
    ]
    return sorted(chosen, key=lambda one: -_read(one).tpspd)


def _read(candidate: Candidate) -> Result:
    assert candidate.result is not None
    return candidate.result


def _list_candidates(wanted: Wanted) -> Iterator[Candidate]:
    for split in _list_splits(wanted):
        candidate = _make(wanted, split)
        if candidate is not None:
            yield candidate


def _list_splits(wanted: Wanted) -> Iterator[DeviceSplit]:
    architecture, total = wanted.architecture, wanted.num_devices
    is_colocated = wanted.setting.schedule == "colocated"
    for tensor in _TENSOR:
        if not _divides_tensor(architecture, tensor) or tensor > wanted.devices_per_host:
            continue
        for pipeline in _PIPELINE:
            if architecture.num_layers % pipeline:
                continue
            for context in _CONTEXT:
                model = tensor * pipeline * context
                for replicas in _list_replicas(wanted, model):
                    for expert in _list_experts(architecture, tensor * context * replicas):
                        part = DeviceSplit(tensor, pipeline, context, expert, replicas)
                        for engine_tensor in _TENSOR:
                            rest = total if is_colocated else total - model * replicas
                            if rest % engine_tensor == 0 and rest and _divides_tensor(architecture, engine_tensor):
                                yield dataclasses.replace(
                                    part, num_engines=rest // engine_tensor, engine_tensor=engine_tensor
                                )


def _divides_tensor(architecture: Architecture, tensor: int) -> bool:
    of_linear_layers = architecture.linear.num_key_heads if architecture.linear else 0
    return architecture.num_query_groups % tensor == 0 and of_linear_layers % tensor == 0


def _list_replicas(wanted: Wanted, model: int) -> Iterator[int]:
    """Yield numbers of replicas that the prompts divide over; each side keeps at least an eighth of the devices."""
    setting, total = wanted.setting, wanted.num_devices
    units = setting.num_prompts // (setting.num_updates * setting.groups_per_slot)
    for replicas in range(1, total // model + 1):
        devices = replicas * model
        if units % replicas:
            continue
        if setting.schedule == "colocated":
            if devices == total:
                yield replicas
        elif total / 8 <= devices <= total * 7 / 8:
            yield replicas


def _list_experts(architecture: Architecture, ranks: int) -> Iterator[int]:
    if architecture.experts is None:
        yield 1
        return
    for expert in (1, 2, 4, 8, 16, 32, 64):
        if architecture.experts.num_experts % expert == 0 and ranks % expert == 0:
            yield expert


def _make(wanted: Wanted, split: DeviceSplit) -> Candidate | None:
    """Make the run with this split; return None if it does not fit."""
    setting = dataclasses.replace(
        wanted.setting,
        num_engines=split.num_engines,
        num_replicas=split.replicas,
        num_stages=split.pipeline,
        trainer_devices=split.trainer_devices,
        engine_devices=split.engine_devices,
    )
    responses = min(setting.micro_batch_size, setting.group_size)
    groups = [(wanted.longest_prompt, [wanted.longest_response] * responses)] * setting.groups_per_slot
    tokens, _ = count_slot(groups, setting.is_shared)
    micro = Micro(tokens, setting.slots)
    architecture, chip = wanted.architecture, wanted.chip
    num_frozen, recomputes, adapters = wanted.num_frozen, wanted.recomputes, wanted.adapters
    if not fits_trainer(architecture, split, micro, chip.gib, num_frozen, recomputes, setting.num_virtual, adapters):
        return None
    # The mean response is half done; a quarter of the bound covers the longest ones.
    context = setting.prompts.mean + max(setting.responses.mean / 2, wanted.longest_response / 4)
    running = min(_MOST_RUNNING, count_running(architecture, split.engine_tensor, context, chip.gib, adapters))
    if running < setting.group_size:
        return None
    costs = estimate(
        architecture, chip, split, running, ASSUMED, num_frozen, recomputes, adapters, wanted.devices_per_host
    )
    try:
        check_setting(setting)
    except UsageError:
        return None
    return Candidate(split, setting, costs)


def _estimate_seconds(setting: Setting, costs: Costs) -> float:
    engine, trainer = costs.engine, costs.trainer
    assert isinstance(engine, BatchingCosts)
    responses = setting.num_prompts * setting.group_size / setting.num_engines
    running = max(1.0, min(engine.max_running, responses))
    mean, context = setting.responses.mean, setting.prompts.mean + setting.responses.mean / 2
    step = engine.step + running * (engine.per_sequence + context * engine.per_context)
    # The last responses run alone. The longest of an engine is not known here, so three means stand for it.
    sampling = responses * mean / running * step + 2 * mean * engine.step
    sampling += setting.num_prompts / setting.num_engines * setting.prompts.mean * engine.per_prompt_token
    size = min(setting.micro_batch_size, setting.group_size)
    groups = [(round(setting.prompts.mean), [round(mean)] * size)] * setting.groups_per_slot
    slot = slot_seconds(trainer, *count_slot(groups, setting.is_shared)) * (1 + trainer.num_frozen / 3)
    training = slot * (setting.slots + setting.num_stages - 1) / setting.num_stages * setting.num_updates
    both = sampling + training if setting.schedule in ("sync", "colocated") else max(sampling, training)
    return costs.publish + both + trainer.update * setting.num_updates


def describe_candidates(candidates: Sequence[Candidate]) -> list[str]:
    """Return the lines of a table of the candidates."""
    lines = [
        f"{'':>3}{'trainer':>9}{'TP':>4}{'PP':>4}{'CP':>4}{'EP':>4}{'DP':>5}{'engines':>9}{'of':>4}{'at once':>9}"
        f"{'iteration':>11}{'tokens/s/device':>17}{'trainer busy':>14}{'engines busy':>14}"
    ]
    for place, one in enumerate(candidates, 1):
        split, result = one.split, _read(one)
        running = one.costs.engine.max_running if isinstance(one.costs.engine, BatchingCosts) else math.nan
        trainer, engines = (result.mean(of)["busy"] / result.seconds for of in (False, True))
        lines.append(
            f"{place:>3}{split.trainer_devices:>9}{split.tensor:>4}{split.pipeline:>4}{split.context:>4}"
            f"{split.expert:>4}{split.replicas:>5}{split.num_engines:>9}{split.engine_tensor:>4}{running:>9}"
            f"{result.seconds:>9.1f} s{result.tpspd:>17.1f}{trainer:>14.0%}{engines:>14.0%}"
        )
    return lines
