"""The record of a rollout: every token of the policy stands after what it was sampled after, once, in any order."""

import inspect
import random
import sys

import numpy as np
import pytest

from megatron_rl.gateway.record import ConversationRecord, cut_turn
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT, mask_sampled
from tests.turns import make_turn

PROMPT = [1, 2, 3]


def turn(tokens: list[int], engine: str = "engine-0", first: float = -1.0, fingerprint: str = "w") -> wire.Response:
    return make_turn(tokens, first, "4", engine=engine, fingerprint=fingerprint)


def build(calls: list[tuple[list[int], wire.Response]]) -> wire.Response:
    record = ConversationRecord(np.asarray(PROMPT, dtype="<i4"), wire.Sampling(max_tokens=1000))
    for prompt, said in calls:
        record.add(np.asarray(prompt, dtype="<i4"), said)
    response = record.build_response(9, "stop", {"agent": 0.5, "other": 0.25})
    # Fewer, if a call happened to begin with what another one sampled only later.
    assert len(response.tokens) // 4 <= record.num_tokens
    return response


def read_chains(response: wire.Response) -> list[list[int]]:
    """Return, for each token of prompt and response, the places of the tokens that it follows, by definition."""
    starts = {branch.start + len(PROMPT): branch.after + len(PROMPT) for branch in response.branches}
    chains: list[list[int]] = []
    for place in range(len(PROMPT) + len(response.tokens) // 4):
        before = starts.get(place, place)
        chains.append([*chains[before - 1], before - 1] if before else [])
    return chains


def list_sampled(response: wire.Response) -> list[tuple]:
    """List what was sampled: the tokens before, the token and its log-prob."""
    tokens = [*PROMPT, *wire.decode_tokens(response.tokens).tolist()]
    log_probs = wire.decode_log_probs(response.log_probs).tolist()
    found = []
    for place, chain in enumerate(read_chains(response)):
        if place >= len(PROMPT) and mask_sampled(response)[place - len(PROMPT)]:
            found.append((tuple(tokens[one] for one in chain), tokens[place], log_probs[place - len(PROMPT)]))
    return sorted(found)


def list_asked(calls: list[tuple[list[int], wire.Response]]) -> list[tuple]:
    """List what the calls sampled, in the same form."""
    found = []
    for prompt, said in calls:
        tokens = wire.decode_tokens(said.tokens).tolist()
        for place, log_prob in enumerate(wire.decode_log_probs(said.log_probs).tolist()):
            found.append((tuple(prompt + tokens[:place]), tokens[place], log_prob))
    return sorted(found)


def draw_calls(seed: int) -> list[tuple[list[int], wire.Response]]:
    """Draw calls that extend earlier ones, part from them somewhere, repeat them, or leave the group's prompt."""
    draw = random.Random(seed)
    calls: list[tuple[list[int], wire.Response]] = []
    for number in range(draw.randint(1, 7)):
        path = PROMPT
        if calls:
            prompt, said = draw.choice(calls)
            path = prompt + wire.decode_tokens(said.tokens).tolist()
        kept = len(path) if draw.random() < 0.5 else draw.randint(0, len(path))
        prompt = path[:kept] + [draw.randrange(3) for _ in range(draw.randint(0, 3))]
        tokens = [draw.randrange(3) for _ in range(draw.randint(1, 3))]
        calls.append((prompt, turn(tokens, f"engine-{draw.randrange(2)}", first=-1.0 - number)))
    return calls


@pytest.mark.parametrize("seed", range(60))
def test_each_sampled_token_stands_once_after_what_it_was_sampled_after(seed: int) -> None:
    calls = draw_calls(seed)
    response = build(calls)
    assert list_sampled(response) == list_asked(calls)
    # Each part of the response ends with a token of the policy, and no span reaches over the start of one.
    ends = [branch.start for branch in response.branches if branch.start]
    assert all(mask_sampled(response)[end - 1] for end in [*ends, len(response.tokens) // 4])
    assert [branch.start for branch in response.branches] == sorted(branch.start for branch in response.branches)
    assert not any(span.start < end < span.end for span in response.spans for end in ends)
    assert [span.start for span in response.spans] == [0, *(span.end for span in response.spans[:-1])]


@pytest.mark.parametrize("seed", range(20))
def test_calls_that_arrive_in_another_order_give_the_same_response(seed: int) -> None:
    draw = random.Random(seed)
    first = ([*PROMPT, 7, 8], turn([5, 6]))
    later = [(PROMPT + [7, 8, 5, 6] + [draw.randrange(2) for _ in range(3)], turn([4], first=-3.0)) for _ in range(3)]
    others = [([*PROMPT, 7, draw.randrange(2)], turn([3, 3], first=-5.0 - place)) for place in range(2)]
    calls = [first, *later, *others]
    shuffled = draw.sample(calls, len(calls))
    # An answer is known before it is extended.
    shuffled.sort(key=lambda call: call in later)
    assert build(calls) == build(shuffled)


def test_a_chain_of_calls_has_no_branches_and_shared_tokens_stand_once() -> None:
    chain = [([*PROMPT, 9], turn([5, 6], "engine-1")), ([*PROMPT, 9, 5, 6, 8, 8], turn([4]))]
    response = build(chain)
    assert wire.decode_tokens(response.tokens).tolist() == [9, 5, 6, 8, 8, 4]
    assert not response.branches
    assert wire.decode_log_probs(response.log_probs).tolist() == [0, -1, -2, 0, 0, -1]
    assert [(span.version, span.engine) for span in response.spans] == [
        (ENVIRONMENT, ""), ("4", "engine-1"), (ENVIRONMENT, ""), ("4", ""),
    ]  # fmt: skip
    assert (response.engine, response.seed, response.reward) == ("engine-0", 9, 0.75)
    assert response.components == {"agent": 0.5, "other": 0.25}
    rewritten = build([*chain, ([*PROMPT, 9, 5, 7], turn([3]))])
    assert wire.decode_tokens(rewritten.tokens).tolist() == [9, 5, 6, 8, 8, 4, 7, 3]
    assert rewritten.branches == [wire.Branch(start=6, after=2)]
    # Another chat than the group's prompt.
    assert build([([1, 5], turn([3]))]).branches == [wire.Branch(start=0, after=-2)]


def test_a_rollout_may_have_more_turns_than_calls_may_be_nested() -> None:
    limit = sys.getrecursionlimit()
    path, chain = PROMPT, []
    for number in range(300):
        path = [*path, 5 + number % 3]
        chain.append((path, turn([9])))
        path = [*path, 9]
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 100)
        response = build(chain)
    finally:
        sys.setrecursionlimit(limit)
    assert [*PROMPT, *wire.decode_tokens(response.tokens).tolist()] == path
    assert not response.branches


def test_a_call_that_leaves_the_path_early_shares_nothing_with_what_follows_later() -> None:
    long = [*PROMPT, 9, 9, 9, 9]
    branch = ([*long[:4], 8], turn([7, 7]))
    after_branch = ([*long[:4], 8, 7, 7, 6], turn([5]))
    again = ([*long, 6], turn([4]))
    calls = [(long, turn([1])), branch, after_branch, again]
    assert list_sampled(build(calls)) == list_asked(calls)
    assert list_sampled(build(calls[:2] + calls[3:])) == list_asked(calls[:2] + calls[3:])


def test_a_turn_under_other_weights_makes_the_response_one() -> None:
    calls = [(PROMPT, turn([5], fingerprint="old")), ([*PROMPT, 5, 9], turn([6]))]
    assert build(calls).fingerprint == "old"


def test_a_turn_is_cut_with_its_log_probs_and_spans() -> None:
    said = turn([5, 6, 7])
    assert cut_turn(said, 3) is said
    short = cut_turn(said, 2)
    assert wire.decode_tokens(short.tokens).tolist() == [5, 6]
    assert wire.decode_log_probs(short.log_probs).tolist() == [-1, -2]
    assert (short.finish_reason, short.spans[-1].end) == ("length", 2)
