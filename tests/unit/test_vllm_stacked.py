"""vLLM's GPT-OSS gets one expert at a time under its own names, and its sinks by their loader."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.sidecar.vllm.patches import NOT_APPLIED
from megatron_rl.sidecar.vllm.received import read_started_from
from megatron_rl.sidecar.vllm.stacked import join_projections, patch_stacked_experts
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


class Inner(torch.nn.Module):
    """The parts of vLLM's GPT-OSS that the patch reads."""

    def _load_weights_other(self) -> None: ...

    def _try_load_streamed_expert(self) -> None: ...


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.model.attn = torch.nn.Module()
        self.model.attn.sinks = torch.nn.Parameter(torch.zeros(2, device="meta"))
        self.given: dict[str, torch.Tensor] = {}

    def load_weights(self, weights):
        self.given |= dict(weights)
        return set(self.given)


def test_sinks_are_loaded_by_their_loader_and_each_rank_takes_its_heads() -> None:
    kind = type("Own", (Model,), {})
    model = kind()
    assert patch_stacked_experts(model, 1) == "applied"
    assert patch_stacked_experts(model, 1) == "applied before"
    loads: list[torch.Tensor] = []
    model.model.attn.sinks.weight_loader = lambda parameter, given: loads.append(given)
    names = model.load_weights([("model.self_attn.sinks", torch.arange(4.0)), ("norm", torch.ones(1))])
    assert names == {"model.attn.sinks", "norm"}
    assert [one.tolist() for one in loads] == [[2.0, 3.0]]
    assert list(model.given) == ["norm"]


def test_other_models_and_another_vllm_are_left_alone() -> None:
    class Older(Model):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model._load_weights_other = None

    for model, report in ((torch.nn.Linear(1, 1), "not needed"), (Older(), NOT_APPLIED)):
        assert patch_stacked_experts(model, 0).startswith(report)
    assert Older.load_weights is Model.load_weights


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
