"""Demonstrations: the tokens of a row that are trained on, the rows that are refused, and the order of rows."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.command_line.file_checks import find_data_problems
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.protocol import wire
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource, load_demonstrations
from megatron_rl.trainer.data.prompts import load_prompts
from tests.chat_models import (
    ASSISTANT,
    BEHIND,
    BOS,
    END,
    NUM_WORDS,
    SYSTEM,
    UNKNOWN,
    USER,
    n,
    save_words,
    write_rows,
)  # fmt: skip

# As in the templates of released models, text follows the end of a message.
TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ CONTENT }}<|end|> # {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WHOLE = TEMPLATE.replace("CONTENT", "m['content']")
# The thoughts before an answer are left out once more messages follow.
FORGETFUL = TEMPLATE.replace("CONTENT", "m['content'] if loop.last else m['content'].split('so')[-1]")
OPENED = WHOLE.replace("<|assistant|>{% endif %}", "<|assistant|> n99 {% endif %}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("model"), WHOLE)


def load(model: Path, *paths: Path, longest: int = 90, seed: int = 3, **values: Any) -> DemonstrationSource:
    config = dataclasses.replace(DataConfig(prompts=list(paths), shuffle=False), **values)
    return load_demonstrations(config, model, seed=seed, longest=longest, vocab_size=NUM_WORDS)


def chat(*contents: str, first: str = "user") -> list[dict[str, str]]:
    """Build messages of user and assistant in turn."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[number % 2], "content": f" {content} "} for number, content in enumerate(contents)]


def turns_of(model: Path, folder: Path, row: Any, **values: Any) -> list[list[list[int]]]:
    """Return the turns of a row's sequences."""
    (one,) = load(model, write_rows(folder / "a.jsonl", row), **values).take(1)
    return [[turn.tolist() for turn in turns] for turns in one.sequences]


# Which tokens are trained on.


def test_every_answer_of_a_chat_is_trained_on_up_to_its_end_and_the_rest_is_given(model, tmp_path):
    row = {"messages": [{"role": "system", "content": " n9 "}, *chat("n1", "n2 n3", "n4", "n5")]}
    assert turns_of(model, tmp_path, row) == [
        [
            [BOS, SYSTEM, *n(9), END, BEHIND, USER, *n(1), END, BEHIND, ASSISTANT],
            [*n(2, 3), END],
            [BEHIND, USER, *n(4), END, BEHIND, ASSISTANT],
            [*n(5), END],
        ]
    ]


def test_an_answer_whose_beginning_the_template_writes_otherwise_has_a_sequence_of_its_own(tmp_path):
    """Use a template that leaves the thoughts out of all answers but the last."""
    model = save_words(tmp_path, FORGETFUL)
    row = {"messages": chat("n1", "n2 so n3", "n4", "n5 so n6", "n7", "n8")}
    first = [[BOS, USER, *n(1), END, BEHIND, ASSISTANT], [*n(2), UNKNOWN, *n(3), END]]
    short = [BOS, USER, *n(1), END, BEHIND, ASSISTANT, *n(3), END, BEHIND, USER, *n(4), END, BEHIND, ASSISTANT]
    second = [short, [*n(5), UNKNOWN, *n(6), END]]
    third = [[*short, *n(6), END, BEHIND, USER, *n(7), END, BEHIND, ASSISTANT], [*n(8), END]]
    assert turns_of(model, tmp_path, row) == [first, second, third]


def test_a_completion_follows_its_prompts_tokens_and_ends(model, tmp_path):
    """Check that neither reaches into the other's words."""
    assert turns_of(model, tmp_path, {"prompt": "n1 n2", "completion": "n3"}) == [[[BOS, *n(1, 2)], [*n(3), END]]]
    ended = {"prompt": "n1", "completion": "n3 <|end|>"}
    assert turns_of(model, tmp_path, ended) == [[[BOS, *n(1)], [*n(3), END]]]


@pytest.mark.parametrize(("row", "flags"), [
    ({"prompt": " n1 ", "completion": " n2 "}, {"chat": True}),
    ({"prompt": chat("n1"), "completion": " n2 "}, {}),
    ({"prompt": chat("n1"), "completion": chat("n2", first="assistant")}, {}),
    ({"messages": chat("n1", "n2")}, {}),
    ({"talk": chat("n1", "n2"), "messages": 5, "completion": 5}, {"messages_key": "talk", "completion_key": "none"}),
    ({"question": chat("n1"), "answer": " n2 "}, {"prompt_key": "question", "completion_key": "answer"}),
])  # fmt: skip
def test_a_chat_is_the_same_in_whichever_columns_it_is_written(model, tmp_path, row, flags):
    expected = [[[BOS, USER, *n(1), END, BEHIND, ASSISTANT], [*n(2), END]]]
    assert turns_of(model, tmp_path, row, **flags) == expected


def test_answers_in_a_prompt_are_given_and_those_in_a_completion_are_trained_on(model, tmp_path):
    row = {"prompt": chat("n1", "n2", "n3"), "completion": chat("n4", "n5", "n6", first="assistant")}
    (turns,) = turns_of(model, tmp_path, row)
    assert turns[1::2] == [[*n(4), END], [*n(6), END]]
    assert turns[0][-4:] == [*n(3), END, BEHIND, ASSISTANT]


def test_the_flags_system_message_stands_before_a_chat(model, tmp_path):
    (turns,) = turns_of(model, tmp_path, {"messages": chat("n1", "n2")}, system_message=" n9 ")
    assert turns[0][:4] == [BOS, SYSTEM, *n(9), END]


def test_every_answer_follows_the_tokens_of_the_prompt_that_it_would_be_sampled_to(tmp_path):
    talk = chat("n1", "n2 so n3", "n4", "n5 so n6", "n7", "n8")
    for name, template in (("whole", WHOLE), ("forgetful", FORGETFUL)):
        model = save_words(tmp_path / name, template)
        found = []
        for turns in turns_of(model, tmp_path, {"messages": talk}):
            for place in range(1, len(turns), 2):
                found.append([token for turn in turns[:place] for token in turn])
        prompts = write_rows(tmp_path / "prompts.jsonl", *({"prompt": talk[:end]} for end in (1, 3, 5)))
        config = DataConfig(prompts=[prompts], shuffle=False)
        sampled = load_prompts(config, model, seed=0, longest=100, vocab_size=NUM_WORDS).take(3)
        assert found == [wire.decode_tokens(prompt.tokens).tolist() for prompt in sampled], name


# Rows that are refused.


@pytest.mark.parametrize(("row", "said"), [
    ({"text": "n1"}, "has no column completion (it has text); name it with --completion-key, or a chat's with"),
    ({"completion": "n1"}, "has no column prompt (it has completion); name the prompt's with --prompt-key"),
    ({"messages": chat("n1", "n2"), "completion": "n2"}, "has columns messages and completion, and must have one"),
    ({"messages": "n1"}, "has text as its chat; write a list of messages"),
    ({"messages": []}, "has a chat without a message"),
    ({"messages": chat("n1")}, "has no message of the assistant in its chat; write one, or leave the row out"),
    ({"messages": [{"role": "user"}]}, "has null where message 1 of its chat needs text as its content"),
    ({"messages": [*chat("n1", "n2"), "n3"]}, "has text where message 3 of its chat needs text as its role"),
    ({"messages": [{"role": "tool", "content": "n1"}, *chat("n1", "n2")]}, "the chat template refuses"),
    ({"prompt": "n1", "completion": 5}, "has a number as its completion; write text, or a list of chat messages"),
    ({"prompt": "n1", "completion": ""}, "has an empty completion"),
    ({"prompt": "n1", "completion": chat("n1", first="assistant")}, "has a chat that follows plain text; add"),
    ({"prompt": chat("n1"), "completion": chat("n2")}, "has no message of the assistant in its completion"),
    ([1], "is a list, not an object"),
    (b"{", "is not JSON"),
])  # fmt: skip
def test_a_row_that_is_not_a_demonstration_is_refused_by_file_and_line(model, tmp_path, row, said):
    path = write_rows(tmp_path / "bad.jsonl", {"messages": chat("n1", "n2")}, b"", row)
    with pytest.raises(InputError) as raised:
        load(model, path)
    # The remedy for a missing column is a flag only in the first row.
    said = said if not isinstance(row, dict) or said.count(";") == 0 else said.partition(";")[0]
    assert f"{path}:3 {said}" in str(raised.value).replace("is a chat that the chat", "the chat")


def test_a_missing_column_of_the_first_row_is_an_error_of_the_flag(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"text": "n1"})
    with pytest.raises(InputError, match="name it with --completion-key, or a chat's with --messages-key"):
        load(model, path)


def test_a_chat_that_does_not_begin_as_the_template_opens_it_is_refused(tmp_path):
    model = save_words(tmp_path, OPENED)
    path = write_rows(tmp_path / "a.jsonl", {"messages": chat("n1", "n2")})
    with pytest.raises(
        InputError, match="a.jsonl:1 is a chat whose message 2 does not begin as the chat template opens"
    ):
        load(model, path)
    assert turns_of(model, tmp_path, {"messages": chat("n1", "n99 n2")})[0][1] == [*n(2), END]


def test_keys_that_name_one_column_are_refused(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"messages": chat("n1", "n2")})
    (said,) = find_data_problems(DataConfig(prompts=[path], prompt_key="completion"), "sft")
    assert said == "--prompt-key and --completion-key are both completion: they must name two columns"


# The rows that are left out, and the order.


def test_demonstrations_that_are_too_long_are_left_out_and_counted(model, tmp_path):
    rows = [{"prompt": "n1", "completion": " ".join(["n1"] * length)} for length in range(1, 9)]
    loaded = load(model, write_rows(tmp_path / "a.jsonl", *rows), longest=6)
    assert [one.num_tokens for one in loaded.take(3)] == [4, 5, 6]
    assert loaded.num_rows == 3
    assert loaded.notes == ("5 of 8 demonstrations of --prompts are longer than --seq-length 6 and left out",)
    with pytest.raises(InputError, match="all 8 demonstrations are longer than --seq-length 3"):
        load(model, tmp_path / "a.jsonl", longest=3)


def test_demonstrations_of_a_held_out_prompt_are_not_trained_on(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", *({"prompt": f"n{i // 2}", "completion": f"n{i}"} for i in range(20)))
    loaded = load(model, path, held_out=3)
    held_out = {one.tokens for one in loaded.held_out()}
    assert loaded.num_held_out == 3
    assert held_out.isdisjoint(one.tokens for one in loaded.take(loaded.num_rows))
    assert loaded.num_rows == 20 - 2 * len(held_out)


def draw_source(num_rows: int, num_given: int = 1) -> DemonstrationSource:
    tokens = [np.arange(row, row + 3, dtype=np.int32) for row in range(num_rows)]
    rows = [Demonstration(f"a:{row}", ((one[:num_given], one[num_given:]),)) for row, one in enumerate(tokens)]
    return DemonstrationSource(rows, seed=5)


@given(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=6), st.integers(0, 9))
def test_a_restored_source_continues_as_one_that_never_stopped(num_rows: int, counts: list[int], more: int) -> None:
    source, resumed = draw_source(num_rows), draw_source(num_rows)
    taken = [one.row for count in counts for one in source.take(count)]
    assert all(taken.count(f"a:{row}") >= len(taken) // num_rows for row in range(num_rows))
    resumed.restore(json.loads(json.dumps(source.state())))
    assert [one.row for one in resumed.take(more)] == [one.row for one in source.take(more)]


def test_a_place_in_rows_whose_answers_begin_elsewhere_is_refused():
    with pytest.raises(InputError, match="the checkpoint was trained with other prompts"):
        draw_source(4, num_given=2).restore(draw_source(4).state())
