"""Small models that draft tokens for small policies: random ones, as a draft may be anything."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_HIDDEN, _HEADS, _GROUPS, _HEAD_DIM, _MLP = 64, 8, 4, 32, 96
# The layers of the policy whose outputs a head reads.
_LAYERS = (0, 1)


def draw_eagle3(folder: Path, vocab_size: int) -> Path:
    """Save a head on the policy's hidden states, which takes its embedding and its output layer from the policy."""
    folder.mkdir()
    layer = "midlayer."
    shapes = {
        layer + "self_attn.q_proj.weight": (_HEADS * _HEAD_DIM, 2 * _HIDDEN),
        layer + "self_attn.k_proj.weight": (_GROUPS * _HEAD_DIM, 2 * _HIDDEN),
        layer + "self_attn.v_proj.weight": (_GROUPS * _HEAD_DIM, 2 * _HIDDEN),
        layer + "self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD_DIM),
        layer + "mlp.gate_proj.weight": (_MLP, _HIDDEN),
        layer + "mlp.up_proj.weight": (_MLP, _HIDDEN),
        layer + "mlp.down_proj.weight": (_HIDDEN, _MLP),
        "fc.weight": (_HIDDEN, len(_LAYERS) * _HIDDEN),
        **{
            f"{layer}{name}.weight": (_HIDDEN,)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": (_HIDDEN,),
    }
    generator = torch.Generator().manual_seed(5)
    tensors = {name: _draw(name, shape, generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": _HIDDEN,
        "intermediate_size": _MLP, "num_attention_heads": _HEADS, "num_key_value_heads": _GROUPS, "head_dim": _HEAD_DIM,
        "num_hidden_layers": 1, "vocab_size": vocab_size, "draft_vocab_size": vocab_size, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "hidden_act": "silu", "rope_theta": 1e4, "dtype": "float32",
        "tie_word_embeddings": False, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(_LAYERS)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def add_prediction_layer(folder: Path, num_layers: int) -> Path:
    """Add a layer that predicts a further token to a checkpoint of glm4_moe, after its own layers."""
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(9)
    tensors = load_file(path)
    before, added = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    for name in [name for name in tensors if name.startswith(before)]:
        tensors[added + name.removeprefix(before)] = _draw(name, tuple(tensors[name].shape), generator)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{added}{name}.weight"] = _draw("norm", (_HIDDEN,), generator)
    tensors[f"{added}eh_proj.weight"] = _draw("eh_proj", (_HIDDEN, 2 * _HIDDEN), generator)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return folder


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.3 * noise if "norm" in name else 0.15 * noise
