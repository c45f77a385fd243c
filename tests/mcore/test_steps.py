"""The log-probs that a step keeps for the samples of a run's log."""

import torch

from megatron_rl.algorithm import advantages
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep, RoleAssignment

RESPONSES = [[3, 4], [5]]


def make_batch(index: int) -> Batch:
    responses = [
        wire.Response(
            tokens=wire.encode_tokens(tokens), log_probs=wire.encode_log_probs([-1.0] * len(tokens)),
            finish_reason="stop", seed=0, engine="", spans=[], fingerprint="", reward=reward,
        )
        for tokens, reward in zip(RESPONSES, (0.0, 1.0), strict=True)
    ]  # fmt: skip
    part = wire.GroupPart(
        prompt_index=index, row="", prompt_tokens=wire.encode_tokens([1, 2]), first_response=0, rewards=[0.0, 1.0],
        responses=responses,
    )  # fmt: skip
    batcher = Batcher(advantages.GroupAdvantages(AlgorithmConfig()))
    return batcher.batch(wire.Slot(run="run", version=0, fingerprint="", replica=0, index=index, parts=[part]))


def test_a_step_keeps_the_log_probs_of_the_first_slots_alone() -> None:
    step = PolicyStep([], RoleAssignment(), Objective(AlgorithmConfig(), 8), temperature=1.0, scale=1.0, num_kept=2)
    for index in range(4):
        log_probs_N = torch.full((3,), -1.0 - index, requires_grad=True)
        step.loss_func(make_batch(index), {}, log_probs_N)
    assert {index: kept_N.tolist() for index, kept_N in step.kept.items()} == {0: [-1.0] * 3, 1: [-2.0] * 3}
