"""Responses that branch: what each target is predicted from, and which tokens stand in the buffer once."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import (
    ENVIRONMENT,
    count_turns,
    find_branch_problems,
    find_span_problems,
    list_parts,
    trace_path,
)
from megatron_rl.trainer.data.batch import Batch, Batcher

PROMPT = [7, 8, 9]


def respond(*parts: tuple[int, list[int], list[int]]) -> wire.Response:
    """Make a response of parts: where each leaves, what the environment writes first, and what the policy writes."""
    tokens: list[int] = []
    spans, branches, log_probs = [], [], []
    for number, (after, given_tokens, sampled) in enumerate(parts):
        if number or after:
            branches.append(wire.Branch(start=len(tokens), after=after))
        for version, written in ((ENVIRONMENT, given_tokens), ("3", sampled)):
            if written:
                spans.append(wire.VersionSpan(version=version, start=len(tokens), end=len(tokens) + len(written)))
                log_probs += [0.0 if version == ENVIRONMENT else -1.0 - len(log_probs) - n for n in range(len(written))]
                tokens += written
    return wire.Response(
        tokens=wire.encode_tokens(tokens), log_probs=wire.encode_log_probs(log_probs), finish_reason="stop", seed=1,
        engine="0", spans=spans, branches=branches, fingerprint="weights-3",
    )  # fmt: skip


def batch(*responses: wire.Response, is_shared: bool = True, prompt: list[int] = PROMPT) -> Batch:
    part = wire.GroupPart(
        prompt_index=0, row="rows:0", prompt_tokens=wire.encode_tokens(prompt), first_response=0,
        responses=list(responses), rewards=[float(number) for number in range(len(responses))],
    )  # fmt: skip
    slot = wire.Slot(run="run", version=3, fingerprint="weights-3", replica=0, index=0, parts=[part])
    return Batcher(GroupAdvantages(AlgorithmConfig(advantage="mean")), is_shared=is_shared).batch(slot)


def found_targets(made: Batch) -> list[tuple[list[int], int, int, float]]:
    """List what each target is predicted from, at which position, the target, and the engine's log-prob of it."""
    visible, tokens = made.pack.layout.visible(), made.pack.tokens_T.numpy()
    rows = made.pack.target_rows_N.tolist()
    assert all(made.pack.positions_T[row] == visible[row].sum() - 1 for row in rows)
    targets, numbers = made.pack.target_tokens_N.tolist(), made.pack.target_sequences_N.tolist()
    engine = made.engine_log_probs_N.tolist()
    return [(tokens[visible[row]].tolist(), *rest) for row, *rest in zip(rows, targets, numbers, engine, strict=True)]


def expected_targets(*responses: wire.Response, prompt: list[int]) -> list[tuple[list[int], int, int, float]]:
    """List the same from the responses, token by token."""
    expected = []
    for number, response in enumerate(responses):
        tokens = wire.decode_tokens(response.tokens).tolist()
        log_probs = wire.decode_log_probs(response.log_probs).tolist()
        leaves = {branch.start: branch.after for branch in response.branches}
        # For each token, itself after all that it follows.
        seen: dict[int, list[int]] = {place - len(prompt): prompt[: place + 1] for place in range(len(prompt))}
        for place, token in enumerate(tokens):
            before = seen.get(leaves.get(place, place) - 1, [])
            seen[place] = [*before, token]
            if log_probs[place]:
                expected.append((before, token, number, log_probs[place]))
    return expected


words = st.lists(st.integers(0, 2), max_size=4)
trees = st.lists(
    st.tuples(st.integers(0, 1000), words, st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=5
)


@given(st.lists(trees, min_size=1, max_size=4), words.filter(bool), st.booleans())
def test_each_target_is_predicted_from_its_own_path(drawn, prompt: list[int], is_shared: bool) -> None:
    responses = []
    for parts in drawn:
        placed, length = [], 0
        for draw, given_tokens, sampled in parts:
            after = draw % (length + len(prompt) + 1) - len(prompt)
            if after == length and length:
                after -= 1
            placed.append((after, given_tokens if after > -len(prompt) else [*given_tokens, 1], sampled))
            length += len(placed[-1][1]) + len(sampled)
        responses.append(respond(*placed or [(0, [], [5])]))
    for response in responses:
        assert not [*find_span_problems(response, "3", 99, len(prompt))]
        assert count_turns(response) == len(list_parts(response))
    made = batch(*responses, prompt=prompt, is_shared=is_shared)
    assert found_targets(made) == expected_targets(*responses, prompt=prompt)
    assert made.lengths_S.tolist() == np.bincount(made.pack.target_sequences_N, minlength=len(responses)).tolist()


def test_what_environments_write_alike_stands_in_the_buffer_once() -> None:
    tools = [20, 21, 22, 23]
    responses = [respond((-1, [*tools, 30], [1, 2])), respond((-1, [*tools, 31], [3])), respond((-1, tools, [4]))]
    made = batch(*responses)
    # Of the prompt the last token is followed by none.
    assert made.pack.tokens_T.tolist() == [7, 8, *tools, 30, 1, 2, 31, 3, 4]
    assert batch(*responses, is_shared=False).pack.num_tokens == 3 * (2 + 4) + 2 + 4


def test_what_the_policy_says_alike_is_a_target_each_time() -> None:
    responses = [respond((0, [], [1, 2])), respond((0, [], [1, 3]), (0, [], [1, 3]))]
    made = batch(*responses)
    assert made.pack.tokens_T.tolist() == [*PROMPT, 1, 2, 1, 3, 1, 3]
    assert made.pack.target_tokens_N.tolist() == [1, 2, 1, 3, 1, 3]
    assert made.lengths_S.tolist() == [2, 4]


@pytest.mark.parametrize("num_branches", [1, 8])
def test_the_turns_that_branches_share_are_computed_once(num_branches: int) -> None:
    own, length = (50, 30), 3 * (50 + 30)
    tree = respond((0, [1] * (length - 1), [2]), *[(length, [1] * own[0], [2] * own[1])] * num_branches)
    # The first branch continues where the turns end, so it is none.
    branches = [branch for branch in tree.branches if branch.start != branch.after]
    tree = msgspec.structs.replace(tree, branches=branches)
    assert batch(tree).pack.num_tokens == len(PROMPT) + length + num_branches * sum(own)
    flat = batch(tree, is_shared=False).pack.num_tokens
    assert flat == num_branches * (len(PROMPT) + length + sum(own))


@pytest.mark.parametrize(
    ("branches", "problem"),
    [
        ([(3, 1)], "no span begins at token 3"),
        ([(2, 2)], "the branch at token 2 follows token 1, which must be one before it"),
        ([(2, -4)], "the branch at token 2 follows token -5, which must be one before it"),
        ([(4, 1), (2, 1)], "a branch at token 2 must begin after token 4 and before token 6"),
        ([(6, 1)], "a branch at token 6 must begin after token -1 and before token 6"),
    ],
)
def test_branches_that_cannot_be_are_refused(branches, problem) -> None:
    good = respond((0, [], [1, 2]), (1, [3, 4], [5, 6]))
    assert not [*find_span_problems(good, "3", 2, 3)]
    made = [wire.Branch(start=start, after=after) for start, after in branches]
    bad = msgspec.structs.replace(good, branches=made)
    assert problem in " ".join(find_branch_problems(bad, 3))
    assert problem in " ".join(find_span_problems(bad, "3", 2, 3))
    assert "without an environment" in " ".join(find_span_problems(respond((0, [], [1]), (0, [], [1])), "3", 0, 3))
    first = respond((0, [], [1]), (-3, [], [2]))
    assert "the first token of a part that follows no token" in " ".join(find_span_problems(first, "3", 2, 3))


def test_a_path_is_all_that_a_part_follows() -> None:
    response = respond((0, [], [1, 2, 3]), (2, [4], [5]), (-2, [6], [7]), (5, [8], [9]), (-3, [1], [2]))
    parts = list_parts(response)
    assert [part.after for part in parts] == [0, 2, -2, 5, -3]
    assert [trace_path(parts, number, 3) for number in range(5)] == [
        [(-3, 0)],
        [(-3, 0), (0, 2)],
        [(-3, -2)],
        [(-3, 0), (0, 2), (3, 5)],
        [],
    ]
