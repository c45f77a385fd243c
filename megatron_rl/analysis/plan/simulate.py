"""Simulates a run: engines sample, and a trainer consumes the groups that they finish, by one of several schedules.

Engines are simulated by events (`pool`). The trainer's times are computed from the arrivals of its slots' groups
(`pipeline`). No schedule needs both at once, since engines depend on the trainer only through the times at which it
submits prompts and publishes.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from megatron_rl.analysis.plan.costs import Costs, Setting
from megatron_rl.analysis.plan.engines import SimulatedGroup, build_engine
from megatron_rl.analysis.plan.opening import choose_opening
from megatron_rl.analysis.plan.pipeline import Pipeline, count_slot, slot_seconds
from megatron_rl.analysis.plan.pool import Pool
from megatron_rl.analysis.plan.results import ENGINE_PARTS, TRAINER_PARTS, IterationResult, Result
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.in_flight.forecast import Opening


def simulate(setting: Setting, costs: Costs, num_iterations: int = 5, seed: int = 0) -> Result:
    """Simulate a run from its first iteration on. The pipeline of a pipelined schedule is full at its begin."""
    check_setting(setting)
    run = _Run(setting, costs, seed)
    iterate = {
        "colocated": run.iterate_apart, "sync": run.iterate_apart, "periodic": run.iterate_apart,
        "one_step_off": run.iterate_one_step_off, "async": run.iterate_asynchronously,
    }[setting.schedule]  # fmt: skip
    iterations = [iterate(number) for number in range(num_iterations)]
    return Result(iterations, setting.num_devices, run.num_events, run.opening)


def check_setting(setting: Setting) -> None:
    """Raise a UsageError for a setting that does not divide as `shared/protocol/slots.py` divides a run's."""
    size, of_slot = setting.group_size, setting.micro_batch_size
    if of_slot % size and size % of_slot:
        raise UsageError(
            f"--micro-batch-size {of_slot} must be a multiple or a divisor of --grpo-group-size {size}: write one"
        )
    if setting.num_prompts % setting.num_updates:
        raise UsageError(
            f"--grpo-prompts-per-step {setting.num_prompts} must be a multiple of the {setting.num_updates} updates "
            "of an iteration: write one"
        )
    step = setting.num_updates * setting.num_replicas * setting.groups_per_slot
    if setting.num_prompts % step:
        raise UsageError(
            f"--grpo-prompts-per-step {setting.num_prompts} must be a multiple of {step}, for {setting.num_replicas} "
            f"replicas with {setting.groups_per_slot} groups in a micro-batch and {setting.num_updates} updates: "
            "write one"
        )
    if setting.num_virtual > 1 and (setting.num_stages < 2 or setting.slots % setting.num_stages):
        raise UsageError(
            f"{setting.num_virtual} virtual stages need at least 2 stages, and a multiple of {setting.num_stages} "
            f"micro-batches an update, not {setting.slots}: drop the virtual stages, or change the prompts"
        )


@dataclasses.dataclass
class _Trained:
    """The end of an iteration's updates, and the seconds of their parts, summed over the trainer's ranks."""

    end: float
    parts: dict[str, float]


class _Run:
    def __init__(self, setting: Setting, costs: Costs, seed: int) -> None:
        self._setting = setting
        self._costs = costs
        self._generator = np.random.default_rng(seed)
        self._engines = [build_engine(costs.engine, self._generator) for _ in range(setting.num_engines)]
        self._pool = Pool(self._engines, costs.engine.max_in_flight, costs.reward, setting.reward_workers, setting.talk)
        self._now = 0.0
        self.opening: Opening | None = None
        """The responses that engines are given at once, chosen for the first iteration's lengths."""
        self._batch: list[SimulatedGroup] = []
        """Groups for the next iteration, if the schedule samples them one iteration early."""
        self._num_trainer_events = 0
        self._tokens = 0

    @property
    def num_events(self) -> int:
        return self._pool.num_events + sum(engine.num_events for engine in self._engines) + self._num_trainer_events

    def iterate_apart(self, number: int) -> IterationResult:
        """Publish, submit all prompts, train on groups as they arrive or once all have arrived, update."""
        start, is_colocated = self._now, self._setting.schedule == "colocated"
        busy = self._pool.read_busy(start)
        submitted = start + self._costs.publish
        self._submit(number, submitted)
        groups = self._pool.take(self._setting.num_prompts)
        switch = self._costs.switch if is_colocated else 0.0
        if self._setting.schedule == "periodic":
            trained = self._train(groups, submitted)
        else:
            first, last = (pick(group.finished for group in groups) for pick in (min, max))
            trained = self._train(groups, last + switch)
            dry = min(last, max(first, max(group.begun for group in groups)))
            trained.parts["first"] += (first - submitted) * self._num_ranks
            trained.parts["starved"] += (dry - first) * self._num_ranks
            trained.parts["tail"] += (last - dry) * self._num_ranks
        end = trained.end + switch + self._costs.other
        self._now = end
        return self._describe(start, end, trained, groups, busy, publish=self._costs.publish, switch=2 * switch)

    def iterate_one_step_off(self, number: int) -> IterationResult:
        """Train on groups sampled with the weights before the last update, while the next groups are sampled."""
        if not number:
            self._submit(0, 0.0)
            self._batch = self._pool.take(self._setting.num_prompts)
            self._now = max(group.finished for group in self._batch)
        start = self._now
        busy = self._pool.read_busy(start)
        submitted = start + self._costs.publish
        self._submit(number + 1, submitted)
        trained = self._train(self._batch, submitted)
        groups, self._batch = self._batch, self._pool.take(self._setting.num_prompts)
        sampled = max(group.finished for group in self._batch)
        end = max(trained.end, sampled) + self._costs.other
        waited = max(0.0, sampled - trained.end)
        trained.parts["first"] += waited * self._num_ranks
        self._now = end
        staleness = int(number > 0)
        return self._describe(start, end, trained, groups, busy, publish=self._costs.publish, staleness=staleness)

    def iterate_asynchronously(self, number: int) -> IterationResult:
        """Train on groups as they arrive, whose prompts were submitted up to `staleness` updates before."""
        start = self._now
        busy = self._pool.read_busy(start)
        # The first weights arrive before any group; later ones interrupt sampling.
        self._pool.pause(start, self._costs.publish)
        submitted = start + self._costs.publish
        first = 0 if not number else number + self._setting.staleness
        for iteration in range(first, number + self._setting.staleness + 1):
            self._submit(iteration, submitted)
        groups = self._pool.take(self._setting.num_prompts, number if self._setting.is_strict else None)
        trained = self._train(groups, submitted)
        end = trained.end + self._costs.other
        self._now = end
        # The first iterations' prompts were all submitted under the first weights.
        staleness = number - max(0, min(group.iteration for group in groups) - self._setting.staleness)
        return self._describe(start, end, trained, groups, busy, publish=self._costs.publish, staleness=staleness)

    def _submit(self, iteration: int, now: float) -> None:
        setting = self._setting
        prompts = setting.prompts.draw(self._generator, setting.num_prompts, 1)
        responses = setting.responses.draw(self._generator, setting.num_prompts, setting.group_size)
        groups = [
            SimulatedGroup(index, iteration, prompt, lengths)
            for index, ((prompt,), lengths) in enumerate(zip(prompts, responses, strict=True))
        ]
        if self.opening is None:
            self.opening = choose_opening(setting, self._costs, groups)
        self._pool.submit(groups, now, self.opening)

    @property
    def _num_ranks(self) -> int:
        return self._setting.num_replicas * self._setting.num_stages

    def _train(self, groups: Sequence[SimulatedGroup], start: float) -> _Trained:
        """Make the iteration's updates, one after the other, from `start` on."""
        setting, now = self._setting, start
        parts = dict.fromkeys(TRAINER_PARTS, 0.0)
        dry = max(group.begun for group in groups)
        for update in range(setting.num_updates):
            pipelines = self._consume(self._choose(groups, update), now)
            end = max(pipeline.end for pipeline in pipelines)
            for pipeline in pipelines:
                for spent in pipeline.spent(dry):
                    parts["busy"] += spent.busy
                    parts["starved" if update else "first"] += spent.first
                    parts["starved"] += spent.starved
                    parts["tail"] += spent.tail
                    parts["bubble"] += spent.bubble + end - pipeline.end
            parts["update"] += self._costs.trainer.update * self._num_ranks
            now = end + self._costs.trainer.update
        return _Trained(now, parts)

    def _choose(self, groups: Sequence[SimulatedGroup], update: int) -> Sequence[SimulatedGroup]:
        """Choose the groups of an update: by prompt, unless they come from several iterations' prompts."""
        size = self._setting.num_prompts // self._setting.num_updates
        if self._setting.schedule == "async" and not self._setting.is_strict:
            return groups[update * size : (update + 1) * size]
        return [group for group in groups if group.index // size == update]

    def _consume(self, groups: Sequence[SimulatedGroup], start: float) -> list[Pipeline]:
        """Give groups to the replicas' slots, in the order in which the replicas ask."""
        setting, trainer = self._setting, self._costs.trainer
        pipelines = [
            Pipeline(trainer, setting.num_stages, setting.num_virtual, setting.slots, start)
            for _ in range(setting.num_replicas)
        ]
        by_index = sorted(groups, key=lambda group: group.index) if setting.in_prompt_order else groups
        asking = [(start, replica, 0) for replica in range(setting.num_replicas)]
        taken, size = 0, setting.groups_per_slot
        while asking:
            asked, replica, unit = heapq.heappop(asking)
            place = (unit * setting.num_replicas + replica) * size if setting.in_prompt_order else taken
            claimed = by_index[place : place + size]
            taken += size
            arrival = max(asked, max(group.finished for group in claimed))
            pipeline = pipelines[replica]
            # The next slot is asked for when this one is waited for.
            wanted = pipeline.wanted
            self._give(pipeline, claimed, arrival)
            if unit + 1 < setting.units:
                heapq.heappush(asking, (max(wanted, arrival), replica, unit + 1))
        return pipelines

    def _give(self, pipeline: Pipeline, groups: Sequence[SimulatedGroup], arrival: float) -> None:
        """Give a replica the slots of a claim."""
        setting, trainer = self._setting, self._costs.trainer
        for part in range(setting.slots_per_group):
            first = part * setting.micro_batch_size
            lengths = [(group.prompt, group.lengths[first : first + setting.micro_batch_size]) for group in groups]
            if setting.slots_per_group == 1:
                lengths = [(group.prompt, group.lengths) for group in groups]
            tokens, pairs = count_slot(lengths, setting.is_shared)
            self._num_trainer_events += 1
            self._tokens += tokens
            pipeline.give(arrival, slot_seconds(trainer, tokens, pairs))

    def _describe(
        self, start: float, end: float, trained: _Trained, groups: Sequence[SimulatedGroup], busy: float,
        publish: float, switch: float = 0.0, staleness: int = 0,
    ) -> IterationResult:  # fmt: skip
        tokens, self._tokens = self._tokens, 0
        trainer = {name: seconds / self._num_ranks for name, seconds in trained.parts.items()}
        trainer |= {"publish": publish, "switch": switch, "other": self._costs.other}
        engines = dict.fromkeys(ENGINE_PARTS, 0.0)
        engines["busy"] = (self._pool.read_busy(end) - busy) / len(self._engines)
        engines |= {"publish": publish, "switch": switch}
        idle = end - start - sum(engines.values())
        last = min(end, max(self._pool.last_sampled))
        tail = sum(max(0.0, last - max(start, sampled)) for sampled in self._pool.last_sampled) / len(self._engines)
        # If engines sample beside the rest of an iteration, they idle for less.
        for name, most in (("tail", tail), ("other", self._costs.other)):
            engines[name] = min(max(0.0, idle), most)
            idle -= engines[name]
        engines["idle"] = idle
        submitted = min(group.begun for group in groups)
        sampled = max(group.sampled for group in groups)
        return IterationResult(start, end, trainer, engines, sampled - submitted, tokens, staleness)
