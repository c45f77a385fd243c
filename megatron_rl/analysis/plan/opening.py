"""The number of responses in flight that the sidecar would choose, once it knows the engines and the trainer."""

from collections.abc import Sequence

from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, Setting
from megatron_rl.analysis.plan.engines import SimulatedGroup
from megatron_rl.analysis.plan.pipeline import count_slot, slot_seconds
from megatron_rl.sidecar.in_flight.choice import choose
from megatron_rl.sidecar.in_flight.curve import StepCurve, build_line
from megatron_rl.sidecar.in_flight.forecast import Opening, SamplingWork


def choose_opening(setting: Setting, costs: Costs, groups: Sequence[SimulatedGroup]) -> Opening | None:
    """Choose for an iteration that has groups like these; None if the engines are given a fixed number."""
    engine = costs.engine
    if not isinstance(engine, BatchingCosts) or not engine.is_chosen or setting.schedule not in ("periodic", "sync"):
        return None
    work = SamplingWork(
        lengths=[group.lengths for group in groups],
        max_running=engine.max_running,
        num_engines=setting.num_engines,
        groups_per_turn=setting.groups_per_slot * setting.num_replicas,
        num_updates=setting.num_updates,
        in_prompt_order=setting.in_prompt_order,
        train_seconds=_count_train_seconds(setting, costs, groups) if setting.schedule == "periodic" else 0.0,
    )
    return choose(work, _read_curve(engine, groups), engine.max_in_flight, Opening(engine.max_in_flight)).opening


def _read_curve(engine: BatchingCosts, groups: Sequence[SimulatedGroup]) -> StepCurve:
    """Return the step's seconds with half of a mean response as context, and the prompts spread over all tokens."""
    num_tokens = sum(sum(group.lengths) for group in groups)
    num_responses = sum(len(group.lengths) for group in groups)
    prefill = sum(engine.per_prompt + group.prompt * engine.per_prompt_token for group in groups)
    context = sum(group.prompt for group in groups) / len(groups) + num_tokens / num_responses / 2
    per_response = engine.per_sequence + context * engine.per_context + prefill / num_tokens
    return build_line(engine.step, per_response, engine.max_running)


def _count_train_seconds(setting: Setting, costs: Costs, groups: Sequence[SimulatedGroup]) -> float:
    """Count the seconds for which each rank computes, if micro-batches never wait."""
    counted = [count_slot([(group.prompt, group.lengths)], setting.is_shared) for group in groups]
    tokens, pairs = (sum(values) for values in zip(*counted, strict=True))
    num_slots = setting.slots * setting.num_updates
    of_replica = slot_seconds(costs.trainer, tokens / setting.num_replicas, pairs / setting.num_replicas)
    of_replica += (num_slots - 1) * costs.trainer.per_micro_batch
    return of_replica * (1 + costs.trainer.num_frozen / 3) / setting.num_stages
