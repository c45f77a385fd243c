"""A folder in 8-bit floats with a factor for each block is read as the products, and written without factors."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import cli
from tests import hf_models

SIZES = {"hidden_size": 200, "intermediate_size": 328, "num_attention_heads": 2, "num_key_value_heads": 1}
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
}  # fmt: skip
_SMALL = torch.float8_e4m3fn
_LARGEST = torch.finfo(_SMALL).max
DOWN = "model.layers.1.mlp.down_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


def pack(weight_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit floats, and the factor of each block by its largest number; the last blocks may be smaller."""
    stored_RC = torch.zeros(weight_RC.shape, dtype=_SMALL)
    rows, columns = (range(0, length, 128) for length in weight_RC.shape)
    factors_BD = torch.zeros(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = weight_RC[row : row + 128, column : column + 128]
            # Blocks differ by much, so that another block's factor shows.
            factors_BD[i, j] = block.abs().max() / _LARGEST
            stored_RC[row : row + 128, column : column + 128] = (block / factors_BD[i, j]).to(_SMALL)
    return stored_RC, factors_BD


def multiply(stored_RC: torch.Tensor, factors_BD: torch.Tensor) -> torch.Tensor:
    """Multiply each number with the factor of its block, in float64."""
    rows_R, columns_C = (torch.arange(length) // 128 for length in stored_RC.shape)
    return stored_RC.double() * factors_BD.double()[rows_R[:, None], columns_C[None, :]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose linear layers are in scaled blocks."""
    folder = hf_models.draw("qwen3", tmp_path_factory.mktemp("models") / "stored", **SIZES)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale_R = torch.exp(torch.arange(tensors[name].shape[0]) // 128 * 1.0)[:, None]
        scale_C = torch.exp(torch.arange(tensors[name].shape[1]) // 128 * -2.0)
        tensors[name], tensors[f"{name}_scale_inv"] = pack(tensors[name].float() * scale_R * scale_C)
    write(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": QUANTIZATION, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = cli.main(["convert", "--platform", "cpu", "--bf16", "--hf-model", str(source), "--save-hf", str(out)])
    return code, said.getvalue()


def test_weights_are_the_products_and_the_folder_that_is_written_has_no_factors(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = convert(stored, tmp_path / "out", monkeypatch)
    assert code == 0, said
    given, found = (load_file(folder / "model.safetensors") for folder in (stored, tmp_path / "out"))
    factors = {name for name in given if name.endswith("_scale_inv")}
    assert found.keys() == given.keys() - factors
    assert len(factors) == 4 * 7
    for name, tensor in found.items():
        if f"{name}_scale_inv" not in factors:
            assert torch.equal(tensor, given[name])
            continue
        truth = multiply(given[name], given[f"{name}_scale_inv"])
        assert tensor.dtype == torch.bfloat16
        # Half a unit of the last of bfloat16's 8 bits, and the error of a product in float32.
        assert ((tensor.double() - truth).abs() <= (2**-8 + 2**-22) * truth.abs()).all()
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    hf_models.load(tmp_path / "out", torch.bfloat16)


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"] = tensors[f"{DOWN}_scale_inv"].T.contiguous()


def drop_last_column(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{DOWN}_scale_inv"] = tensors[f"{DOWN}_scale_inv"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (transpose, f"{DOWN}_scale_inv in {{source}} has shape [3, 2] in F32, and must have [2, 3] in F32"),
        (drop_last_column, "has shape [2, 2] in F32, and must have [2, 3] in F32"),
        (lambda tensors: tensors.pop(f"{DOWN}_scale_inv"), f"or in F8_E4M3 with {DOWN}_scale_inv"),
        (lambda tensors: tensors.update({DOWN: tensors[DOWN].bfloat16()}), f"{DOWN}_scale_inv is not part of a qwen3"),
    ],
)
def test_factors_that_do_not_belong_to_a_weight_are_an_error(
    change: Change, message: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((stored / "config.json").read_text())
    tensors = load_file(stored / "model.safetensors")
    change(tensors)
    write(source, tensors)
    code, said = convert(source, tmp_path / "out", monkeypatch)
    assert code != 0
    assert message.format(source=source) in said
