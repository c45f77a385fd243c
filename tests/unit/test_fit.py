"""`megatron-rl doctor --fit`, each time in a process of its own."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode
from tests import hf_models
from tests.command_lines import QWEN3, folder, without
from tests.processes import ROOT
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("fit")
    model = hf_models.draw("qwen3", place / "model", num_hidden_layers=4)
    words = (
        f"--platform cpu --hf-model {model} --seq-length 96 --rollout-max-tokens 64 --grpo-prompts-per-step 8 "
        "--grpo-group-size 4 --micro-batch-size 4"
    )
    return words.split()


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


def fit(*words: str) -> Result:
    """Run the command in a process that is forked after the imports, which take most of its time."""
    return run_ranks(fit_here, 1, words)[0]


def fit_here(words: list[str]) -> Result:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = cli.main(["doctor", *words])
    return Result(code, out.getvalue(), error.getvalue())


def test_each_stage_has_a_row_and_what_is_kept_beside_the_policy_is_counted(flags: list[str]) -> None:
    result = fit("--fit", "8", *flags, "--pipeline-model-parallel-size", "2", "--grpo-kl-beta", "0.1", "--async-save")
    assert result.returncode == ExitCode.OK, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "8 ranks: TP 1, PP 2, CP 1, EP 1, DP 4; micro-batches of up to 288 tokens, 2 a schedule"
    assert lines[3].startswith("stage   parameters      weights    gradients    optimizer       frozen  activations")
    assert [line.split()[0] for line in lines[4:6]] == ["0", "1"]
    (title,) = (place for place, line in enumerate(lines) if line.startswith("GiB of a rank on the host"))
    assert lines[title + 1].split() == ["stage", "publish", "optimizer", "frozen", "turns", "save"]
    assert lines[-1] == "fits"


def test_a_device_that_engines_share_is_divided(flags: list[str]) -> None:
    result = fit("--device-gib", "24", "--fit", "1", *flags, "--rollout-colocate")
    assert result.returncode == ExitCode.OK, result.stderr
    # A block of logits is nearly all that a model this small takes.
    assert result.stdout.splitlines()[-1].startswith("device memory: 24.0 GiB, of it 1.0 for a rank (0.0 counted) and ")
    small = fit("--device-gib", "2", "--fit", "1", *flags, "--rollout-colocate")
    assert small.returncode == ExitCode.USAGE
    assert "--rollout-colocate does not fit a device of 2.0 GiB" in small.stderr


def test_by_turns_the_whole_device_is_an_engines_and_the_host_has_the_ranks_state(flags: list[str]) -> None:
    words = ("--device-gib", "8", "--fit", "1", *flags, "--rollout-colocate")
    turns = fit(*words, "sleep")
    assert turns.returncode == ExitCode.OK, turns.stderr
    assert turns.stdout.splitlines()[-1].startswith(
        "device memory: 8.0 GiB, by turns 1.0 for a rank (0.0 counted) and "
    )
    assert "GiB of a rank on the host" in turns.stdout


def test_a_model_that_is_too_large_is_named_with_its_largest_part(flags: list[str]) -> None:
    result = fit("--device-gib", "0.001", "--fit", "1", *flags)
    assert result.returncode == ExitCode.RUN
    assert "does not fit: stage 0 takes 0.0 GiB of 0.001, most of it activations" in result.stdout


@pytest.mark.each_change
def test_demonstrations_take_no_memory_for_a_publish(tmp_path: Path) -> None:
    large = dataclasses.replace(QWEN3, hidden_size=1024, vocab_size=150_000)
    words = (
        f"--stage sft --platform cpu --hf-model {folder(tmp_path, large)} --seq-length 96 "
        "--global-batch-size 8 --micro-batch-size 2 --async-save --save out"
    )
    # Started as a user starts it.
    command = [sys.executable, "-m", "megatron_rl.cli", "doctor", "--fit", "2", *words.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == ExitCode.OK, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("DP 2; micro-batches of up to 192 tokens, 2 a schedule")
    (title,) = (place for place, line in enumerate(lines) if line.startswith("GiB of a rank on the host"))
    of_stage = dict(zip(lines[title + 1].split(), lines[title + 2].split(), strict=True))
    assert (of_stage["publish"], of_stage["frozen"]) == ("0.00", "0.00")
    assert float(of_stage["save"]) > 1


def test_devices_that_are_not_here_decide_the_size_of_micro_batches_and_what_only_a_run_needs_is_not_checked(
    flags: list[str],
) -> None:
    of_a_run = "--prompts /nowhere.jsonl --reward exact --lr 1e-6 --train-iters 4 --rollout-folder /dev/null/run"
    words = without(without(flags, "--micro-batch-size"), "--platform")
    result = fit("--device-gib", "24", "--fit", "8", *words, "--platform", "cuda", *of_a_run.split())
    assert result.returncode == ExitCode.OK, result.stderr
    first, second = result.stdout.splitlines()[:2]
    # Of eight groups each replica has one.
    assert first.startswith("devices of 24 GiB make --micro-batch-size 4: a group, up to 288 tokens, which ")
    assert second == "8 ranks: TP 1, PP 1, CP 1, EP 1, DP 8; micro-batches of up to 288 tokens, 1 a schedule"


def test_mistakes_are_said_as_a_run_says_them(flags: list[str]) -> None:
    wanted = "--fit needs the number of ranks, then the flags of a run"
    unequal = "3 ranks are not a multiple of --tensor-model-parallel-size 2"
    for words, message in (
        ([], wanted),
        (flags, wanted),
        (["3", *flags, "--tensor-model-parallel-size", "2"], unequal),
    ):
        result = fit("--fit", *words)
        assert result.returncode == ExitCode.USAGE
        assert message in result.stderr
        assert "Traceback" not in result.stderr
