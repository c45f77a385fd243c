"""The memory that a frozen model adds to a rank, in bytes of tensors, with bfloat16 and Adam."""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep
from tests import hf_models
from tests.distributed.grpo_trials import build_run
from tests.distributed.training import PP2, settings_of
from tests.grpo_problem import ADAM, TRUNCATED, Problem, Trial, draw_problem
from tests.live_memory import LiveMemory
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

NUM_LAYERS, HIDDEN_SIZE = 24, 64
# Rotary frequencies, which every model has of its own.
SMALL = 1024
LAYOUTS = {"DP2": ADAM, "PP2": f"{PP2} --lr 0.002"}
# The policy alone, with a reference, with an old policy, with both: weight of the divergence, and updates.
ROLES = {"none": (0.0, 1), "reference": (0.1, 1), "old": (0.0, 2), "both": (0.1, 2)}
# The layouts that are measured, and the pairs of cases of which one has one frozen model more.
PAIRS = [
    pytest.param(("PP2", "both", "old"), id="PP2"),
    pytest.param(("DP2", "reference", "none"), id="DP2"),
]


@dataclasses.dataclass(frozen=True)
class Used:
    """Bytes on one rank."""

    held: int
    """Bytes held before the first iteration."""
    peak: int
    """The most bytes held during the second one."""
    in_pass: int
    """The most bytes that the pass of a frozen chunk added to those held when it began."""
    parameters: int
    """The bytes of one frozen model."""
    hidden: int
    """Bytes of the hidden states of the longest micro-batch."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """The memory that a rank used in one layout."""

    fewer: Used
    more: Used
    """The bytes with one frozen model more."""
    offloaded: Used
    """The same, with frozen models in the host's memory."""


def measure(problem: Problem, layout: str, more: str, fewer: str) -> Compared:
    torch.distributed.init_process_group("gloo")
    used = []
    for roles, is_offloaded in ((fewer, False), (more, False), (more, True)):
        beta, num_updates = ROLES[roles]
        rules = dataclasses.replace(TRUNCATED, beta=beta)
        trial = Trial("", 4, rules, f"--bf16 {LAYOUTS[layout]}", num_updates=num_updates)
        settings = settings_of(problem.policy, trial.words + " --frozen-offload" * is_offloaded)
        with start_session(settings) as session:
            used.append(learn_twice(session, settings, problem.divided(num_updates)))
        gc.collect()
    return Compared(*used)


def learn_twice(session: Session, settings: Any, problem: Problem) -> Used:
    hidden, in_pass = [0], [0]
    with LiveMemory() as memory, watched(memory, hidden, in_pass):
        one = build_run(session, settings, problem.reference if settings.algorithm.kl_beta else None)
        # Once computed, the platform keeps results that depend on shapes alone.
        one.policy.weights.fingerprint()
        held = memory.settled()
        learner = Learner(one.policy, one.roles, one.objective, session)
        # The first iteration makes the state that the optimizer keeps.
        for version in range(2):
            slots = one.open_slots(problem, Identity("run", version, "fingerprint"))
            gc.collect()
            memory.peak = memory.now
            learner.learn(slots)
            slots.close()
    parameters = sum(parameter.nbytes for chunk in one.policy.chunks for parameter in chunk.parameters())
    return Used(held, memory.peak, in_pass[0], parameters, hidden[0])


@contextmanager
def watched(memory: LiveMemory, hidden: list[int], in_pass: list[int]) -> Iterator[None]:
    forward = PolicyStep._run_frozen

    def watching(self: PolicyStep, pack: Any, *others: Any) -> torch.Tensor:
        before, most = memory.now, memory.peak
        memory.peak = memory.now
        output = forward(self, pack, *others)
        in_pass[0] = max(in_pass[0], memory.peak - before)
        memory.peak = max(memory.peak, most)
        return output

    run = PolicyStep._forward_frozen

    def noting(self: PolicyStep, batch: Any, *others: Any) -> list[torch.Tensor]:
        hidden[0] = max(hidden[0], batch.pack.num_tokens * HIDDEN_SIZE * torch.bfloat16.itemsize)
        return run(self, batch, *others)

    with mock.patch.multiple(PolicyStep, _run_frozen=watching, _forward_frozen=noting):
        yield


@pytest.fixture(scope="module")
def used(request, tmp_path_factory: pytest.TempPathFactory) -> list[Compared]:
    """Measure the memory of each rank."""
    problem = draw_problem(tmp_path_factory.mktemp("models"))
    folder = hf_models.draw(
        "qwen3", tmp_path_factory.mktemp("deep"), num_hidden_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE
    )
    deep = dataclasses.replace(problem, policy=folder, reference=folder)
    return run_ranks(measure, 2, deep, *request.param)


@pytest.mark.parametrize("used", PAIRS, indirect=True)
def test_a_frozen_model_adds_its_parameters_and_at_most_a_micro_batch_of_hidden_states(used) -> None:
    for rank, of_rank in enumerate(used):
        fewer, more = of_rank.fewer, of_rank.more
        held, peak = more.held - fewer.held - more.parameters, more.peak - fewer.peak - more.parameters
        print(
            f"rank {rank}: beside its {more.parameters} bytes {held} more held, {peak} at the peak; "
            f"a micro-batch's hidden states are {more.hidden}"
        )
        assert 0 <= held <= SMALL
        assert peak <= more.hidden + SMALL


@pytest.mark.parametrize("used", PAIRS, indirect=True)
def test_an_offloaded_frozen_model_adds_less_than_a_quarter_of_its_parameters(used) -> None:
    for rank, of_rank in enumerate(used):
        fewer, more, offloaded = of_rank.fewer, of_rank.more, of_rank.offloaded
        # On this platform the host's memory is counted with the device's.
        peak = offloaded.peak - fewer.peak - more.parameters
        copies = offloaded.in_pass - more.in_pass
        print(
            f"rank {rank}: {copies / more.parameters:.1%} of the parameters in a pass, "
            f"{peak / more.parameters:.1%} at the iteration's peak"
        )
        assert offloaded.held == more.held
        assert 0 < copies < 0.25 * more.parameters
        assert peak < 0.25 * more.parameters
