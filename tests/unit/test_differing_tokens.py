"""The count of tokens whose log-probs of trainer and engine differ, from slots to metrics, without a model."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.objective import Objective, Statistics, combine_statistics
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.loop.learner import _check
from megatron_rl.trainer.loop.measures import Measures, UpdateOutcome, compute_metrics, measure_batches
from megatron_rl.trainer.loop.mismatch import ReplicaMismatch, combine_parts
from megatron_rl.trainer.mcore.step import forward_step
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep, RoleAssignment

NUM_PARTS = 2
"""Ranks that share the rows of a pack."""
PROMPT = [1, 2, 3]
# The lengths of turns: every second one is the environment's.
GROUPS = [[[2, 3, 4], [1]], [[5], [1, 2, 1, 1, 3]]]
# By the number of a sampled token: the trainer's log-prob is the next one to the engine's in this direction.
DIFFERING = {0: math.inf, 4: -math.inf, 5: math.inf, 9: 0.0, 13: -math.inf}


class Tokens:
    """Tokens that occur once each, and the log-probs of those that the policy sampled."""

    def __init__(self) -> None:
        self._numbers = itertools.count(10)
        self._draw = np.random.default_rng(0)
        self.engine: dict[int, np.float32] = {}
        self.trainer: dict[int, np.float32] = {}

    def respond(self, lengths: Sequence[int]) -> wire.Response:
        tokens: list[int] = []
        log_probs: list[float] = []
        spans = []
        for turn, length in enumerate(lengths):
            is_sampled = turn % 2 == 0
            begin = len(tokens)
            for token in itertools.islice(self._numbers, length):
                tokens.append(token)
                log_probs.append(float(self._sample(token)) if is_sampled else 0.0)
            spans.append(
                wire.VersionSpan(version="0" if is_sampled else ENVIRONMENT, start=begin, end=begin + length)
            )  # fmt: skip
        return wire.Response(
            tokens=wire.encode_tokens(tokens), log_probs=wire.encode_log_probs(log_probs), finish_reason="stop", seed=1,
            engine="0", spans=spans, fingerprint="",
        )  # fmt: skip

    def _sample(self, token: int) -> np.float32:
        engine = np.float32(-1 - self._draw.random())
        towards = DIFFERING.get(len(self.engine))
        self.engine[token] = engine
        self.trainer[token] = engine if towards is None else np.nextafter(engine, np.float32(towards))
        return engine


def make_batches(tokens: Tokens) -> Iterator[Batch]:
    batcher = Batcher(GroupAdvantages(AlgorithmConfig(advantage="mean")), multiple_of=6, num_parts=NUM_PARTS)
    for index, group in enumerate(GROUPS):
        part = wire.GroupPart(
            prompt_index=index, row=f"rows:{index}", prompt_tokens=wire.encode_tokens(PROMPT), first_response=0,
            responses=[tokens.respond(lengths) for lengths in group], rewards=[1.0] * len(group),
            turn_rewards=[[1.0]] * len(group),
        )  # fmt: skip
        batch = batcher.batch(
            wire.Slot(run="run", version=0, fingerprint="", replica=0, index=index, parts=[part])
        )  # fmt: skip
        assert batch.pack.num_padding
        # Neither half predicts all targets.
        assert all(len(batch.pack.places_of_part(part, NUM_PARTS)) for part in range(NUM_PARTS))
        yield batch


def score(batch: Batch, tokens: Tokens) -> Statistics:
    """Return a micro-batch's statistics for a model that gives the trainer's log-probs."""
    step = PolicyStep([], RoleAssignment(), Objective(AlgorithmConfig(), 20), 1.0, 1.0)
    given = [tokens.trainer[token] for token in batch.pack.target_tokens_N.tolist()]
    _, report = step.loss_func(batch, {}, torch.from_numpy(np.array(given)))
    found: Statistics = report["statistics"]
    return found


def check_as_rank(statistics: list[Statistics], rank: int, monkeypatch: pytest.MonkeyPatch) -> ReplicaMismatch | None:
    """Check an update's statistics on one of the ranks that share packs."""
    state: Any = forward_step.parallel_state
    for name, value in (
        ("is_pipeline_last_stage", True),
        ("get_tensor_model_parallel_rank", 0),
        ("get_context_parallel_rank", rank),
        ("get_tensor_and_context_parallel_rank", rank),
    ):
        monkeypatch.setattr(state, name, lambda *_, value=value, **__: value)
    return _check(statistics)


def test_each_sampled_token_whose_log_probs_differ_is_counted_once(monkeypatch) -> None:
    tokens = Tokens()
    batches = list(make_batches(tokens))
    expected = sum(tokens.trainer[token] != engine for token, engine in tokens.engine.items())
    assert expected == len(DIFFERING) < len(tokens.engine)
    statistics = [score(batch, tokens) for batch in batches]
    # Ranks that share packs compute the same, and one of them reports. The second replica has the same batches.
    found = [check_as_rank(statistics, rank, monkeypatch) for _ in range(2) for rank in range(NUM_PARTS)]
    mismatch = combine_parts([part for part in found if part is not None], None)
    assert mismatch.num_differing == 2 * expected

    measures = measure_batches(batch.facts for batch in batches)
    sums, maxima = combine_statistics(statistics)
    measures.merge(Measures(sums=sums, largest=maxima))
    metrics = compute_metrics(measures, [UpdateOutcome(1.0, 1.0, True, 1.0)], 18)
    assert metrics["mismatch"]["differing"] == expected
    assert metrics["tokens"]["environment"] == 6


def test_a_log_prob_that_is_nan_differs() -> None:
    tokens = Tokens()
    batch = next(make_batches(tokens))
    expected = sum(tokens.trainer[token] != tokens.engine[token] for token in batch.pack.target_tokens_N.tolist())
    tokens.trainer[int(batch.pack.target_tokens_N[1])] = np.float32("nan")
    assert score(batch, tokens).sums["mismatch_differing"] == expected + 1
