"""Folders that hold a vision model too: the text model is read and published, images are refused with an error."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import find_left_out, read_architecture
from megatron_rl.shared.weights.mapping import Mapping, measure_model
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.received import read_started_from
from megatron_rl.sidecar.vllm.server import configure_server, make_process_spec
from megatron_rl.trainer.data.prompts import load_prompts
from megatron_rl.types import Rope, RopeKind
from tests import hf_models
from tests.command_lines import CPU, error
from tests.e2e import loop
from tests.truth import everything_in

# What config.json of these models says, as far as it describes the text model.
QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
        "intermediate_size": 9728, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": True, "vision_config": {"depth": 24}, "vision_start_token_id": 151652,
}  # fmt: skip
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loop.draw_model(tmp_path_factory.mktemp("models") / "qwen3_vl", family="qwen3_vl")


def test_tokens_of_text_are_rotated_as_by_a_plain_rope(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    plain = {"rope_type": "default", "rope_theta": text["rope_parameters"]["rope_theta"]}
    config = transformers.Qwen3Config(**{**text, "model_type": "qwen3", "rope_parameters": plain})
    config._attn_implementation = "eager"
    ids = torch.tensor(hf_models.sequences([200]))
    with torch.no_grad(), everything_in(torch.float64):
        theirs = hf_models.load(folder, torch.float64)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        weights = {
            name.replace("model.language_model.", "model."): weight
            for name, weight in theirs.state_dict().items()
            if not hf_models.is_of_tower(name)
        }
        model.load_state_dict(weights)
        assert torch.equal(model(ids).logits, theirs(ids).logits)


def test_qwen3_vl_is_read(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, QWEN3_VL_4B))
    assert found.rope == Rope(5e6)
    assert (found.family, found.dtype, found.tied_embeddings, found.qk_layernorm) == (
        "qwen3_vl",
        "bfloat16",
        True,
        True,
    )
    # Those of Qwen3-4B.
    assert measure_model(found).num_parameters == 4_022_468_096


def test_gemma_3_is_read(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path, GEMMA_3_4B))
    assert found.rope == Rope(1e6, RopeKind.LINEAR, 8.0)
    assert found.local_rope == Rope(1e4)
    assert (found.family, found.dtype, found.vocab_size, found.sliding_window) == ("gemma3", "bfloat16", 262208, 1024)
    assert [layer for layer in range(34) if found.find_window(layer) is None] == [5, 11, 17, 23, 29]
    assert measure_model(found).num_parameters == 3_880_263_168


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3_VL_4B, {"text_config": None}, "must have text_config"),
        (QWEN3_VL_4B, {"tie_word_embeddings": False}, "contradicts True in its text_config"),
        (QWEN3_VL_4B, {"text_config": QWEN3_VL_4B["text_config"] | {"model_type": "llama"}}, "'llama'"),
        (QWEN3_VL_4B, {"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints cannot be trained"),
        (GEMMA_3_4B, {"tie_word_embeddings": False}, "must be True"),
    ],
)  # fmt: skip
def test_a_wrapper_that_says_something_else_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_architecture(write(tmp_path, {**config, **changes}))


def test_every_text_tensor_is_published_and_no_other(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    published = {spec.name: spec.shape for spec in Mapping(read_architecture(folder)).manifest()}
    assert published == {
        name: tuple(tensor.shape) for name, tensor in stored.items() if not hf_models.is_of_tower(name)
    }
    assert {name: tuple(tensor.shape) for name, tensor in read_started_from(folder).items()} == published


def test_engines_do_not_wait_for_layers_that_predict_several_tokens(tmp_path: Path) -> None:
    folder = hf_models.draw("glm4_moe", tmp_path / "model")
    later = {"model.layers.4.eh_proj.weight": torch.ones(2, 2), "model.layers.4.mlp.up_proj.weight": torch.ones(2, 2)}
    own = load_file(folder / "model.safetensors")
    save_file({**own, **later}, folder / "model.safetensors", metadata={"format": "pt"})
    assert find_left_out(folder, [*own, *later]) == later.keys()
    assert read_started_from(folder).keys() == own.keys()


def test_engines_start_without_the_vision_model(folder: Path, tmp_path: Path) -> None:
    config = configure_server(RolloutConfig(), folder, 64, "cpu", 1)
    assert config.is_text_only
    # Its path is short enough for sockets.
    sockets = make_socket_folder()
    try:
        assert "--language-model-only" in make_process_spec(config, "engine-0", sockets, tmp_path / "log").command
        other = dataclasses.replace(config, is_text_only=False)
        assert "--language-model-only" not in make_process_spec(other, "engine-1", sockets, tmp_path / "log").command
    finally:
        shutil.rmtree(sockets)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
         "a.jsonl:1 has a part of the kind 'image' in message 1 of its prompt, and models are trained on text alone"),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "5"}, {"type": "image_url"}]}]},
         "has a part of the kind 'image' in message 1"),
        ({"prompt": [{"role": "user", "content": [{"video": "a.mp4"}]}]}, "has a part of the kind 'video'"),
        ({"prompt": "5", "images": ["a.png"]}, "a.jsonl:1 has something in column images"),
        ({"prompt": "5 7"}, "a.jsonl:1 has token 7, which stands for images (image_token_id in"),
    ],
)  # fmt: skip
def test_prompts_with_images_are_refused_by_name(
    row: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    for path in folder.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_text(path.read_text())
    write(tmp_path, {**config, "image_token_id": 7})
    prompts = tmp_path / "a.jsonl"

    def load() -> None:
        load_prompts(DataConfig(prompts=[prompts]), tmp_path, seed=0, longest=50, vocab_size=hf_models.VOCAB_SIZE)

    prompts.write_text(json.dumps({"prompt": "5 6", "images": []}) + "\n")
    load()
    prompts.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError) as caught:
        load()
    assert message in str(caught.value)


def test_adapters_of_such_a_model_are_refused(folder: Path) -> None:
    text = error(*CPU, "--hf-model", str(folder), "--lora-rank 4")
    assert "--lora-rank 4 is not possible with a qwen3_vl model yet" in text
