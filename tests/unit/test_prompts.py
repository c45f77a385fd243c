"""The prompts of a run: files, tokens, filters, order, held-out split, and the place from which a run resumes."""

import dataclasses
import datetime
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_rl.command_line.file_checks import find_data_problems
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError, PlatformError, UsageError
from megatron_rl.shared.protocol import wire
from megatron_rl.trainer.data.order import Curriculum, RowOrder
from megatron_rl.trainer.data.prompts import PromptSource, load_prompts, read_prompts, tokenize_prompts
from tests import chat_models, hf_models
from tests import reward_pools as rewards
from tests.chat_models import ASSISTANT, BOS, END, NUM_WORDS, SYSTEM, USER, n, save_words, write_rows

TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("model"), TEMPLATE)


def load(
    model: Path, *paths: Path, longest: int = 50, seed: int = 3, vocab_size: int = NUM_WORDS, **values: Any
) -> PromptSource:
    config = DataConfig(prompts=list(paths), **values)
    return load_prompts(config, model, seed=seed, longest=longest, vocab_size=vocab_size)


def rows_of(prompts: list[wire.Prompt]) -> list[str]:
    return [prompt.row for prompt in prompts]


def source(num_rows: int, seed: int = 0, shuffle: bool = True, first_token: int = 0) -> PromptSource:
    prompts = [
        wire.Prompt(index=0, row=f"a.jsonl:{line}", tokens=wire.encode_tokens([first_token, line]), text=str(line))
        for line in range(1, num_rows + 1)
    ]
    return PromptSource(prompts, seed=seed, shuffle=shuffle)


# The prompt that a row becomes.


CHAT = [{"role": "user", "content": " n1 "}]
DEEP = {"a": [None, 1.5]}


@pytest.mark.parametrize(
    ("row", "flags", "text", "tokens", "columns"),
    [
        ({"prompt": "n1 n2", "answer": 5, "deep": DEEP}, {}, "n1 n2", [BOS, *n(1, 2)], {"answer": 5, "deep": DEEP}),
        # The template has the start token, and the tokenizer adds no second one.
        ({"prompt": CHAT}, {}, CHAT, [BOS, USER, *n(1), END, ASSISTANT], {}),
        (
            {"prompt": " n1 "},
            {"chat": True, "system_message": " n9 "},
            [{"role": "system", "content": " n9 "}, *CHAT],
            [BOS, SYSTEM, *n(9), END, USER, *n(1), END, ASSISTANT],
            {},
        ),
        (
            {"question": "n1", "solution": "x", "prompt": "kept"},
            {"prompt_key": "question", "answer_key": "solution"},
            "n1",
            [BOS, *n(1)],
            {"answer": "x", "prompt": "kept"},
        ),
    ],
    ids=["text", "chat", "flags of chats", "keys"],
)
def test_a_row_becomes_tokens_and_its_other_columns_reach_the_rewards(
    model, tmp_path, row, flags, text, tokens, columns
):
    [prompt] = load(model, write_rows(tmp_path / "a.jsonl", row), **flags).take(1)
    expected = wire.encode_tokens(tokens)
    assert prompt == wire.Prompt(index=0, row="a.jsonl:1", tokens=expected, text=text, columns=columns)
    assert wire.decode(wire.encode(prompt), wire.Prompt) == prompt


def test_text_and_chats_may_be_mixed_and_keep_their_order(model, tmp_path):
    rows = [{"prompt": f" n{i} " if i % 3 else [{"role": "user", "content": f" n{i} "}]} for i in range(10)]
    prompts = load(model, write_rows(tmp_path / "a.jsonl", *rows), shuffle=False).take(10)
    expected = [[BOS, *n(i)] if i % 3 else [BOS, USER, *n(i), END, ASSISTANT] for i in range(10)]
    assert [wire.decode_tokens(prompt.tokens).tolist() for prompt in prompts] == expected


@pytest.mark.parametrize("form", [list, json.dumps])
def test_tools_of_a_row_are_in_its_prompt_as_the_template_writes_them(tmp_path, form: Callable[[Any], Any]) -> None:
    folder = chat_models.save_tokenizer(tmp_path / "model", chat_models.HERMES, "<|im_end|>")
    messages = [{"role": "user", "content": "two?"}]
    rows = [{"prompt": messages, "tools": form(TOOLS)}, {"prompt": messages, "tools": None}]
    prompts = load(folder, write_rows(tmp_path / "a.jsonl", *rows), shuffle=False, longest=5000, vocab_size=5000).take(
        2
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, tools in zip(prompts, (TOOLS, None), strict=True):
        expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        assert wire.decode_tokens(prompt.tokens).tolist() == expected
    assert prompts[0].columns["tools"] == form(TOOLS)
    # Text without a chat is the whole prompt.
    plain = load(folder, write_rows(tmp_path / "b.jsonl", {"prompt": "two?", "tools": TOOLS}), vocab_size=5000).take(1)[
        0
    ]
    assert wire.decode_tokens(plain.tokens).tolist() == tokenizer("two?")["input_ids"]


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        ("HERMES", "hammer", "a.jsonl:1 has a column tools that is not OpenAI's list of functions"),
        ("HERMES", [{"name": "add"}], "that is not OpenAI's list of functions"),
        ("HERMES", {"type": "function"}, "that is not OpenAI's list of functions"),
        ("PLAIN", TOOLS, "the chat template writes no tools; rename the column"),
    ],
)
def test_tools_that_a_prompt_cannot_have_are_refused_with_their_row(tmp_path, template, tools, message) -> None:
    folder = chat_models.save_tokenizer(tmp_path / "model", getattr(chat_models, template), "<|im_end|>")
    path = write_rows(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "two?"}], "tools": tools})
    with pytest.raises(InputError, match=re.escape(message)):
        load(folder, path, longest=5000, vocab_size=5000)


def test_the_most_deeply_nested_column_that_is_allowed_reaches_a_reward(model, tmp_path):
    [prompt] = load(model, write_rows(tmp_path / "a.jsonl", {"prompt": "n1", "answer": nested(100)})).take(1)
    assert wire.decode(wire.encode(prompt), wire.Prompt).columns == {"answer": nested(100)}
    reward = rewards.write(tmp_path, "def fn(answer, **columns): return [float(str(answer).count('7'))] * 2")
    [result] = rewards.score([f"{reward}:fn"], rewards.request(**prompt.columns))
    assert result.rewards == [2.0, 2.0]


def test_parquet_rows_are_those_of_jsonl(model, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": [{"role": "user", "content": f" n{i} "}], "answer": i, "deep": {"a": [1, None]}, "flag": i % 2 == 0}
        for i in range(20)
    ]
    written = write_rows(tmp_path / "a.jsonl", *rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    ours = load(model, tmp_path / "a.parquet", shuffle=False).take(20)
    theirs = load(model, written, shuffle=False).take(20)
    assert rows_of(ours) == [f"a.parquet:{line}" for line in range(1, 21)]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.tokens, mine.text, mine.columns) == (other.tokens, other.text, other.columns)


def test_files_come_in_the_order_given_and_blank_lines_count_as_lines(model, tmp_path):
    first = write_rows(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + b'{"prompt": "n1"}', b"", {"prompt": "n2"}, b"  ")
    second = write_rows(tmp_path / "a.jsonl", {"prompt": "n3 \u2028 n4"})
    prompts = load(model, first, second, shuffle=False).take(3)
    assert rows_of(prompts) == ["b.jsonl:1", "b.jsonl:3", "a.jsonl:1"]


def test_files_of_one_name_are_told_apart_by_their_folders(model, tmp_path):
    paths = []
    for name in ("easy", "hard"):
        (tmp_path / name).mkdir()
        paths.append(write_rows(tmp_path / name / "train.jsonl", {"prompt": f"n{len(paths)}"}))
    assert rows_of(load(model, *paths, shuffle=False).take(2)) == ["easy/train.jsonl:1", "hard/train.jsonl:1"]


def test_a_file_whose_name_is_not_utf_8_is_used_like_any_other(model, tmp_path):
    path = write_rows(tmp_path / os.fsdecode(b"tr\xff.jsonl"), {"prompt": "n1"}, {"prompt": "n2"}, {"prompt": 5})
    with pytest.raises(InputError, match=r"jsonl:3 has a number as its prompt"):
        load(model, path)
    loaded = load(model, write_rows(path, {"prompt": "n1"}, {"prompt": "n2"}), held_out=1)
    prompts = [*loaded.take(1), *loaded.held_out()]
    assert sorted(rows_of(prompts)) == [r"tr\xff.jsonl:1", r"tr\xff.jsonl:2"]
    assert [wire.decode(wire.encode(prompt), wire.Prompt) for prompt in prompts] == prompts


# Filters and the held-out split.


def test_prompts_above_the_limit_are_left_out_and_counted(model, tmp_path):
    rows = [{"prompt": " ".join(["n1"] * length)} for length in range(1, 9)]
    loaded = load(model, write_rows(tmp_path / "a.jsonl", *rows), max_prompt_tokens=6, shuffle=False)
    assert loaded.num_rows == 5
    assert loaded.notes == ("3 of 8 prompts are longer than 6 tokens and left out",)
    assert rows_of(loaded.take(5)) == [f"a.jsonl:{line}" for line in range(1, 6)]


def test_a_prompt_that_just_leaves_room_is_taken(model, tmp_path):
    assert load(model, write_rows(tmp_path / "a.jsonl", {"prompt": "n1 n2"}), longest=3).notes == ()


def test_held_out_prompts_are_never_taken_and_follow_from_the_seed_alone(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", *[{"prompt": f"n{i}"} for i in range(40)])
    loaded = load(model, path, held_out=10)
    held_out = loaded.held_out()
    assert [prompt.index for prompt in held_out] == list(range(10))
    taken = set(rows_of(loaded.take(30)))
    assert len(taken) == 30
    assert taken.isdisjoint(rows_of(held_out))
    assert loaded.held_out(4) == held_out[:4] == load(model, path, held_out=10, shuffle=False).held_out(4)
    assert load(model, path, held_out=4).held_out() == held_out[:4]
    assert set(rows_of(load(model, path, held_out=10, seed=4).held_out())) != set(rows_of(held_out))


def test_a_prompt_that_is_the_same_as_a_held_out_one_is_not_trained_on(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", *[{"prompt": f"n{i % 10}"} for i in range(20)])
    loaded = load(model, path, held_out=3)
    held_out = {prompt.tokens for prompt in loaded.held_out()}
    assert held_out.isdisjoint(prompt.tokens for prompt in loaded.take(loaded.num_rows))
    assert loaded.num_rows == 20 - 2 * len(held_out)
    assert loaded.num_held_out == 3
    num_same = 2 * len(held_out) - 3
    assert loaded.notes[0].startswith(f"{num_same} of 20 prompts ")
    assert loaded.notes[0].endswith("the same as held-out ones and left out")


def test_files_that_are_only_evaluated_keep_their_order_and_have_filters_of_their_own(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", *[{"prompt": f"n{i}"} for i in range(9)])
    evaluated = write_rows(tmp_path / "e.jsonl", {"prompt": "n50"}, {"prompt": "n1 n1 n1"}, {"prompt": "n4"})
    loaded = load(model, path, eval_prompts=[evaluated], max_prompt_tokens=2)
    assert rows_of(loaded.held_out()) == ["e.jsonl:1", "e.jsonl:3"]
    assert loaded.notes == (
        "1 of 3 prompts of --eval-prompts is longer than 2 tokens and left out",
        "1 of 9 prompts is the same as held-out ones and left out",
    )
    assert "a.jsonl:5" not in rows_of(loaded.take(loaded.num_rows))


# The order, and a run that resumes from a place in it.


@given(num_rows=st.integers(1, 12), seed=st.integers(0, 2**64), takes=st.lists(st.integers(0, 9), max_size=12))
def test_each_epoch_has_every_row_once_whatever_the_takes(num_rows, seed, takes):
    ours = source(num_rows, seed)
    rows = []
    for count in takes:
        prompts = ours.take(count)
        assert [prompt.index for prompt in prompts] == list(range(count))
        rows += rows_of(prompts)
    assert rows == rows_of(source(num_rows, seed).take(sum(takes)))
    rows += rows_of(ours.take(-len(rows) % num_rows))
    for start in range(0, len(rows), num_rows):
        assert len(set(rows[start : start + num_rows])) == num_rows


@given(
    num_rows=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    before=st.lists(st.integers(0, 9), max_size=6),
    after=st.lists(st.integers(0, 9), max_size=6),
    shuffle=st.booleans(),
)
def test_a_restored_source_equals_one_that_was_never_stopped(num_rows, seed, before, after, shuffle):
    never_stopped, stopped = (source(num_rows, seed, shuffle) for _ in range(2))
    never_stopped.take(sum(before))
    for count in before:
        stopped.take(count)
    restored = source(num_rows, seed, shuffle)
    restored.restore(json.loads(json.dumps(stopped.state())))
    assert [never_stopped.take(count) for count in after] == [restored.take(count) for count in after]
    assert never_stopped.state() == restored.state()


def test_epochs_and_seeds_have_orders_of_their_own():
    ours = source(50)
    first, second = rows_of(ours.take(50)), rows_of(ours.take(50))
    assert ours.epochs == 2
    in_order = rows_of(source(50, shuffle=False).take(50))
    assert in_order == [f"a.jsonl:{line}" for line in range(1, 51)]
    orders = [first, second, in_order, rows_of(source(50, seed=1).take(50))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_the_order_is_the_same_in_years_to_come():
    """Compare with a constant: a checkpoint outlives the libraries that it was written with."""
    ours = source(8, seed=7)
    assert [int(prompt.text) for prompt in ours.take(16)] == [3, 5, 4, 1, 7, 6, 8, 2, 7, 3, 1, 2, 4, 6, 5, 8]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_rows": 9}, "other prompts (9 rows"),
        ({"first_token": 1}, "other prompts (8 rows"),
        ({"seed": 1}, "seed 1 (now 0): give --seed 1"),
        ({"shuffle": False}, "prompts in the files' order: give --no-shuffle-prompts"),
    ],
)
def test_a_saved_place_in_other_prompts_is_refused_and_the_difference_named(other, message):
    saved = source(**{"num_rows": 8, **other})
    saved.take(5)
    ours = source(8)
    with pytest.raises(InputError, match=re.escape(message)):
        ours.restore(saved.state())
    assert ours.state()["num_taken"] == 0


@pytest.mark.parametrize("change", [{"num_taken": "x"}, {"num_taken": -1}, {"more": 1}, None])
def test_a_malformed_saved_place_is_refused(change):
    state = None if change is None else source(3).state() | change
    with pytest.raises(InputError, match="checkpoint"):
        source(3).restore(state)


# Files and rows that cannot be used.

GOOD = {"prompt": "n1"}


def nested(depth: int) -> Any:
    value: Any = 7
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([], {}, "a.jsonl holds no row"),
        ([b"", b" "], {}, "a.jsonl holds no row"),
        ([GOOD, b'{"prompt": '], {}, "a.jsonl:2 is not JSON"),
        ([GOOD, b'{"prompt": "\xff"}'], {}, "a.jsonl:2 is not JSON"),
        ([GOOD, b'{"prompt": "n1", "score": NaN}'], {}, "a.jsonl:2 is not JSON"),
        ([GOOD, b"[" * 100000], {}, "a.jsonl:2 is not JSON"),
        ([GOOD, ["n1"]], {}, "a.jsonl:2 is a list, not an object"),
        ([GOOD, {"promt": "n1"}], {}, "a.jsonl:2 has no column prompt (the nearest is promt); correct the row"),
        ([{"q": "n1", "a": 1}], {}, "a.jsonl:1 has no column prompt (it has q, a)"),
        ([GOOD, {"prompt": 5}], {}, "a.jsonl:2 has a number as its prompt"),
        ([{"prompt": None}], {}, "a.jsonl:1 has null as its prompt"),
        ([GOOD, {"prompt": ""}], {}, "a.jsonl:2 has an empty prompt"),
        ([{"prompt": []}], {}, "a.jsonl:1 has a prompt without a message"),
        ([{"prompt": ["n1"]}], {}, "a.jsonl:1 has text where message 1 of its prompt needs text as its role"),
        ([{"prompt": [{"role": "user"}]}], {}, "has null where message 1 of its prompt needs text as its content"),
        ([{"prompt": [{"role": "tool", "content": "x"}]}], {}, "a.jsonl:1 is a chat that the chat template refuses"),
        ([GOOD, {"prompt": "n1 n2 n3 n4 n5"}], {"longest": 5},
         "a.jsonl:2 has a prompt of 6 tokens, and more than 5 leave no room for a response; leave longer ones out with "
         "--max-prompt-tokens 5"),
        ([GOOD], {"max_prompt_tokens": 1}, "--prompts: all 1 prompts are longer than 1 tokens; raise"),
        ([GOOD, {"prompt": "n2"}], {"held_out": 2}, "--prompts-held-out 2 of 2 prompts leaves none to train on"),
        ([GOOD, GOOD], {"held_out": 1}, "--prompts-held-out 1 of 2 prompts leaves none to train on"),
        ([{**GOOD, "b": 1, "solutoin": 2}], {"answer_key": "solution"},
         "a.jsonl:1 has no column solution (the nearest is solutoin), which --answer-key names"),
        ([{**GOOD, "answer": 1, "solution": 2}], {"answer_key": "solution"}, "has columns answer and solution, and"),
        ([{**GOOD, "completions": 1}], {}, "a.jsonl:1 has a column completions, and rewards get their own completions"),
        ([{**GOOD, "id": 2**64}], {}, "a.jsonl:1 holds 18446744073709551616, which has more than 64 bits, in"),
        ([GOOD, {**GOOD, "tree": nested(101)}], {},
         "a.jsonl:2 holds lists and objects that are nested more than 100 deep in column tree; write it as text"),
        ([GOOD, {**GOOD, "tree": nested(350)}], {}, "a.jsonl:2 holds lists and objects that are nested more than 100"),
        ([GOOD], {"system_message": "n1"}, "a.jsonl:1 has plain text as its prompt, and --prompt-system-message is"),
        ([{"prompt": [{"role": "system", "content": "n1"}]}], {"system_message": "n1"},
         "a.jsonl:1 has a system message of its own; leave out --prompt-system-message"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_error_with_file_and_line(model, tmp_path, rows, values, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(model, write_rows(tmp_path / "a.jsonl", *rows), **values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", None, "a.jsonl cannot be read: No such file or directory"),
        ("a.parquet", None, "a.parquet cannot be read: "),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1 and nothing"), "a.parquet cannot be read as Parquet"),
        ("a.parquet", Path.touch, "a.parquet cannot be read as Parquet"),
        ("a.jsonl", lambda path: path.symlink_to(path), "a.jsonl cannot be read: Too many levels of symbolic links"),
    ],
)
def test_a_prompt_file_that_cannot_be_read_is_one_error_wherever_it_is_named(model, tmp_path, name, make, message):
    path, good = tmp_path / name, write_rows(tmp_path / "good.jsonl", GOOD)
    if make is not None:
        make(path)
    for paths, others in (([path], {}), ([good], {"eval_prompts": [path]})):
        with pytest.raises(InputError, match=re.escape(message)) as caught:
            load(model, *paths, **others)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([b"x"], "holds a bytes value, which JSON does not have, in column extra"),
        ([datetime.date(2026, 1, 1)], "holds a date value, which JSON does not have, in column extra"),
        ([float("nan")], "holds nan, which JSON has no number for, in column extra"),
        ([{"a": [float("inf")]}], "holds inf, which JSON has no number for, in column extra"),
    ],
)
def test_parquet_values_that_json_cannot_hold_are_refused(model, tmp_path, column, message):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["n1"], "extra": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=re.escape(f"a.parquet:1 {message}")):
        load(model, tmp_path / "a.parquet")


def test_parquet_without_pyarrow_names_the_package(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(PlatformError, match="pip install pyarrow"):
        load(model, write_rows(tmp_path / "a.parquet"))
    assert load(model, write_rows(tmp_path / "a.jsonl", GOOD)).num_rows == 1


def test_a_model_folder_without_a_tokenizer_is_named_with_what_is_missing_and_no_prompt_is_blamed(tmp_path):
    # From such a folder transformers makes a tokenizer that has no words.
    model = hf_models.draw("qwen3", tmp_path / "model")
    message = f"--hf-model {model} does not hold a tokenizer's vocabulary: .*tokenizer.json, or vocab.json with merges"
    with pytest.raises(InputError, match=message):
        load(model, write_rows(tmp_path / "a.jsonl", {"prompt": "n1"}))


def test_a_missing_or_unsuitable_tokenizer_is_an_error_by_name(model, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "n1"}, {"prompt": "n1 n99"})
    with pytest.raises(InputError, match="must be a folder"):
        load(tmp_path / "nowhere", path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="its tokenizer cannot be loaded"):
        load(tmp_path / "empty", path)
    config = DataConfig(prompts=[path])
    with pytest.raises(
        InputError, match=f"a.jsonl:2 has token {NUM_WORDS - 1}, and the model's vocabulary ends at {NUM_WORDS - 2}"
    ):
        load_prompts(config, model, seed=0, longest=50, vocab_size=NUM_WORDS - 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    assert load(tmp_path / "plain", path).num_rows == 2
    with pytest.raises(InputError, match=r"a.jsonl:1 is a chat, and the tokenizer of .* has no chat template"):
        load(tmp_path / "plain", path, chat=True)


def test_a_prompt_without_a_token_is_said(tmp_path):
    bare = Tokenizer(models.WordLevel({"?": 0, "n1": 1}, unk_token="?"))
    bare.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="?").save_pretrained(tmp_path)
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "n1"}, {"prompt": " "})
    with pytest.raises(InputError, match="a.jsonl:2 has a prompt without tokens"):
        load(tmp_path, path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": None}, "--prompts is missing: write one FILE.jsonl"),
        ({"held_out": 1, "eval_prompts": [Path("b.jsonl")]}, "--prompts-held-out 1 and --eval-prompts both choose"),
        ({"held_out": -1}, "--prompts-held-out -1 must be at least 0"),
        ({"eval_prompts": [Path("a.jsonl")]}, "a.jsonl is in --prompts and in --eval-prompts"),
        ({"prompts": [Path("a.jsonl"), Path("./a.jsonl")]}, "--prompts lists a.jsonl twice"),
        ({"answer_key": "prompt"}, "--prompt-key and --answer-key are both prompt"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(values, message):
    config = dataclasses.replace(DataConfig(prompts=[Path("a.jsonl")]), **values)
    assert any(message in problem for problem in find_data_problems(config, "grpo"))


def test_less_than_one_token_of_a_prompt_is_refused(model):
    config = DataConfig(prompts=[Path("a.jsonl")], max_prompt_tokens=0)
    with pytest.raises(UsageError, match="--max-prompt-tokens 0 leaves every prompt out"):
        load_prompts(config, model, seed=0, longest=9, vocab_size=NUM_WORDS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist: write the path of a file"),
        (Path.mkdir, "is a folder: write the path of a file"),
        (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    ],
)
def test_each_path_that_no_rows_can_be_read_from_is_one_problem_with_its_flag(tmp_path, make, message):
    other, good = tmp_path / "b.jsonl", write_rows(tmp_path / "a.jsonl", GOOD)
    make(other)
    named = f"{other} {message}"
    assert [*find_data_problems(DataConfig(prompts=[good, other]), "grpo")] == [f"--prompts {named}"]
    assert [*find_data_problems(DataConfig(prompts=[good], eval_prompts=[other]), "sft")] == [f"--eval-prompts {named}"]
    (unknown,) = find_data_problems(DataConfig(prompts=[good.rename(tmp_path / "a.json")]), "grpo")
    assert (
        unknown == f"--prompts {tmp_path}/a.json is neither .jsonl nor .parquet: convert it, or rename it by its format"
    )


def test_prompts_that_are_put_off_are_kept_until_they_are_asked_for_also_once_restored(tmp_path):
    whole, again = source(10), source(10)
    first = whole.peek(6)
    whole.advance(6, put_off=[1, 4])
    assert whole.put_off == [first[1].row, first[4].row]
    again.restore(json.loads(json.dumps(whole.state())))
    for one in (whole, again):
        taken = one.peek(5, 2)
        assert [prompt.row for prompt in taken[:2]] == [first[1].row, first[4].row]
        assert [prompt.index for prompt in taken] == list(range(5))
        one.advance(5, 2, [3])
        assert (len(one.put_off), one.state()["num_taken"]) == (1, 9)
    rest = one.peek(2, 1)
    assert rest[0].row == taken[3].row
    # With the rows that follow, each row has come once.
    assert len({prompt.row for prompt in [*first, *taken, *rest]}) == 10


def test_a_place_with_a_row_that_is_not_there_is_refused():
    one = source(10)
    with pytest.raises(InputError, match="has put off row 10 of 10"):
        one.restore({**one.state(), "put_off": [3, 10]})


class NaiveCurriculum:
    """The same rule, row by row, with a list of epochs in place of a position."""

    def __init__(self, orders, least, largest, num_epochs):
        self.orders, self.bounds, self.num_epochs = orders, (least, largest), num_epochs
        self.epoch, self.left, self.rests = 0, list(orders(0)), {}

    def next(self):
        while True:
            if not self.left:
                self.epoch += 1
                self.left = list(self.orders(self.epoch))
            row = self.left.pop(0)
            if self.rests.get(row, -1) < self.epoch:
                return row

    def learn(self, row, reward):
        if self.bounds[0] <= reward <= self.bounds[1]:
            self.rests.pop(row, None)
        else:
            self.rests[row] = self.epoch + self.num_epochs


@given(
    st.integers(1, 12), st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=25),
    st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), min_size=12, max_size=12), st.data(),
)  # fmt: skip
def test_rows_outside_of_the_bounds_rest_and_are_tried_again_also_by_an_order_that_is_restored(
    num_rows, num_epochs, takes, rewards, data
):
    curriculum = Curriculum(0.1, 0.9, num_epochs)
    order = RowOrder(num_rows, "rows", 3, True, curriculum)
    plain = RowOrder(num_rows, "rows", 3, True)
    everything = plain.peek(num_rows * 120)
    naive = NaiveCurriculum(lambda epoch: everything[epoch * num_rows : (epoch + 1) * num_rows], 0.1, 0.9, num_epochs)
    restored_at = data.draw(st.integers(0, len(takes)))
    for number, count in enumerate(takes):
        count = min(count, num_rows)
        if number == restored_at:
            state = json.loads(json.dumps(order.state()))
            order = RowOrder(num_rows, "rows", 3, True, curriculum)
            order.restore(state)
        rows = order.peek(count)
        assert rows == [naive.next() for _ in range(count)]
        of_rows = [rewards[(row + number // 3) % 12] for row in rows]
        order.advance(count, rewards=of_rows)
        for row, reward in zip(rows, of_rows, strict=True):
            naive.learn(row, reward)
        assert order.num_resting == sum(last >= order._place_of_next // num_rows for last in naive.rests.values())


def test_where_all_rows_rest_an_epoch_is_passed_over():
    order = RowOrder(4, "rows", 0, False, Curriculum(0.1, 0.9, 1))
    order.advance(4, rewards=[1.0, 0.0, 1.0, 0.0])
    assert order.num_resting == 4
    assert order.peek(3) == [0, 1, 2]
    order.advance(3, rewards=[0.5, None, 1.0])
    assert order.epochs == 2.75
    # The fourth has had its rest.
    assert order.peek(4) == [3, 0, 1, 3]


def test_without_a_curriculum_rewards_change_nothing_and_what_rested_is_forgotten():
    rested = RowOrder(4, "rows", 0, False, Curriculum(0.1, 0.9, 1))
    rested.advance(4, rewards=[1.0] * 4)
    order = RowOrder(4, "rows", 0, False)
    order.restore(rested.state())
    order.advance(2, rewards=[1.0, 1.0])
    assert order.peek(4) == [2, 3, 0, 1]
    assert order.num_resting is None


def test_rows_of_one_prompt_are_different_tasks_of_environments(tmp_path: Path, model: Path) -> None:
    """Read the same prompt with several values in a column."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "pay", "amount": amount % 6}) + "\n" for amount in range(12)))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "pay", "amount": 4}) + "\n")
    config = DataConfig(prompts=[rows], eval_prompts=[held_out])
    sizes = {"seed": 0, "longest": 50, "vocab_size": NUM_WORDS}
    found = tokenize_prompts(read_prompts(config), config, model, **sizes, has_environments=True)
    assert sorted(prompt.columns["amount"] for prompt in found.take(10)) == [0, 0, 1, 1, 2, 2, 3, 3, 5, 5]
    assert "2 of 12 prompts are the same as held-out ones and left out" in found.notes
    with pytest.raises(InputError, match="leaves none to train on"):
        tokenize_prompts(read_prompts(config), config, model, **sizes)
