"""vLLM's GPT-OSS gets one expert at a time under its own names."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.vllm.received import read_started_from
from megatron_rl.sidecar.vllm.stacked import join_projections
from tests import hf_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_models.draw("gpt_oss", tmp_path_factory.mktemp("model"))


def test_the_checkpoint_of_an_engine_has_the_tensors_that_are_published(folder: Path) -> None:
    published = {spec.name: spec.shape for spec in Mapping(read_architecture(folder)).manifest()}
    assert {name: tuple(tensor.shape) for name, tensor in read_started_from(folder).items()} == published


def test_an_engine_that_starts_from_mxfp4_is_refused_with_a_remedy(tmp_path: Path) -> None:
    blocks = {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8)}
    save_file(blocks, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="experts in MXFP4.*start them from a folder of the model in bfloat16"):
        read_started_from(tmp_path)


@pytest.mark.parametrize("num_calls", [1, 7])
def test_an_expert_comes_as_the_files_store_it_however_the_weights_are_divided(folder: Path, num_calls: int) -> None:
    stored = load_file(folder / "model.safetensors")
    # An order in which the parts of an expert are far apart.
    given = sorted(read_started_from(folder).items(), key=lambda one: one[0][::-1])
    waiting: dict[str, dict[str, torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for call in range(num_calls):
        # A stream's memory, which is used again after each call.
        weights = [(name, tensor.clone()) for name, tensor in given[call::num_calls]]
        found |= {name: tensor.clone() for name, tensor in join_projections(iter(weights), waiting)}
        for _, tensor in weights:
            tensor.fill_(torch.nan)
    assert not waiting
    experts = {"gate_up_proj": "w13_weight", "gate_up_proj_bias": "w13_bias"}
    experts |= {"down_proj": "w2_weight", "down_proj_bias": "w2_bias"}
    for name, tensor in stored.items():
        block, _, stem = name.rpartition(".")
        if stem in experts:
            for expert, own in enumerate(tensor):
                assert torch.equal(found.pop(f"{block}.{expert}.{experts[stem]}"), own), name
        else:
            assert torch.equal(found.pop(name), tensor), name
    assert not found


def test_the_vllm_that_is_installed_is_known() -> None:
    # Importing it takes as long as all tests here.
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    text = (Path(package.origin).parent / "model_executor" / "models" / "gpt_oss.py").read_text()
    for part in ("def _load_weights_other(", "def _try_load_streamed_expert(", '"w13_bias": "gpt_oss_w13"'):
        assert part in text
    _, model = text.split("class GptOssForCausalLM(")
    assert "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:" in model
