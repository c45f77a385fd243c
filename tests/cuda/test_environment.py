"""The environment for GPUs: its packages agree and load, and `make gpu-demo` comes as far as a machine allows."""

import os
import subprocess
from pathlib import Path

import pytest

from examples.arithmetic.demo import FLAGS, ON_GPU
from megatron_rl.errors import ExitCode
from tests import hf_models
from tests.processes import ROOT

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


def test_the_flags_of_the_demo_are_understood(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 2", "answer": "3"}\n' * 64)
    words = ["--hf-model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--reward", "exact"]
    words += ["--eval-prompts", str(tmp_path / "prompts.jsonl"), "--rollout-folder", str(tmp_path / "run")]
    result = run("-m", "megatron_rl.config", *FLAGS, *ON_GPU, *words)
    assert result.returncode == 0, result.stderr
    assert "is_colocated " in result.stdout


def test_vllm_takes_the_flags_that_divide_a_device() -> None:
    words = ("--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", "1073741824")
    result = run("-m", "megatron_rl.sidecar.vllm.flags", *words)
    assert result.returncode == 0, result.stderr


def test_the_demo_stops_by_name_if_there_is_no_gpu_after_all_that_needs_none(has_gpu: bool, tmp_path: Path) -> None:
    if has_gpu:
        pytest.skip("this machine has a GPU: make gpu-demo runs through")
    result = run("-m", "examples.arithmetic.demo", "--gpu", "--out", str(tmp_path / "demo"))
    assert result.returncode == ExitCode.ENVIRONMENT, result.stderr
    assert result.stderr.splitlines()[-1].startswith("no GPU: torch 2.13.0")
    assert "warm-up: 400 steps" in result.stdout
    assert {"train.jsonl", "held_out.jsonl", "model"} <= {path.name for path in (tmp_path / "demo").iterdir()}
