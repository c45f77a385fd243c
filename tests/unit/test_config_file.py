"""The configuration that a run leaves in its folder, and the comparison of runs by it."""

import dataclasses
import stat

import pytest

from megatron_rl.command_line import describe
from megatron_rl.command_line import parse as command_line
from megatron_rl.errors import InputError
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import SavedConfig, Value, find_differences, list_given
from megatron_rl.shared.weights.mapping import measure_model
from megatron_rl.types import Experts
from tests.command_lines import CPU, QWEN3, RUN, folder


def config(**values):
    return SavedConfig(sections={"training": {name: Value(text, "default") for name, text in values.items()}})


def test_a_run_has_every_value_of_its_printed_configuration_in_its_folder(tmp_path):
    model = folder(tmp_path, QWEN3)
    settings = command_line.parse_run([*CPU, *RUN, "--hf-model", model])
    path = tmp_path / "run.json"
    run_folder.write_saved_config(path, describe.describe_run(settings))
    kept = run_folder.read_saved_config(path)
    printed = describe.print_config(settings)
    for section, values in kept.sections.items():
        assert f"[{section}]" in printed
        assert all(f"{name} " in printed and value.text in printed for name, value in values.items())
    assert kept.platform == settings.platform == "cpu"
    assert ("optimizer", "lr", "1e-06", "--lr 1e-6") in list_given(kept)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_runs_differ_in_the_values_that_are_not_the_same_in_all_of_them():
    of_runs = [config(lr="1", seed="3"), None, config(lr="2", seed="3", extra="x")]
    assert find_differences(of_runs) == [
        ("training", "lr", ["1", None, "2"]),
        ("training", "extra", [None, None, "x"]),
    ]
    assert find_differences([config(lr="1"), None]) == []


def test_a_folder_without_a_configuration_has_none_and_an_unreadable_one_is_named(tmp_path):
    assert run_folder.read_saved_config(tmp_path / "config.json") is None
    (tmp_path / "config.json").write_text('{"sections": 3}')
    with pytest.raises(InputError, match="config.json cannot be read"):
        run_folder.read_saved_config(tmp_path / "config.json")


def test_a_token_is_not_multiplied_with_the_table_of_embeddings_nor_with_other_tokens_experts():
    dense = measure_model(QWEN3)
    table = QWEN3.vocab_size * QWEN3.hidden_size
    assert dense.num_parameters - dense.num_multiplied == table
    assert measure_model(dataclasses.replace(QWEN3, tied_embeddings=True)).num_multiplied == dense.num_multiplied
    sparse = dataclasses.replace(QWEN3, family="qwen3_moe", experts=Experts(8, 2, 48))
    one_expert = 3 * QWEN3.hidden_size * 48 * QWEN3.num_layers
    assert measure_model(sparse).num_parameters - measure_model(sparse).num_multiplied == table + 6 * one_expert
    assert dense.attention_width == 4 * 8 * 32
