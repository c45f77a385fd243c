"""The environment for GPUs: its packages agree and load, and `make gpu-demo` comes as far as a machine allows."""

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from examples.arithmetic.demo import FLAGS, ON_GPU
from megatron_rl.errors import ExitCode
from megatron_rl.trainer.loop import rank_memory
from tests import hf_models
from tests.processes import ROOT
from tools import vllm_facts

GOLDEN = ROOT / "tests" / "golden" / "vllm"

MODULES = ("torch", "torchvision", "torchaudio", "triton", "transformers", "megatron.core", "vllm", "matplotlib.pyplot")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python in the project's folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [os.environ["CUDA_PYTHON"], *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.fixture(scope="module")
def has_gpu() -> bool:
    return run("-c", "import torch; print(torch.cuda.is_available())").stdout.split()[-1] == "True"


def test_what_each_package_requires_is_there_in_a_fitting_version() -> None:
    result = run("-m", "pip", "check")
    assert result.returncode == 0, result.stdout


def test_torch_is_the_build_for_cuda() -> None:
    assert run("-c", "import torch; print(torch.version.cuda)").stdout.split()[-1].startswith("13.")


@pytest.mark.parametrize("module", MODULES)
def test_a_package_loads(module: str) -> None:
    result = run("-c", f"import {module}")
    assert result.returncode == 0, result.stderr


def test_the_doctor_misses_nothing_but_a_device(has_gpu: bool) -> None:
    result = run("-m", "megatron_rl.cli", "doctor", "--platform", "cuda")
    lines = [line for line in result.stderr.splitlines() if line.startswith(("PROBLEM", "NOTE"))]
    if has_gpu:
        assert (result.returncode, lines) == (ExitCode.OK, [])
        return
    (problem,) = lines
    assert problem.startswith("PROBLEM: torch 2.13.0")
    assert "finds no CUDA device" in problem


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Return the flags of `make gpu-demo`, with a model and rows."""
    model = hf_models.draw("qwen3", tmp_path / "model")
    for name in ("train", "held_out"):
        rows = [{"id": f"{name}-{number}", "prompt": f"{name} {number}", "answer": "3"} for number in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--hf-model", str(model), "--prompts", str(tmp_path / "train.jsonl"), "--reward", "exact"]
    words += ["--eval-prompts", str(tmp_path / "held_out.jsonl"), "--rollout-folder", str(tmp_path / "run")]
    return [*FLAGS, *ON_GPU, *words]


def test_the_flags_of_the_demo_are_understood(flags: list[str]) -> None:
    result = run("-m", "megatron_rl.config", *flags)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^colocate += share +# --rollout-colocate$", result.stdout, re.MULTILINE)


def test_the_memory_of_a_rank_is_counted_as_a_run_that_shares_its_gpu_counts_it(flags: list[str]) -> None:
    with rank_memory.RankCount(SimpleNamespace(world_size=1, words=flags)) as here:
        counted = here.wait()
    result = run("-m", "megatron_rl.trainer.loop.rank_memory", "1", *flags, *rank_memory._ON_HOST)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.splitlines()[-1]) == counted > 0


def test_the_contract_with_vllm_holds_for_the_build_for_cuda() -> None:
    place = run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    found = vllm_facts.extract(vllm_facts.Sources(Path(place)))
    assert msgspec.json.decode(msgspec.json.encode(found)) == json.loads((GOLDEN / "0.32.0.json").read_text())


def test_the_demo_stops_by_name_if_there_is_no_gpu_after_all_that_needs_none(has_gpu: bool, tmp_path: Path) -> None:
    if has_gpu:
        pytest.skip("this machine has a GPU: make gpu-demo runs through")
    result = run("-m", "examples.arithmetic.demo", "--gpu", "--out", str(tmp_path / "demo"))
    assert result.returncode == ExitCode.ENVIRONMENT, result.stderr
    assert result.stderr.splitlines()[-1].startswith("no GPU: torch 2.13.0")
    assert "warm-up: 400 steps" in result.stdout
    assert {"train.jsonl", "held_out.jsonl", "model"} <= {path.name for path in (tmp_path / "demo").iterdir()}
