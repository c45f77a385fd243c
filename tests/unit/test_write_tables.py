"""The tables of docs/algorithms.md are those that the algorithms declare."""

import dataclasses

import pytest

from megatron_rl.algorithm.library import ADVANTAGES, ALGORITHMS, LOSSES, PRESETS, LossSettings
from megatron_rl.algorithm.settings import AlgorithmConfig
from tools.write_tables import PAGE, write_tables


def test_the_tables_of_the_page_are_current() -> None:
    text = PAGE.read_text()
    assert write_tables(text) == text, "run make flags"


def test_a_table_that_was_edited_by_hand_is_written_again() -> None:
    text = PAGE.read_text()
    assert write_tables(text.replace("-min(q A, clip(q) A)", "-q A")) == text
    with pytest.raises(AssertionError, match="has no line <!-- table of losses"):
        write_tables(text.replace("<!-- table of losses", "<!--"))


def test_no_two_algorithms_declare_the_same_name() -> None:
    declared = [
        [item.name for algorithm in ALGORITHMS.values() for item in getattr(algorithm, kind)]
        for kind in ("losses", "advantages", "presets")
    ]
    assert declared == [list(LOSSES), list(ADVANTAGES), list(PRESETS)]


def test_each_setting_of_losses_is_read_by_one_and_each_preset_sets_known_fields() -> None:
    assert {name for loss in LOSSES.values() for name in loss.reads} == {
        field.name for field in dataclasses.fields(LossSettings)
    }
    for preset in PRESETS.values():
        config = AlgorithmConfig(**preset.settings)
        assert config.loss in LOSSES
        assert config.advantage in ADVANTAGES
