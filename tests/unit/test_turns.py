"""The writers of a response's tokens, and what follows from them: targets, lengths, checks."""

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.observe.progress import line_of
from megatron_rl.observe.summary import summary_lines
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import (
    ENVIRONMENT,
    count_sampled,
    count_turns,
    find_span_problems,
    mask_sampled,
)
from megatron_rl.trainer.data.batch import Batcher, BatchFacts
from megatron_rl.trainer.data.slots import Identity, SlotRefused, check_slot
from megatron_rl.trainer.loop.equal_rewards import EqualRewards, Failures
from megatron_rl.trainer.loop.measures import Measures, UpdateOutcome, compute_metrics, measure_batches

IDENTITY = Identity("run", 3, "weights-3")


def respond(*turns: tuple[str, list[int]], **changes) -> wire.Response:
    """Make a response of turns: who wrote, and what; its log-probs are -1, -2, ... and 0 for the environment's."""
    tokens = [token for _, turn in turns for token in turn]
    spans, log_probs = [], []
    for version, turn in turns:
        spans.append(wire.VersionSpan(version=version, start=len(log_probs), end=len(log_probs) + len(turn)))
        log_probs += [0.0 if version == ENVIRONMENT else -1.0 - len(log_probs) - place for place in range(len(turn))]
    made = wire.Response(
        tokens=wire.encode_tokens(tokens),
        log_probs=wire.encode_log_probs(log_probs),
        finish_reason="stop",
        seed=1,
        engine="0",
        spans=spans,
        fingerprint="weights-3",
    )
    return msgspec.structs.replace(made, **changes)


TWO_TURNS = respond(("3", [10, 11]), (ENVIRONMENT, [50, 51, 52]), ("3", [12]))
ASKED_FIRST = respond((ENVIRONMENT, [53]), ("3", [13, 14]))


def slot(*responses: wire.Response) -> wire.Slot:
    part = wire.GroupPart(
        prompt_index=0, row="rows:0", prompt_tokens=wire.encode_tokens([7, 8]), first_response=0,
        responses=list(responses), rewards=[1.0, 0.0],
    )  # fmt: skip
    return wire.Slot(run="run", version=3, fingerprint="weights-3", replica=0, index=0, parts=[part])


@pytest.mark.parametrize("is_shared", [True, False])
def test_targets_are_what_the_policy_wrote_each_after_all_that_stands_before_it(is_shared: bool) -> None:
    batcher = Batcher(GroupAdvantages(AlgorithmConfig(advantage="mean")), is_shared=is_shared)
    batch = batcher.batch(slot(TWO_TURNS, ASKED_FIRST))
    visible, tokens = batch.pack.layout.visible(), batch.pack.tokens_T.numpy()
    found = [
        (tokens[visible[row]].tolist(), token)
        for row, token in zip(batch.pack.target_rows_N.tolist(), batch.pack.target_tokens_N.tolist(), strict=True)
    ]
    assert found == [
        ([7, 8], 10),
        ([7, 8, 10], 11),
        ([7, 8, 10, 11, 50, 51, 52], 12),
        ([7, 8, 53], 13),
        ([7, 8, 53, 13], 14),
    ]
    assert batch.pack.target_sequences_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.lengths_S.tolist() == [3, 2]
    assert batch.engine_log_probs_N.tolist() == [-1, -2, -6, -2, -3]


def test_turns_and_tokens_are_counted_for_their_writers() -> None:
    assert mask_sampled(TWO_TURNS).tolist() == [True, True, False, False, False, True]
    assert (count_sampled(TWO_TURNS), count_turns(TWO_TURNS)) == (3, 2)
    assert (count_sampled(ASKED_FIRST), count_turns(ASKED_FIRST)) == (2, 1)
    # An engine may say in two spans what one version sampled.
    assert count_turns(respond(("3", [1]), ("3", [2]))) == 1


@pytest.mark.parametrize(
    ("response", "max_turns", "problem"),
    [
        (TWO_TURNS, 0, "tokens 2 to 5 have version 'environment', wanted '3'"),
        (TWO_TURNS, 1, "took 2 turns, and 1 were allowed"),
        (respond(("3", [1]), (ENVIRONMENT, [2]), ("2", [3])), 2, "tokens 2 to 3 have version '2', wanted '3'"),
        (respond(("3", [1]), (ENVIRONMENT, [2])), 2, "the last token of a part, 1, must be the policy's"),
        (respond((ENVIRONMENT, [1]), (ENVIRONMENT, [2]), ("3", [3])), 2, "two turns without one of the policy"),
        (respond(("3", [1]), (ENVIRONMENT, []), ("3", [3])), 2, "a turn without tokens"),
        (msgspec.structs.replace(TWO_TURNS, turn_rewards=[1.0]), 2, "it has rewards of 1 turns, and took 2"),
        (
            msgspec.structs.replace(TWO_TURNS, log_probs=wire.encode_log_probs(-np.ones(6))),
            2,
            "a token of the environment has a log-prob",
        ),
    ],
)
def test_a_response_whose_turns_cannot_be_is_refused_by_the_trainer_too(response, max_turns, problem) -> None:
    assert not [*find_span_problems(TWO_TURNS, "3", 2, 2)]
    check_slot(slot(TWO_TURNS, ASKED_FIRST), IDENTITY, max_turns=2)
    assert problem in " ".join(find_span_problems(response, "3", max_turns, 2))
    with pytest.raises(SlotRefused, match="was not sampled from this version"):
        check_slot(slot(response, ASKED_FIRST if max_turns else respond(("3", [1]))), IDENTITY, max_turns)


def test_conversations_in_which_no_environment_wrote_are_counted_as_conversations() -> None:
    # An environment that fails at its first answer has written nothing, and its failure must be seen.
    failed = respond(
        ("3", [10, 11]), finish_reason="failed", cause="raised", failure="RuntimeError: no such move (game.py:14)"
    )
    one = wire.GroupPart(
        prompt_index=0, row="rows:0", prompt_tokens=b"", first_response=0, rewards=[0.0, 0.0],
        responses=[failed, respond(("3", [12]))], turn_rewards=[[0.0], [0.0]],
    )  # fmt: skip
    described = describe(one)
    assert described["responses"] | {"turns": 1.0, "limit": 0.0, "failed": 0.5} == described["responses"]
    assert described["tokens"]["environment"] == 0
    without = describe(msgspec.structs.replace(one, turn_rewards=[]))
    assert not {"turns", "limit"} & without["responses"].keys()
    assert "environment" not in without["tokens"]


def test_a_failure_is_not_truncated_and_is_shown_with_the_first_reason() -> None:
    failed = respond(
        ("3", [10, 11]), finish_reason="failed", cause="raised", failure="RuntimeError: no such move (game.py:14)"
    )
    other = msgspec.structs.replace(failed, failure="another")
    cut = respond(("3", [12]), finish_reason="length")
    parts = [
        wire.GroupPart(
            prompt_index=0, row="rows:0", prompt_tokens=b"", first_response=0, rewards=[0.0, 0.0],
            responses=responses, turn_rewards=[[0.0], [0.0]],
        )
        for responses in ([failed, other], [cut, failed])
    ]  # fmt: skip
    reason = "rows:0: RuntimeError: no such move (game.py:14)"
    every, some = map(describe, parts)
    assert (every["responses"]["failed"], every["responses"]["truncated"]) == (1.0, 0.0)
    assert (some["responses"]["failed"], some["responses"]["truncated"]) == (0.5, 0.5)
    assert every["responses"]["failure"] == some["responses"]["failure"] == reason
    # It reaches the rank that reports, whichever replica had it.
    measures = Measures()
    for part in (msgspec.structs.replace(parts[1], responses=[cut]), parts[0]):
        measures.merge(msgspec.msgpack.decode(msgspec.msgpack.encode(measure(part)), type=Measures))
    assert measures.first == {"failure": reason}
    for metrics, share, name in ((every, "100%", "all responses"), (some, "50%", "50% of responses")):
        line = line_of(0, 9, metrics)
        assert f"failed {share}" in line
        failures, equal = Failures("0"), EqualRewards(SETTINGS)
        assert failures.follow(metrics) == (
            f"warning: {name} failed, and have the reward of --rollout-env-on-error; the first reason: {reason}"
        )
        assert failures.follow(metrics) is None
        assert (equal.follow(metrics) is None) == (metrics is every)
    rows = summary_lines([{**metrics, "version": version} for version, metrics in enumerate((some, every))], {})
    assert any(re.search(r"failed responses +0.500 +at version 0, +1.000 +at version 1", row) for row in rows)


SETTINGS: Any = SimpleNamespace(
    algorithm=AlgorithmConfig(advantage="mean"),
    architecture=SimpleNamespace(experts=None),
)


def measure(*parts: wire.GroupPart) -> Measures:
    return measure_batches([BatchFacts(9, 3, 2, parts)])


def describe(*parts: wire.GroupPart) -> dict:
    """Describe an iteration of these parts."""
    measures = measure(*parts)
    of_targets = ("targets", "loss", "entropy", "ratio", "mismatch", "mismatch_kl", "mismatch_differing")
    measures.merge(Measures(sums=dict.fromkeys(of_targets, 1.0), largest={"mismatch": 0.0}))
    return compute_metrics(measures, [UpdateOutcome(1.0, 1.0, True, 3.0)], 9)
