"""The parser that gets each word of a recipe's command line, and what each parser says of them."""

import argparse
import sys

import pytest

from megatron_rl import recipe
from megatron_rl.errors import UsageError
from megatron_rl.trainer.recipe import hooks

OURS = {"--prompts", "--lr", "--rollout-devices"}
THEIRS = {"--lr", "--own", "--spec"}
WORDS = [
    "--prompts", "p.jsonl", "--lr", "1e-3", "--own=3", "--spec", "module", "layer", "--rollout-devices", "4", "-1",
    "--unknown", "x",
]  # fmt: skip


def test_each_parser_gets_its_flags_with_their_values_and_both_get_those_that_both_know() -> None:
    unknown = ["--unknown", "x"]
    shared = ["--lr", "1e-3"]
    assert hooks.select_words(WORDS, OURS, THEIRS) == [
        "--prompts", "p.jsonl", *shared, "--rollout-devices", "4", "-1", *unknown,
    ]  # fmt: skip
    assert hooks.select_words(WORDS, THEIRS, OURS) == [*shared, "--own=3", "--spec", "module", "layer", *unknown]


def test_no_word_is_lost_and_none_is_read_twice_by_one_parser() -> None:
    ours, theirs = hooks.select_words(WORDS, OURS, THEIRS), hooks.select_words(WORDS, THEIRS, OURS)
    assert set(ours) | set(theirs) == set(WORDS)
    assert len(ours) == len(set(ours))
    assert hooks.select_words([], OURS, THEIRS) == []
    assert hooks.select_words(["stray", "--lr", "1"], OURS, THEIRS) == ["stray", "--lr", "1"]


def make_module() -> argparse.Namespace:
    """Build the part of Megatron's module of arguments that is used."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--lr", type=float)
        return parser

    return argparse.Namespace(add_megatron_arguments=add_megatron_arguments)


def add_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--own", type=int)
    return parser


def test_megatrons_parser_has_the_flags_of_megatron_and_those_that_the_recipe_adds() -> None:
    assert hooks.list_their_names(make_module(), None) == {"--lr", "-h", "--help"}
    assert hooks.list_their_names(make_module(), add_own) == {"--lr", "--own", "-h", "--help"}


def test_megatrons_parser_reads_its_words_alone_and_its_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def parse(extra: hooks.ExtraArgs) -> argparse.Namespace:
        parser = make_module().add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        assert extra is not None
        return extra(parser).parse_args()

    before = list(sys.argv)
    theirs = hooks.list_their_names(make_module(), add_own)
    args = hooks.parse_theirs(parse, ["--prompts", "x", "--lr", "0.5", "--own", "3"], theirs, add_own)
    assert (args.lr, args.own) == (0.5, 3)
    with pytest.raises(UsageError, match=r"^Megatron's parser: argument --own: invalid int value: 'three'$"):
        hooks.parse_theirs(parse, ["--own", "three"], theirs, add_own)
    assert sys.argv == before
    assert "usage" not in capsys.readouterr().err


def test_a_failed_assertion_of_megatrons_about_arguments_is_an_error_with_its_text() -> None:
    with pytest.raises(UsageError, match="refuses the recipe's arguments: heads do not divide"), hooks.refusals():
        raise AssertionError("heads do not divide")


@pytest.mark.parametrize(
    ("name", "words"), [("__main__", ["pretrain_gpt.py"]), ("__mp_main__", ["x", "--prompts", "y"]), ("x", ["x"])]
)
def test_a_patched_script_continues_if_grpo_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(recipe, "run", lambda words: pytest.fail("it started"))
    recipe.start(name)


def test_a_patched_script_is_started_once_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--prompts=p.jsonl"])
    monkeypatch.setattr(recipe, "run", lambda words: 5)
    with pytest.raises(SystemExit, match="5"):
        recipe.start("__main__")
    monkeypatch.setattr(recipe, "_running", ["pretrain_gpt.py"])
    recipe.start("__main__")
