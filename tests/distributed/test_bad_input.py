"""Folders and flags that cannot be used: one named error on every rank, an exit code, and nothing written."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import cli
from megatron_rl.errors import ExitCode
from tests import hf_models
from tests.processes import ROOT
from tests.ranks import run_ranks

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Change the contents of the weights' file."""

    def write(folder: Path) -> None:
        values = load_file(folder / WEIGHTS)
        change(values)
        save_file(values, folder / WEIGHTS, metadata={"format": "pt"})

    return write


def config(**changes: Any) -> Change:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return write


def truncated(num_bytes: int) -> Change:
    return lambda folder: os.truncate(folder / WEIGHTS, num_bytes % (folder / WEIGHTS).stat().st_size)


def indexed(index: str, weights: str | None = None) -> Change:
    """Write an index; with `weights` the file of weights gets that name."""

    def write(folder: Path) -> None:
        (folder / INDEX).write_text(index)
        if weights is not None:
            (folder / WEIGHTS).rename(folder / weights)

    return write


def in_two_files(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "ema.safetensors")
    (folder / WEIGHTS).rename(folder / "raw.safetensors")


def emptied(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def with_a_number(value: float) -> Change:
    return tensors(lambda values: values["model.layers.2.self_attn.v_proj.weight"][100, 7].fill_(value))


def other_head(values: dict[str, torch.Tensor]) -> None:
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1


_NORM, _DOWN = "model.norm.weight", "model.layers.3.mlp.down_proj.weight"
_MAP = json.dumps({"weight_map": {"model.norm.weight": "absent.safetensors"}})

FAULTS: dict[str, tuple[Change, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
    "half a config": (lambda folder: os.truncate(folder / "config.json", 40), "cannot be read as JSON"),
    "an unknown architecture": (config(model_type="gpt2"), "model_type 'gpt2' is not supported"),
    "no number of layers": (config(num_hidden_layers=None), "config.json must have num_hidden_layers"),
    "quantization": (config(quantization_config={"quant_method": "fp8"}), "quantized checkpoints cannot be trained"),
    "query groups that do not divide": (config(num_key_value_heads=3), "--num-query-groups 3 does not divide"),
    "no weights": (emptied, "must hold *.safetensors"),
    "half a header": (truncated(100), "it may be truncated or in another format; copy it again"),
    "half of the data": (truncated(-1000), "it may be truncated or in another format; copy it again"),
    "a file of nothing": (truncated(0), "it may be truncated or in another format; copy it again"),
    "no final norm": (tensors(lambda values: values.pop(_NORM)), "model.norm.weight is missing"),
    "a tensor of another model": (
        tensors(lambda values: values.update({"model.layers.0.self_attn.sinks": torch.zeros(8)})),
        "model.layers.0.self_attn.sinks is not part of a qwen3 model",
    ),
    "a layer too many": (
        tensors(lambda values: values.update({_DOWN.replace("3", "4"): values[_DOWN].clone()})),
        "model.layers.4.mlp.down_proj.weight is not part of",
    ),
    "a transposed tensor": (
        tensors(lambda values: values.update({_DOWN: values[_DOWN].T.contiguous()})),
        "model.layers.3.mlp.down_proj.weight has shape [96, 64], and must have [64, 96]",
    ),
    "integers": (
        tensors(lambda values: values.update({_DOWN: values[_DOWN].to(torch.int8)})),
        "model.layers.3.mlp.down_proj.weight in {source} is stored as I8, and quantized",
    ),
    "not a number": (with_a_number(float("nan")), "model.layers.2.self_attn.v_proj.weight in {source} holds numbers"),
    "an infinite number": (with_a_number(float("-inf")), "holds numbers that are not finite in torch.float32"),
    "an index of absent files": (indexed(_MAP, "a.safetensors"), "absent.safetensors is missing; copy it again"),
    "an index beside the whole": (indexed(_MAP), "holds model.safetensors and an index of other files"),
    "half an index": (indexed("{", "a.safetensors"), "must be an index of safetensors files"),
    "an index that is a list": (indexed("[]", "a.safetensors"), "must be an index of safetensors files"),
    "weights twice": (in_two_files, "in more than one file"),
    "another head than the tied one": (
        lambda folder: (config(tie_word_embeddings=True)(folder), tensors(other_head)(folder)),
        "tie_word_embeddings is true, but lm_head.weight differs",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


def faulty(model: Path, fault: str, tmp_path: Path) -> Path:
    folder = shutil.copytree(model, tmp_path / "source")
    FAULTS[fault][0](folder)
    return folder


def convert(*words: object) -> tuple[int, str]:
    """Run the command in this process; return its exit code and its output."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = cli.main(["convert", "--platform", "cpu", *map(str, words)])
    return code, said.getvalue()


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_cannot_be_used_is_one_error_and_nothing_is_written(
    fault: str, model: Path, tmp_path: Path
) -> None:
    source = faulty(model, fault, tmp_path)
    code, said = convert("--hf-model", source, "--save-hf", tmp_path / "out", "--save", tmp_path / "saved")
    assert FAULTS[fault][1].format(source=source) in said
    assert code in (ExitCode.INPUT, ExitCode.USAGE)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--hf-model", "{model}"), ExitCode.USAGE, "nothing to write"),
        (("--save-hf", "{tmp}/out", "--hf-model", "{model}/config.json"), ExitCode.INPUT, "config.json cannot be read"),
        (("--save-hf", "{model}", "--hf-model", "{model}", "--save", "{tmp}/out"), ExitCode.INPUT, "exists already"),
        (("--save-hf", ".", "--hf-model", "{model}"), ExitCode.INPUT, "--save-hf . exists already"),
        (("--save-hf", "{model}/config.json/out", "--hf-model", "{model}"), ExitCode.INPUT, "cannot be created"),
        (("--save-hf", "/proc/out", "--hf-model", "{model}"), ExitCode.INPUT, "cannot be created"),
        (("--save", "{model}/config.json", "--hf-model", "{model}"), ExitCode.INPUT, "cannot be created"),
        (("--save-hf", "{tmp}/out", "--load", "{model}", "--hf-model", "{model}"), ExitCode.INPUT, "no checkpoint"),
        (
            ("--save-hf", "{tmp}/out", "--hf-model", "{model}", "--tensor-model-parallel-size", "3"),
            ExitCode.USAGE,
            "--tensor-model-parallel-size 3 does not divide the 8 attention heads",
        ),
        (
            ("--save-hf", "{tmp}/out", "--hf-model", "{model}", "--context-parallel-size", "3"),
            ExitCode.USAGE,
            "--context-parallel-size 3 does not divide the 8 attention heads of a tensor-parallel rank",
        ),
        (
            ("--save-hf", "{tmp}/out", "--hf-model", "{model}", "--context-parallel-size", "2"),
            ExitCode.USAGE,
            "1 ranks are not a multiple of",
        ),
        (
            ("--save-hf", "{tmp}/out", "--hf-model", "{model}", "--tensor-model-parallel-size", "2"),
            ExitCode.USAGE,
            "1 ranks are not a multiple of",
        ),
        (
            ("--save-hf", "{tmp}/out", "--hf-model", "{model}", "--hidden-size", "128"),
            ExitCode.USAGE,
            "--hidden-size 128 contradicts hidden_size = 64",
        ),
        (("--save_hf", "{tmp}/out", "--hf-model", "{model}"), ExitCode.USAGE, "unknown flag --save_hf"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_one_error_and_nothing_is_written(
    words: tuple[str, ...], code: ExitCode, message: str, model: Path, tmp_path: Path
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    result, said = convert(*(word.format(model=model, tmp=tmp_path) for word in words))
    assert message in said
    assert result == code
    assert not list(tmp_path.iterdir())
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before


def test_a_value_that_the_dtype_of_training_cannot_hold_is_an_error(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    with_a_number(1e5)(source)
    code, said = convert("--hf-model", source, "--fp16", "--save-hf", tmp_path / "out")
    assert "v_proj.weight in" in said
    assert "not finite in torch.float16" in said
    assert code == ExitCode.INPUT
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_an_error_before_weights_are_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    code, said = convert("--hf-model", model, "--save-hf", tmp_path / "out")
    assert "make room there" in said
    assert code == ExitCode.RUN
    assert not list(tmp_path.iterdir())


def test_a_tied_model_may_store_its_output_layer_too(tmp_path: Path) -> None:
    source = hf_models.draw("qwen2", tmp_path / "source")
    config(dtype="float32")(source)
    given = load_file(source / WEIGHTS)
    tensors(lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"].clone()}))(source)
    code, said = convert("--hf-model", source, "--save-hf", tmp_path / "out")
    assert code == ExitCode.OK, said
    returned = load_file(tmp_path / "out" / WEIGHTS)
    assert returned.keys() == given.keys()
    assert all(torch.equal(tensor, returned[name]) for name, tensor in given.items())


def convert_with_a_fault_on_one_rank(folders: list[tuple[str, str]], out: str) -> list[tuple[int, str]]:
    """Convert while rank 1 sees the second folder of each pair; the groups of ranks outlive the errors."""
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    results = []
    for pair in folders:
        torch.distributed.barrier()
        words = ("--hf-model", pair[rank], "--tensor-model-parallel-size", 2, "--save-hf", out)
        results.append(convert(*words))
    return results


def test_a_fault_that_one_rank_sees_ends_all_of_them_with_its_name(model: Path, tmp_path: Path) -> None:
    faults = ("half of the data", "no final norm", "a transposed tensor", "not a number")
    pairs = []
    for fault in faults:
        source = faulty(model, fault, tmp_path / fault)
        pairs.append((str(model), str(source)))
    ranks = run_ranks(convert_with_a_fault_on_one_rank, 2, pairs, str(tmp_path / "out"))
    for fault, (_, source), first, second in zip(faults, pairs, *ranks, strict=True):
        message = FAULTS[fault][1].format(source=source)
        assert message in first[1], fault
        assert message in second[1], fault
        assert "(on rank 1)" in first[1]
        assert first[0] == second[0] == ExitCode.INPUT
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(faults)


@pytest.mark.each_change
def test_ranks_of_torchrun_end_by_themselves_with_the_error(model: Path, tmp_path: Path) -> None:
    source = faulty(model, "half of the data", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
               "-m", "megatron_rl.cli", "convert", "--platform", "cpu", "--tensor-model-parallel-size", "2",
               "--hf-model", str(source), "--save-hf", str(tmp_path / "out")]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    result = subprocess.run(
        command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert result.stderr.count("it may be truncated or in another format; copy it again") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
