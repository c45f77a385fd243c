"""Pairs of responses: the tokens of a row, the rows that are refused, and the flags of --stage dpo."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.trainer.data.demonstrations import DemonstrationSource, Pair, load_demonstrations
from tests.chat_models import ASSISTANT, BEHIND, BOS, END, NUM_WORDS, USER, n, save_words, write_rows
from tests.command_lines import CPU, QWEN3, error, folder, keep_one_parser, parse_run, run_problems
from tests.unit.test_demonstrations import WHOLE, chat
from tests.unit.test_stage import RUN

PAIRS = tuple(word if word != "sft" else "dpo" for word in RUN)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("model"), WHOLE)


def load(
    model: Path, *paths: Path, longest: int = 90, has_strangers: bool = False, **values: Any
) -> DemonstrationSource:
    config = dataclasses.replace(DataConfig(prompts=list(paths), shuffle=False), **values)
    return load_demonstrations(config, model, "dpo", has_strangers, seed=3, longest=longest, vocab_size=NUM_WORDS)


ANSWERS = [chat("n2", first="assistant"), chat("n3 n4", first="assistant")]


@pytest.mark.parametrize(("row", "flags"), [
    ({"prompt": chat("n1"), "chosen": ANSWERS[0], "rejected": ANSWERS[1]}, {}),
    ({"prompt": chat("n1"), "chosen": " n2 ", "rejected": " n3 n4 "}, {}),
    ({"prompt": " n1 ", "chosen": " n2 ", "rejected": " n3 n4 "}, {"chat": True}),
    ({"chosen": chat("n1", "n2"), "rejected": chat("n1", "n3 n4")}, {}),
    ({"prompt": None, "chosen": chat("n1", "n2"), "rejected": chat("n1", "n3 n4")}, {}),
    ({"prompt": chat("n1"), "chosen": chat("n1", "n2"), "rejected": chat("n1", "n3 n4")}, {}),
    ({"prompt": chat("n1"), "chosen": ANSWERS[0], "rejected": " n3 n4 "}, {}),
    (
        {"question": chat("n1"), "good": " n2 ", "bad": " n3 n4 "},
        {"prompt_key": "question", "chosen_key": "good", "rejected_key": "bad"},
    ),
])  # fmt: skip
def test_a_pair_is_the_same_in_whichever_columns_it_is_written(model, tmp_path, row, flags):
    (pair,) = load(model, write_rows(tmp_path / "a.jsonl", row), **flags).take(1)
    assert isinstance(pair, Pair)
    prompt = [BOS, USER, *n(1), END, BEHIND, ASSISTANT]
    assert pair.prompt.tolist() == prompt
    assert [one.tolist() for one in pair.responses] == [[*n(2), END], [*n(3, 4), END]]
    # The prompt counts once.
    assert pair.num_tokens == len(prompt) + 2 + 3


def test_kto_compares_with_the_responses_to_the_next_other_prompt_cut_to_the_length(model, tmp_path):
    rows = [
        {"prompt": prompt, "chosen": chosen, "rejected": "n9"}
        for prompt, chosen in (("n1", "n2 n3"), ("n1", "n4"), ("n5 n6", "n7"))
    ]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    pairs = load(model, path, longest=5, has_strangers=True).take(3)
    strangers = [[one.tolist() for one in pair.responses[2:]] for pair in pairs]
    assert strangers == [[[*n(7), END], [*n(9), END]], [[*n(7), END], [*n(9), END]], [n(2, 3), [*n(9), END]]]
    assert [one.tolist() for one in pairs[0].responses[:2]] == [[*n(2, 3), END], [*n(9), END]]
    held_out = write_rows(tmp_path / "held-out.jsonl", {"prompt": "n8", "chosen": "n2", "rejected": "n9"})
    source = load(model, path, longest=5, has_strangers=True, eval_prompts=[held_out])
    assert [one.tolist() for one in source.held_out(1)[0].responses[2:]] == [[*n(2, 3), END], [*n(9), END]]
    with pytest.raises(InputError, match="all 2 pairs have one prompt, .*: write pairs of several prompts"):
        load(model, write_rows(path, *rows[:2]), has_strangers=True)


def test_what_two_chats_share_is_their_prompt(model, tmp_path):
    row = {"chosen": chat("n1", "n2", "n3", "n4"), "rejected": chat("n1", "n2", "n3", "n5")}
    (pair,) = load(model, write_rows(tmp_path / "a.jsonl", row)).take(1)
    assert pair.prompt.tolist()[-4:] == [*n(3), END, BEHIND, ASSISTANT]
    assert [one.tolist() for one in pair.responses] == [[*n(4), END], [*n(5), END]]


def test_text_has_the_tokens_of_a_demonstration(model, tmp_path):
    (pair,) = load(model, write_rows(tmp_path / "a.jsonl", {"prompt": "n1", "chosen": "n2", "rejected": "n3"})).take(1)
    assert pair.prompt.tolist() == [BOS, *n(1)]
    assert [one.tolist() for one in pair.responses] == [[*n(2), END], [*n(3), END]]


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "n1", "chosen": "n2", "rejected": "n2"}, "has the same text in chosen and rejected: nothing"),
    ({"prompt": "n1", "chosen": "n2", "rejected": " n2"}, "has two responses of the same tokens: nothing is preferred"),
    ({"prompt": "n1", "chosen": "n2"}, r"has no column rejected .*name it with --rejected-key"),
    ({"prompt": "n1", "chosen": "n2", "rejected": ""}, "has an empty rejected response"),
    ({"chosen": "n2", "rejected": "n3"}, "has no column prompt"),
    ({"prompt": "n1", "chosen": 3, "rejected": "n3"}, "has a number as its chosen response"),
    ({"chosen": chat("n1", "n2"), "rejected": chat("n1", "n2", "n3", "n4")}, "has a response of 0"),
    ({"chosen": chat("n1", "n2", "n3", "n4"), "rejected": chat("n1", "n5", "n3", "n4")}, "has a response of 3"),
    ({"prompt": "n1", "chosen": chat("n1", "n2"), "rejected": chat("n1", "n3")}, "has a response of 2"),
    ({"chosen": ANSWERS[0], "rejected": ANSWERS[1]}, "has no prompt, and two chats that share no first message"),
])  # fmt: skip
def test_a_row_that_is_no_pair_is_an_error_that_names_it(model, tmp_path, row, message):
    path = write_rows(tmp_path / "a.jsonl", row)
    with pytest.raises(InputError, match=f"^{path}:1 {message}"):
        load(model, path)


def test_pairs_that_are_too_long_are_left_out_and_counted(model, tmp_path):
    rows = [
        {"prompt": "n1", "chosen": "n2", "rejected": "n3"},
        {"prompt": "n1 n2 n3", "chosen": "n4 n5", "rejected": "n3"},
    ]
    source = load(model, write_rows(tmp_path / "a.jsonl", *rows), longest=4)
    assert len(source.take(1)) == source.num_rows == 1
    assert "1 of 2 pairs of --prompts is longer than --seq-length 4 and left out" in source.notes[0]
    with pytest.raises(InputError, match="all 2 pairs are longer than --seq-length 3"):
        load(model, tmp_path / "a.jsonl", longest=3)


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [*CPU, "--hf-model", folder(tmp_path, QWEN3), *PAIRS]


def test_a_run_of_pairs_needs_neither_engines_nor_a_reward(base):
    settings = parse_run(*base, world_size=4)
    assert settings.sidecar is None
    assert (settings.sizes.division.slots_per_update, settings.sizes.largest_micro_batch) == (2, 2 * 2 * 128)


@pytest.mark.parametrize(("words", "message"), [
    ("--dpo-loss-type ipo --dpo-label-smoothing 0.1", "--dpo-label-smoothing 0.1 has no effect with"),
    ("--dpo-margin 1", "--dpo-margin 1 has no effect with --dpo-loss-type sigmoid: drop it, or write "
     "--dpo-margin with simpo"),
    ("--dpo-loss-type simpo --frozen-offload", "--frozen-offload has no effect with --dpo-loss-type simpo"),
    ("--grpo-ref-model nowhere", "--grpo-ref-model nowhere must be a folder"),
    ("--completion-key said", "--completion-key said needs --stage sft, which reads responses"),
    ("--grpo-kl-beta 0.1", "--grpo-kl-beta 0.1 needs --stage grpo, which samples responses"),
])  # fmt: skip
def test_a_flag_that_pairs_do_not_read_is_an_error(base, words, message):
    (problem,) = run_problems(*base, words)
    assert message in problem


def test_a_flag_of_two_stages_names_both(base):
    words = [word if word != "dpo" else "sft" for word in base]
    assert "needs --stage grpo, which samples responses, or --stage dpo, which reads pairs" in error(
        *words, "--frozen-offload"
    )


def test_a_default_that_is_written_is_no_error(base):
    parse_run(*base, "--dpo-loss-type", "hinge", "--dpo-label-smoothing", "0.0")


def test_the_tools_of_a_chat_reach_its_template(model, tmp_path):
    row = {"prompt": chat("n1"), "chosen": " n2 ", "rejected": " n3 ", "tools": [{"type": "function"}]}
    with pytest.raises(InputError, match="has a column tools that is not OpenAI's list of functions"):
        load(model, write_rows(tmp_path / "a.jsonl", row))
