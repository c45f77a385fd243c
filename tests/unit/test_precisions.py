"""The precisions that a run takes without flags agree, and those that flags name must agree."""

import dataclasses
from pathlib import Path

import pytest

from megatron_rl.trainer.loop.mismatch import build_mismatch_bounds, find_warning_bound
from tests.command_lines import CPU, QWEN3, RUN, folder, parse_run, run_problems


def words_of(path: Path, stored: str, *words: str) -> tuple[str, ...]:
    path.mkdir(exist_ok=True)
    engine = ("--rollout-engine", "vllm")
    return (*CPU, *RUN, *engine, "--hf-model", folder(path, dataclasses.replace(QWEN3, dtype=stored)), *words)


@pytest.mark.parametrize(
    ("stored", "flag", "rollout", "publish"),
    [
        ("float32", "", "float32", "float32"),
        ("float32", "--bf16", "bfloat16", "bfloat16"),
        ("float32", "--fp16", "float16", "float16"),
        ("bfloat16", "", "float32", "bfloat16"),
        ("bfloat16", "--bf16", "bfloat16", "bfloat16"),
        ("bfloat16", "--fp16", "float16", "float16"),
        ("float16", "--bf16", "bfloat16", "bfloat16"),
    ],
)
def test_engines_compute_in_what_is_trained_in_and_the_narrower_precision_is_published(
    tmp_path, stored, flag, rollout, publish
):
    settings = parse_run(*words_of(tmp_path, stored, *flag.split()))
    assert (settings.rollout.dtype, settings.publish.dtype) == (rollout, publish)
    assert settings.sidecar is not None
    assert settings.sidecar.rollout.dtype == rollout
    # Rounding on the way to engines must not cause a warning.
    coarse = "bfloat16" if "bfloat16" in (rollout, publish) else rollout
    assert find_warning_bound(settings) == {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}[coarse]
    assert publish in build_mismatch_bounds(settings, rollout).dtypes


@pytest.mark.parametrize(
    ("stored", "words", "said"),
    [
        ("float32", "", None),
        ("bfloat16", "--bf16", None),
        ("float32", "--bf16", "--rollout-dtype bfloat16, --publish-dtype bfloat16"),
        ("float32", "--bf16 --rollout-dtype float32", "--publish-dtype bfloat16"),
    ],
)
def test_the_start_says_which_precisions_follow_if_training_has_another_than_the_stored_weights(
    tmp_path, stored, words, said
):
    settings = parse_run(*words_of(tmp_path, stored, *words.split()))
    found = [note for note in settings.notes if note.startswith("training in ")]
    wanted = f"training in bfloat16 and weights stored in float32 make {said}"
    assert found == ([] if said is None else [wanted])


def test_precisions_that_are_written_are_kept(tmp_path):
    words = words_of(tmp_path, "float32", "--bf16", "--rollout-dtype", "float32", "--publish-dtype", "float32")
    settings = parse_run(*words)
    assert not any(note.startswith("training in ") for note in settings.notes)
    assert (settings.rollout.dtype, settings.publish.dtype) == ("float32", "float32")


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [
        ("--bf16 --publish-dtype float32", True),
        ("--publish-dtype float32 --rollout-dtype bfloat16", True),
        ("--fp16 --publish-dtype bfloat16", True),
        ("--bf16 --publish-dtype float32 --publish-proof probe", False),
        ("--bf16 --rollout-dtype float32", False),
    ],
)
def test_engines_that_would_round_what_is_published_are_refused_unless_the_weaker_proof_is_accepted(
    tmp_path, words, is_refused
):
    words = words_of(tmp_path, "float32", *words.split())
    if not is_refused:
        parse_run(*words)
        return
    (problem,) = run_problems(*words)
    assert "cannot be compared bit for bit" in problem
    assert "--publish-proof probe" in problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout-transport nccl", "is for --rollout-transport shm, not nccl: drop one of them"),
        ("", "needs --platform cuda, not cpu: write auto or files"),
    ],
)
def test_weights_that_must_come_from_devices_are_refused_where_they_cannot(tmp_path, words, message):
    found = run_problems(*words_of(tmp_path, "float32", "--publish-through", "ipc", *words.split()))
    assert f"--publish-through ipc {message}" in found


def test_flags_of_deliveries_to_other_hosts_are_refused_with_another_transport(tmp_path):
    flags = {"--publish-lost-host": "wait", "--publish-host-minutes": "1", "--publish-streams": "8"}
    words = [word for pair in flags.items() for word in pair]
    found = run_problems(*words_of(tmp_path, "float32", "--rollout-transport", "nccl", *words))
    for flag in flags:
        assert f"{flag} is for --rollout-transport shm, not nccl: drop one of them" in found
