"""A replica's slots on all of its ranks: fetched once, the same everywhere, and every fault raised on every rank."""

import contextlib
import dataclasses
import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import IterationLost, RolloutError
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.data.slots import Identity, IterationSlots, SlotRefused
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.loop.measures import Measures
from megatron_rl.trainer.loop.rollouts import Rollouts, SubmissionTerms, build_batcher, start_at_once, wait_for_all
from megatron_rl.trainer.mcore import relay
from megatron_rl.trainer.mcore.session import Session, start_session
from tests import hf_models
from tests.distributed.grpo_trials import Run, Source, build_run
from tests.distributed.training import LAYOUTS, settings_of
from tests.grpo_problem import Problem, Trial, draw_problem
from tests.ranks import run_ranks
from tests.unit.test_slots import IDENTITY, MEAN, OnDevice, slot

NUM_SLOTS = 6
PROMPTS: Any = SimpleNamespace(peek=lambda count, num_carried: [], put_off=[])
TWO_RANKS = {name: LAYOUTS[name] for name in ("TP2", "PP2", "CP2", "DP2")}
# The last ones need four ranks, and eight layers.
LARGE_LAYOUTS = {
    "DP2xPP2": LAYOUTS["DP2xPP2"],
    "TP2xPP2": LAYOUTS["TP2xPP2"],
    "PP4xVPP2": "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
}


class Sidecar:
    """The sidecar, as one rank sees it; `faults` are raised in place of slots."""

    def __init__(self, faults: dict[int, Exception] | None = None, version: int = 3):
        self.asked: list[tuple[int, int]] = []
        self._faults = faults or {}
        self._version = version

    def submit(self, submission: wire.Submission) -> None:
        pass

    def encoded_slot(self, version: int, replica: int, index: int, deadline_seconds: float) -> bytes:
        self.asked.append((replica, index))
        if index in self._faults:
            raise self._faults[index]
        made = slot(index, replica=replica, version=self._version)
        # As long as a slot of a real run, so that it does not fit into a connection's buffer.
        made.parts[0].responses[0].components.update({f"{'x' * 4096}{number}": 0.0 for number in range(512)})
        return wire.encode(made)

    def slot(self, *place: Any) -> wire.Slot:
        return wire.decode(self.encoded_slot(*place), wire.Slot)


def rollouts_of(session: Session, sidecar: Any, schedule: Any = start_at_once) -> Rollouts:
    plan = wire.Plan(
        num_prompts=2 * NUM_SLOTS * session.num_replicas, group_size=2, num_replicas=session.num_replicas,
        micro_batch_size=4, num_updates=2,
    )  # fmt: skip
    terms = SubmissionTerms(divide(plan), wire.Sampling(max_tokens=8), 60.0)
    return Rollouts(sidecar, session, terms, lambda baseline: Batcher(MEAN), schedule, PROMPTS)


def tensors(batch: Batch) -> list[torch.Tensor]:
    fields = [getattr(batch.pack, field.name) for field in dataclasses.fields(batch.pack)]
    fields += [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return [field for field in fields if isinstance(field, torch.Tensor)]


def take_slots(folder: Path, layouts: dict[str, str]) -> dict[str, Any]:
    """Take two iterations of each schedule: return the rank's requests to the sidecar, and the batches that it got."""
    torch.distributed.init_process_group("gloo")
    seen = {}
    for name, words in layouts.items():
        with start_session(settings_of(folder, words)) as session:
            sidecar = Sidecar()
            batches = []
            for schedule in (start_at_once, wait_for_all):
                with rollouts_of(session, sidecar, schedule).iteration(IDENTITY) as slots:
                    for update in range(2):
                        of_update = slots.select_update(update)
                        of_update.wait_for_first()
                        batches += [(batch.replica, batch.index, tensors(batch)) for batch in of_update]
                assert [thread.name for thread in threading.enumerate()].count("slots") == 0
            seen[name] = (session.replica, sidecar.asked, batches)
    return seen


def assert_fetched_once(ranks: list[dict[str, Any]], layouts: dict[str, str]) -> None:
    for name in layouts:
        of_ranks = [seen[name] for seen in ranks]
        for replica in {replica for replica, _, _ in of_ranks}:
            mine = [(asked, batches) for number, asked, batches in of_ranks if number == replica]
            asked = list(itertools.chain.from_iterable(asked for asked, _ in mine))
            assert asked == [(replica, index) for index in range(NUM_SLOTS)] * 2, name
            for _, batches in mine:
                assert [batch[:2] for batch in batches] == [(replica, index) for index in range(NUM_SLOTS)] * 2
                for (_, _, ours), (_, _, firsts) in zip(batches, mine[0][1], strict=True):
                    assert len(ours) == 8
                    assert all(torch.equal(one, other) for one, other in zip(ours, firsts, strict=True)), name


@pytest.mark.each_change
def test_a_slot_is_fetched_once_for_each_of_several_replicas(tmp_path: Path) -> None:
    layouts = {name: words for name, words in LARGE_LAYOUTS.items() if name != "PP4xVPP2"}
    folder = hf_models.draw("qwen3", tmp_path / "model")
    assert_fetched_once(run_ranks(take_slots, 4, folder, layouts), layouts)


class Broken(Exception):
    """A planted fault."""


def meet_faults(folder: Path) -> dict[str, str]:
    """Return the error that every rank raises where it waits for the slot.

    A rank may still take slots ahead when the first rank has left: its thread does not wait for the reason.
    """
    seen = {}
    with (
        mock.patch.object(relay, "_REASON_SECONDS", 0.0),
        start_session(settings_of(folder, LAYOUTS["PP2"])) as session,
    ):
        faults = {
            "failed": Sidecar({3: IterationLost("iteration 3 failed: an engine is lost")}),
            "late": Sidecar({0: RolloutError("slot 0 of replica 0 did not come within 60 s")}),
            "stale": Sidecar(version=2),
        }
        for name, sidecar in faults.items():
            try:
                with rollouts_of(session, sidecar).iteration(IDENTITY) as slots:
                    for batch in slots.select_update(0):
                        seen[name] = f"given slot {batch.index}"
                    list(slots.select_update(1))
            except (RolloutError, SlotRefused) as error:
                seen[name] = f"{type(error).__name__}: {error}"
            seen[f"{name} asked"] = str(len(sidecar.asked))
            for thread in threading.enumerate():
                if thread.name == "slots":
                    thread.join(60)
                    assert not thread.is_alive()
        # The first rank leaves for a reason of its own; the others are told no wrong one, and no thread stays.
        with (
            contextlib.suppress(Broken, relay.SlotsLost),
            rollouts_of(session, Sidecar()).iteration(IDENTITY) as slots,
        ):
            seen["left"] = f"given {slots.batch(0).index}"
            if session.rank == 0:
                raise Broken
            try:
                slots.wait_for_all()
            except relay.SlotsLost as error:
                seen["left"] = f"{type(error).__name__}: {error}"
                raise
        for thread in threading.enumerate():
            if thread.name == "slots":
                thread.join(60)
                assert not thread.is_alive()
        session.barrier()
    return seen


def take_slots_and_meet_faults(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    return take_slots(folder, TWO_RANKS), meet_faults(folder)


def test_a_slot_is_fetched_once_a_replica_and_it_or_its_refusal_reaches_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(take_slots_and_meet_faults, 2, hf_models.draw("qwen3", tmp_path / "model"))
    assert_fetched_once([taken for taken, _ in ranks], TWO_RANKS)
    first, second = (faults for _, faults in ranks)
    for seen in (first, second):
        assert seen["failed"] == "IterationLost: iteration 3 failed: an engine is lost"
        assert seen["late"] == "RolloutError: slot 0 of replica 0 did not come within 60 s"
        assert seen["stale"].startswith("SlotRefused: slot (0, 0) of iteration 3 belongs to")
    assert (first["failed asked"], second["failed asked"]) == ("4", "0")
    assert (first["left"], second["left"].split(":")[0]) == ("given 0", "SlotsLost")


def leave_in_the_middle(folder: Path) -> None:
    """Leave an iteration in the middle: session and process end, even if a rank still waits for a slot."""
    with (
        start_session(settings_of(folder, LAYOUTS["TP2"])) as session,
        contextlib.suppress(Broken),
        rollouts_of(session, Sidecar()).iteration(IDENTITY) as slots,
    ):
        slots.batch(0)
        raise Broken


def test_ranks_that_leave_in_the_middle_of_an_iteration_end(tmp_path: Path) -> None:
    run_ranks(leave_in_the_middle, 2, hf_models.draw("qwen3", tmp_path / "model"), timeout=120)


def learn(problem: Problem, layouts: dict[str, str]) -> dict[tuple[str, str, bool], tuple[Measures, list[Any]]]:
    """Run an iteration of two updates, with slots of the rank's own and through the relay; return its results."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for layout, words in layouts.items():
        for roles in ("fused", "separate"):
            trial = Trial("", 2, roles=roles)
            settings = settings_of(problem.policy, f"{words} {trial.words}")
            with start_session(settings) as session:
                for is_relayed in (False, True):
                    device = OnDevice()
                    with device.counted():
                        results[layout, roles, is_relayed] = learn_once(session, settings, problem, is_relayed)
                    gc.collect()
                    # The batches between a chunk's forward pass and its backward pass, over all chunks.
                    most = max(device.most for device in session.gather(device))
                    assert device.num_alive == 0
                    if session.rank == 0:
                        print(f"{layout}, {roles}: at most {most} of {device.num_moved} batches at a time")
    return results


def learn_once(session: Session, settings: Any, problem: Problem, is_relayed: bool) -> tuple[Measures, list[Any]]:
    one = build_run(session, settings, problem.reference)
    learner = Learner(one.policy, one.roles, one.objective, session)
    identity = Identity("run", 3, one.policy.weights.fingerprint())
    with open_slots(one, problem.divided(2), identity, is_relayed) as slots:
        learned = learner.learn(slots)
    return learned.measures, learned.updates


@contextlib.contextmanager
def open_slots(one: Run, problem: Problem, identity: Identity, is_relayed: bool) -> Iterator[IterationSlots]:
    if not is_relayed:
        slots = one.open_slots(problem, identity)
        yield slots
        slots.finish()
        return
    source = Source(problem, one.sizes.division, one.session.replica, identity, False)
    sidecar: Any = SimpleNamespace(
        submit=lambda submission: None,
        encoded_slot=lambda version, replica, index, seconds: wire.encode(source.slot(index)),
    )
    terms = SubmissionTerms(one.sizes.division, wire.Sampling(max_tokens=8), 60.0)
    batcher = build_batcher(one.settings, one.session.device)
    rollouts = Rollouts(sidecar, one.session, terms, lambda baseline: batcher, start_at_once, PROMPTS)
    with rollouts.iteration(identity) as slots:
        yield slots


@pytest.mark.each_change
def test_every_schedule_comes_to_its_end_with_slots_that_the_first_stage_fetches(tmp_path: Path) -> None:
    problem = draw_problem(tmp_path)
    deep = hf_models.draw("qwen3", tmp_path / "deep", num_hidden_layers=8)
    for of_rank in run_ranks(learn, 4, dataclasses.replace(problem, policy=deep, reference=deep), LARGE_LAYOUTS):
        for layout, roles in itertools.product(LARGE_LAYOUTS, ("fused", "separate")):
            assert of_rank[layout, roles, True] == of_rank[layout, roles, False], (layout, roles)
