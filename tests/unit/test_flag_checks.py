"""Flags that are wrong by themselves or contradict each other, and their errors: a row each in flag_checks.toml."""

import tomllib
from pathlib import Path

import pytest

from megatron_rl.command_line import flags
from tests.command_lines import (
    CPU,
    DENSE,
    LINEAR,
    QWEN3,
    RUN,
    SPARSE,
    error,
    folder,
    keep_one_parser,
    parse,
    run_problems,
)

ROWS = tomllib.loads(Path(__file__).with_name("flag_checks.toml").read_text(encoding="utf-8"))
MODELS = {"dense": DENSE, "linear": LINEAR, "sparse": SPARSE}


@pytest.mark.parametrize("section", ROWS)
def test_a_contradiction_is_an_error_that_says_what_to_write(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_one_parser(monkeypatch)
    run = (*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN)
    model, _, ranks = section.removesuffix(" ranks").partition(" on ")
    world_size = int(ranks) if ranks else None
    wrong = {}
    for words, said in ROWS[section].items():
        if model == "run":
            text = "\n".join(run_problems(*run, words, world_size=world_size))
        else:
            text = error(*MODELS[model], words, world_size=world_size)
        if not all(part in text for part in ([said] if isinstance(said, str) else said)):
            wrong[words] = text
    assert wrong == {}


@pytest.mark.parametrize("endpoint", ["http://localhost:8000", "http://[::1]:8000", "https://rollout.example/run"])
def test_an_address_of_a_sidecar_is_taken_as_it_is(endpoint: str) -> None:
    assert parse(*DENSE, f"--rollout-endpoint {endpoint}").service.endpoint == endpoint


def test_without_a_launcher_the_number_of_ranks_is_not_checked() -> None:
    assert parse(*DENSE, "--tensor-model-parallel-size 4 --global-batch-size 7").training.global_batch_size == 7


def test_flags_that_megatron_core_itself_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("a wing too many")

    monkeypatch.setattr(flags.import_configs()["transformer"], "__post_init__", refuse)
    version = flags.find_megatron_version()
    assert error(*DENSE) == f"megatron-core {version} refuses the transformer configuration: a wing too many"
