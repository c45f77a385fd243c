"""Packs: the place of each token, and the row that predicts it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.trainer.data.packing import pack_groups, pack_sequences, pack_turns

tokens = st.lists(st.integers(0, 99), max_size=5)
groups = st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), max_size=4)


@given(groups, st.integers(1, 6))
def test_every_token_is_placed_once_and_padding_makes_the_length_a_multiple(drawn, multiple: int) -> None:
    pack = pack_groups(drawn, multiple, padding_token=100)
    flat = [token for prompt, responses in drawn for segment in (prompt, *responses) for token in segment]
    assert pack.tokens_T.tolist()[: len(flat)] == flat
    assert set(pack.tokens_T.tolist()[len(flat) :]) <= {100}
    assert pack.num_tokens == len(pack.tokens_T) == len(pack.positions_T)
    assert pack.num_tokens % multiple == 0
    assert 0 < pack.num_tokens < len(flat) + multiple + (not flat)


@given(groups)
def test_each_response_token_is_predicted_by_the_row_before_it_in_its_sequence(drawn) -> None:
    pack = pack_groups(drawn)
    visible = pack.layout.visible()
    expected = []
    for number, (prompt, response) in enumerate((p, r) for p, responses in drawn for r in responses):
        sequence = prompt + response
        for index in range(len(prompt), len(sequence)):
            if index > 0:
                expected.append((number, sequence[:index], sequence[index]))
    found = []
    for row, token, number in zip(
        pack.target_rows_N.tolist(), pack.target_tokens_N.tolist(), pack.target_sequences_N.tolist(), strict=True
    ):
        seen = pack.tokens_T[torch.from_numpy(visible[row])].tolist()
        found.append((number, seen, token))
    assert found == expected


@given(st.lists(st.lists(tokens, max_size=6), max_size=4), st.integers(1, 6))
def test_every_second_turn_is_predicted_from_all_before_it_and_nothing_else_is(drawn, multiple: int) -> None:
    pack = pack_turns(drawn, multiple)
    visible = pack.layout.visible()
    expected = []
    for turns in drawn:
        before: list[int] = []
        for number, turn in enumerate(turns):
            for token in turn:
                if number % 2 and before:
                    expected.append((list(before), token))
                before.append(token)
    rows = [pack.tokens_T[torch.from_numpy(visible[row])].tolist() for row in pack.target_rows_N.tolist()]
    assert [*zip(rows, pack.target_tokens_N.tolist(), strict=True)] == expected
    assert pack.num_targets == len(expected)
    assert pack.num_tokens % multiple == 0


def test_a_sequence_without_a_prompt_predicts_all_its_tokens_but_the_first() -> None:
    pack = pack_sequences([[7, 8, 9], [4], []])
    assert pack.target_tokens_N.tolist() == [8, 9]
    assert pack.target_rows_N.tolist() == [0, 1]
    assert pack.positions_T.tolist() == [0, 1, 2, 0]


def test_a_token_outside_the_vocabulary_is_an_error_that_names_it() -> None:
    for token in (-1, 10):
        with pytest.raises(InputError, match=f"token {token} is outside the vocabulary of 10"):
            pack_groups([([1, 2], [[token]])], vocab_size=10)
    assert pack_groups([([1, 2], [[9]])], vocab_size=10).num_tokens == 3


def test_the_padding_is_seen_by_nothing_and_predicts_nothing() -> None:
    pack = pack_groups([([1, 2], [[3], [4, 5]])], multiple_of=8)
    visible = pack.layout.visible()
    assert not visible[:5, 5:].any()
    assert not visible[5:, :5].any()
    assert pack.target_rows_N.max() < 5


@given(groups, st.integers(1, 4))
def test_each_target_belongs_to_the_one_part_that_has_its_row(drawn, num_parts: int) -> None:
    pack = pack_groups(drawn, num_parts)
    divided = pack.divided(num_parts)
    length = pack.num_tokens // num_parts
    for part in range(num_parts):
        places_M = divided.places_of_part(part, num_parts)
        assert pack.places_of_part(part, num_parts).tolist() == places_M.tolist()
        assert all(part * length <= row < (part + 1) * length for row in pack.target_rows_N[places_M].tolist())
    places = [place for places_M in divided.places_of_parts for place in places_M.tolist()]
    assert sorted(places) == list(range(len(pack.target_rows_N)))
