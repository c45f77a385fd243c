"""The roles in one run of the schedule against each role in passes of its own."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.config.settings import Settings
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep, RoleAssignment
from megatron_rl.trainer.mcore.step.piggyback import Piggyback
from megatron_rl.trainer.mcore.step.roles import TriModel
from tests.distributed.grpo_trials import Witness, build_run
from tests.distributed.training import CP2, EP2, LAYOUTS, PP2, TP2, settings_of
from tests.grpo_problem import OVERLAPPED, SGD, TRUNCATED, Problem, RoleTrial, Trial, draw_problem
from tests.grpo_twin import Tensors
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

LEAST_EFFECT = 1e-2
MICRO_BATCHES = 6
VPP2 = LAYOUTS["PP2xVPP2"]
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FLAGS = {name: LAYOUTS[name] for name in ("TP2", "TP2+SP", "PP2", "PP2xVPP2", "CP2")} | {
    "PP2, recomputed": f"{PP2} {RECOMPUTED}",
    "PP2, bf16": f"{PP2} --bf16",
    "PP2xVPP2, all messages overlapped": f"{VPP2} --overlap-p2p-communication-warmup-flush",
    "DP2, optimizer distributed and overlapped": OVERLAPPED,
}
TIED = {"PP2, tied": PP2, "PP2xVPP2, tied": VPP2}
OFFLOADED = ["TP2", "PP2, bf16"]
MORE_OFFLOADED = ["PP2", "PP2xVPP2", "DP2, optimizer distributed and overlapped"]
ALONE_AND_TIED = "DP2, optimizer distributed and overlapped, tied"
OF_FOUR_RANKS = {name: LAYOUTS[name] for name in ("TP2xPP2", "CP2xPP2")}
MORE_OF_FOUR_RANKS = {
    "TP2+SPxPP2xVPP2, bf16": f"{TP2} --sequence-parallel {VPP2} --bf16",
    "PP4, recomputed": f"--pipeline-model-parallel-size 4 {RECOMPUTED}",
    "CP2xPP2xVPP2, recomputed": f"{CP2} {VPP2} {RECOMPUTED}",
    "DP2xPP2, optimizer distributed and overlapped": f"{PP2} {OVERLAPPED}",
}
EXPERTS = {
    "EP2xPP2": f"{PP2} {EP2}",
    "CP2xEP2xPP2": f"{CP2} {PP2} {EP2}",
}


def both(layouts: dict[str, str], problem: Problem, **choices: Any) -> list[RoleTrial]:
    """Return the trial with fused and with separate roles."""
    return [
        RoleTrial(name, problem, flags, roles, **choices)
        for name, flags in layouts.items()
        for roles in ("fused", "separate")
    ]


def offloaded(case: RoleTrial) -> RoleTrial:
    return dataclasses.replace(case, name=f"{case.name}, offloaded", flags=f"{case.flags} --frozen-offload")


@dataclasses.dataclass(frozen=True)
class Ran:
    """The results of two iterations of two updates."""

    log_probs: list[list[list[RoleLogProbs]]]
    """Log-probs by update, rank and micro-batch."""
    gradients: list[Tensors]
    """Gradients by update; on rank 0."""
    forward: list[int]
    """Bytes that ranks sent to the next stage, by update."""
    backward: list[int]
    """Bytes that ranks sent to the stage before, likewise."""
    passes: list[int]
    """Runs of a chunk of a frozen model on a rank, by update; separate roles are not counted."""


def run(cases: list[RoleTrial]) -> dict[tuple[str, str], Ran]:
    """Run the cases on each rank; return results by name and roles. Cases of one layout follow each other."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for _, of_layout in itertools.groupby(cases, key=lambda case: case.flags):
        of_layout = list(of_layout)
        with start_session(settings_for(of_layout[0])) as session:
            for case in of_layout:
                with contextlib.ExitStack() as stack:
                    if case.fault is not None:
                        stack.enter_context(FAULTS[case.fault]())
                    results[case.name, case.roles] = run_roles(session, case)
    return results


def settings_for(case: RoleTrial) -> Settings:
    rules = dataclasses.replace(TRUNCATED, beta=case.beta)
    trial = Trial("", 4, rules, "" if "--lr" in case.flags else SGD, roles=case.roles)
    return settings_of(case.problem.policy, f"{trial.words} {case.flags}")


def run_roles(session: Session, case: RoleTrial) -> Ran:
    problem, settings = case.problem, settings_for(case)
    reference = problem.reference if settings.algorithm.kl_beta else None
    one = build_run(session, settings, reference, num_iterations=2)
    witness = Witness(one.objective, one.policy, one.model)
    learner = Learner(one.policy, one.roles, witness, session)
    places = addresses(one.roles)
    with counted_bytes(witness) as sent, counted_passes(witness) as passes:
        for version in range(2):
            one.learn(learner, problem, version, equal=["reference"] if case.is_reference and version == 0 else [])
    assert addresses(one.roles) == places, "frozen weights are copied into the memory that they have"
    updates = range(2 * one.sizes.plan.num_updates)
    log_probs = [session.gather(detached(witness.log_probs.get(update, []))) for update in updates]
    everyone = session.gather(sent)
    forward, backward = (
        [sum(of_rank[name, update] for of_rank in everyone) for update in updates]
        for name in ("tensor_send_next", "tensor_send_prev")
    )
    return Ran(log_probs, witness.gradients, forward, backward, [passes[update] for update in updates])


def addresses(roles: Any) -> list[int]:
    """Return the addresses of frozen models' parameters, and check that these have values only."""
    chunks = [*(roles._old or []), *roles._others.get("reference", [])] if isinstance(roles, TriModel) else []
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        assert not parameter.requires_grad
        assert parameter.grad is None
        assert getattr(parameter, "main_grad", None) is None
        assert not hasattr(parameter, "main_param")
    return [parameter.data_ptr() for parameter in parameters]


def detached(log_probs: list[RoleLogProbs]) -> list[RoleLogProbs]:
    """Return the log-probs in a form that can be sent to another process."""
    assert all(not one.old_N.requires_grad for one in log_probs)
    return [RoleLogProbs(one.policy_N.detach(), one.old_N, one.others) for one in log_probs]


@contextlib.contextmanager
def counted_bytes(witness: Witness) -> Iterator[collections.Counter]:
    sent: collections.Counter = collections.Counter()
    communicate = P2PCommunicator._communicate

    def counting(self: P2PCommunicator, **arguments: Any) -> tuple:
        for name in ("tensor_send_next", "tensor_send_prev"):
            tensor = arguments[name]
            if tensor is not None:
                sent[name, len(witness.gradients)] += tensor.numel() * tensor.element_size()
        return communicate(self, **arguments)

    with mock.patch.object(P2PCommunicator, "_communicate", counting):
        yield sent


@contextlib.contextmanager
def counted_passes(witness: Witness) -> Iterator[collections.Counter]:
    passes: collections.Counter = collections.Counter()
    forward = PolicyStep._run_frozen

    def counting(self: PolicyStep, *arguments: Any) -> torch.Tensor:
        passes[len(witness.gradients)] += 1
        output = forward(self, *arguments)
        assert not output.requires_grad, "nothing is kept for a backward pass"
        return output

    with mock.patch.object(PolicyStep, "_run_frozen", counting):
        yield passes


def swapped_on_the_way() -> contextlib.AbstractContextManager:
    take = Piggyback.take
    return mock.patch.object(Piggyback, "take", lambda self, front, widths: take(self, front, widths)[::-1])


def swapped_at_last() -> contextlib.AbstractContextManager:
    assign = TriModel.assign

    def swap(self: TriModel, *arguments: Any) -> RoleAssignment:
        true = assign(self, *arguments)
        if "reference" not in true.results:
            return true
        swapped = {"old": true.results["reference"], "reference": true.results["old"]}
        return dataclasses.replace(true, results=swapped)

    return mock.patch.object(TriModel, "assign", swap)


def never_taken() -> contextlib.AbstractContextManager:
    """Plant a fault: the second iteration's old policy is the first iteration's."""
    keep, calls = TriModel.keep_old, []

    def once(*arguments: Any) -> None:
        if not calls:
            keep(*arguments)
        calls.append(None)

    return mock.patch.object(TriModel, "keep_old", once)


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "old and reference swapped between stages": swapped_on_the_way,
    "old and reference swapped in the loss": swapped_at_last,
    "old taken in the first iteration only": never_taken,
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("tied"), "qwen2")


@pytest.fixture(scope="module")
def computed(problem: Problem, tied: Problem) -> dict[tuple[str, str], Ran]:
    start = dataclasses.replace(problem, reference=problem.policy)
    in_host_memory = {name: FLAGS[name] for name in OFFLOADED}
    tied_layouts = TIED | {ALONE_AND_TIED: OVERLAPPED}
    cases = [
        *both(FLAGS, problem),
        *both(tied_layouts, tied),
        *(offloaded(case) for case in both(in_host_memory, problem)),
        *(offloaded(case) for case in both(tied_layouts, tied) if case.roles == "fused"),
        *both({"the reference is the start": PP2}, start, is_reference=True),
        *both({"no reference": PP2}, problem, beta=0.0),
        *(RoleTrial(fault, problem, PP2, fault=fault) for fault in FAULTS),
    ]
    return run_ranks(run, 2, sorted(cases, key=lambda case: case.flags))[0]


def differences(one: Ran, other: Ran) -> dict[str, float]:
    """Return the largest differences of log-probs, and of each gradient over its largest value; NaN if one is NaN."""
    found = collections.defaultdict(list)
    for seen, expected in zip(one.gradients, other.gradients, strict=True):
        assert seen.keys() == expected.keys()
        for name, gradient in expected.items():
            found["gradients"].append((seen[name] - gradient).abs().max() / gradient.abs().max())
    for mine, yours in zip(pairs(one), pairs(other), strict=True):
        found["policy"].append((mine.policy_N - yours.policy_N).abs().max())
        found["old"].append((mine.old_N - yours.old_N).abs().max())
        for role, expected_N in yours.others.items():
            found[role].append((mine.others[role] - expected_N).abs().max())
    # The maximum of tensors is not a number if one of them is not.
    return {what: torch.stack(values).max().item() for what, values in found.items()}


def pairs(ran: Ran, updates: Sequence[int] = range(4)) -> list[RoleLogProbs]:
    micro_batches = [one for update in updates for of_rank in ran.log_probs[update] for one in of_rank]
    assert micro_batches
    return micro_batches


def check(name: str, computed: dict[tuple[str, str], Ran]) -> None:
    fused, separate = computed[name, "fused"], computed[name, "separate"]
    found = differences(fused, separate)
    unlike = {
        "reference": min((one.policy_N - one.others["reference"]).abs().max().item() for one in pairs(fused)),
        "old": min((one.policy_N - one.old_N).abs().max().item() for one in pairs(fused, (1, 3))),
    }
    print(f"{name}: differences {found}, unlike the policy {unlike}, sent {fused.forward} and back {fused.backward}")
    assert set(found.values()) == {0.0}
    assert min(unlike.values()) > 0.01
    assert all(fused.backward) == ("PP" in name)
    # Gradients go back as they do for the policy alone: separate passes without it have none.
    assert fused.backward == separate.backward
    # Policy and reference; old with them at the second update.
    assert fused.forward == [size * roles for size, roles in zip(fused.backward, (2, 3, 2, 3), strict=True)]


@pytest.mark.parametrize("name", [*FLAGS, *TIED, ALONE_AND_TIED])
def test_fused_passes_give_the_log_probs_and_gradients_of_separate_ones(name, computed) -> None:
    check(name, computed)


@pytest.mark.parametrize("name", [*OFFLOADED, *TIED, ALONE_AND_TIED])
def test_offloaded_frozen_models_compute_the_same(name, computed) -> None:
    check_offloaded(name, computed, ("fused", "separate") if name in OFFLOADED else ("fused",))


@pytest.mark.slow
def test_offloaded_frozen_models_compute_the_same_in_more_layouts(problem) -> None:
    here = both({name: FLAGS[name] for name in MORE_OFFLOADED}, problem)
    computed = run_ranks(run, 2, sorted([*here, *map(offloaded, here)], key=lambda case: case.flags))[0]
    for name in MORE_OFFLOADED:
        check_offloaded(name, computed, ("fused", "separate"))


def check_offloaded(name: str, computed: dict[tuple[str, str], Ran], all_roles: Sequence[str]) -> None:
    for roles in all_roles:
        found = differences(computed[f"{name}, offloaded", roles], computed[name, roles])
        assert set(found.values()) == {0.0}, (name, roles)


def test_fused_passes_equal_separate_ones_on_four_ranks(problem) -> None:
    computed = run_ranks(run, 4, both(OF_FOUR_RANKS, problem))[0]
    for name in OF_FOUR_RANKS:
        check(name, computed)


@pytest.mark.slow
def test_fused_passes_equal_separate_ones_in_more_layouts_of_four_ranks(problem, tmp_path) -> None:
    experts = draw_problem(tmp_path, "qwen3_moe")
    cases = [*both(MORE_OF_FOUR_RANKS, problem), *both(EXPERTS, experts)]
    computed = run_ranks(run, 4, cases)[0]
    for name in (*MORE_OF_FOUR_RANKS, *EXPERTS):
        check(name, computed)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_gradients_and_old_log_probs(fault, computed) -> None:
    found = differences(computed[fault, "fused"], computed["PP2", "separate"])
    print(f"{fault}: {found}")
    assert found["gradients"] > LEAST_EFFECT
    assert found["old"] > LEAST_EFFECT


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        # Old is the policy at an iteration's first update.
        ("PP2", [1, 2, 1, 2]),
        # In the first iteration the reference is old.
        ("the reference is the start", [0, 1, 1, 2]),
        ("no reference", [0, 1, 0, 1]),
    ],
)
def test_roles_with_equal_weights_share_one_pass(name, passes, computed) -> None:
    fused = computed[name, "fused"]
    assert set(differences(fused, computed[name, "separate"]).values()) == {0.0}
    assert fused.passes == [MICRO_BATCHES * number for number in passes]
