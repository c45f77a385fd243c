"""Experts that files store in one tensor a layer: the places of their tensors, and MXFP4."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import Checkpoint
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.shared.weights.stored_forms import find_place, stack_specs, unpack_mxfp4
from tests import hf_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("gpt_oss", tmp_path_factory.mktemp("model"), hidden_size=64, intermediate_size=96)


def open_checkpoint(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint(folder)
    checkpoint.check(Mapping(read_architecture(folder)))
    return checkpoint


def test_the_stored_tensors_are_those_of_transformers(folder: Path) -> None:
    stored = {spec.name: spec.shape for spec in stack_specs(Mapping(read_architecture(folder)).manifest())}
    assert stored == {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def test_each_expert_is_read_from_its_place(folder: Path) -> None:
    apart = hf_models.split_stacks(load_file(folder / "model.safetensors"))
    with open_checkpoint(folder) as checkpoint:
        for spec in Mapping(read_architecture(folder)).manifest():
            assert torch.equal(checkpoint.tensor(spec.name), apart[spec.name]), spec.name
            assert apart[spec.name].shape == spec.shape


def test_other_tensors_have_no_place() -> None:
    for name in ("model.layers.0.mlp.router.weight", "model.layers.0.mlp.gate_proj.weight", "lm_head.weight"):
        assert find_place(name) is None


def draw_packed(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(110, 140, shape, generator=generator, dtype=torch.uint8)


def test_mxfp4_is_unpacked_as_transformers_unpacks_it() -> None:
    blocks, scales = draw_packed((3, 10, 2))
    # transformers puts the rows last.
    theirs = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    ours = torch.stack([unpack_mxfp4(*one) for one in zip(blocks, scales, strict=True)])
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs.contiguous())


def pack(folder: Path, target: Path) -> Path:
    """Put experts in MXFP4 into the place of a folder's experts."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = draw_packed((experts, rows, columns // 32))
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_folder_may_have_its_experts_in_mxfp4(folder: Path, tmp_path: Path) -> None:
    packed = pack(folder, tmp_path / "packed")
    tensors = load_file(packed / "model.safetensors")
    architecture = read_architecture(packed)
    assert architecture == dataclasses.replace(read_architecture(folder))
    block = "model.layers.2.mlp.experts"
    whole = {
        stem: convert_moe_packed_tensors(tensors[f"{block}.{stem}_blocks"], tensors[f"{block}.{stem}_scales"])
        for stem in ("gate_up_proj", "down_proj")
    }
    with open_checkpoint(packed) as checkpoint:
        assert torch.equal(checkpoint.tensor(f"{block}.3.gate_proj.weight"), whole["gate_up_proj"][3, :, 0::2].T)
        assert torch.equal(checkpoint.tensor(f"{block}.3.up_proj.weight"), whole["gate_up_proj"][3, :, 1::2].T)
        assert torch.equal(checkpoint.tensor(f"{block}.1.down_proj.weight"), whole["down_proj"][1].T)


def test_parts_of_mxfp4_that_do_not_fit_are_an_error(folder: Path, tmp_path: Path) -> None:
    packed = pack(folder, tmp_path / "packed")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**tensors, name: tensors[name][:, :1].contiguous()}, packed / "model.safetensors")
    with pytest.raises(InputError, match=r"down_proj_scales is U8 \[4, 1, 3\], and must be U8 \[4, 64, 3\]"):
        open_checkpoint(packed)
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(InputError, match="down_proj_scales is missing, and must be U8"):
        open_checkpoint(packed)
