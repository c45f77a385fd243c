"""Errors of a command line on the ranks that torchrun starts: each is printed once, and none is lost."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_rl.command_line.rank_store import report_once
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.shared.weights import families
from megatron_rl.types import Architecture
from tests.command_lines import CPU, RUN
from tests.processes import ROOT

MODEL = Architecture(
    family="qwen3", num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=4,
    kv_channels=32, vocab_size=200, max_position_embeddings=256, qk_layernorm=True,
)  # fmt: skip
# pretrain_grpo.py, where the host of the second rank has no model.
SCRIPT = f"""
    import os, runpy, sys
    if os.environ["RANK"] == "1":
        sys.argv = [word.replace("/model", "/absent") for word in sys.argv]
    runpy.run_path({str(ROOT / "pretrain_grpo.py")!r}, run_name="__main__")
"""


def said(folder: Path, script: Path, *words: str) -> list[str]:
    """Return the lines that two ranks print before they end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    words = (*CPU, "--hf-model", str(folder / "model"), *RUN, *words, "--print-config")
    result = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode != 0
    assert f"exitcode  : {ExitCode.USAGE}" in result.stderr or f"exitcode  : {ExitCode.INPUT}" in result.stderr
    return [line for line in result.stderr.splitlines() if line.startswith("pretrain_grpo.py: ")]


def absent(folder: Path) -> str:
    return f"{folder}/absent/config.json does not exist: --hf-model must be a folder with config.json and weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(families.derive_config(MODEL)))
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


@pytest.mark.each_change
def test_a_problem_that_one_other_rank_finds_is_said_with_that_ranks_number(folder: Path) -> None:
    assert said(folder, folder / "script.py") == [f"pretrain_grpo.py: on rank 1: {absent(folder)}"]


def test_ranks_say_a_problem_once_that_all_of_them_find(folder: Path) -> None:
    lines = said(folder, folder / "script.py", "--lr", "much", "--no-such-flag")
    assert [line.split(":")[1].strip() for line in lines[:2]] == ["--lr much", "unknown flag --no-such-flag"]
    assert lines[2:] == [f"pretrain_grpo.py: on rank 1: {absent(folder)}"]


def test_a_rank_without_a_launcher_raises_what_it_finds_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    lines: list[str] = []
    with pytest.raises(UsageError) as raised, report_once(lines.append):
        raise UsageError("one thing", "another")
    assert raised.value.problems == ("one thing", "another")
    assert not lines
