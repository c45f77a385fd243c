"""The untrained model: two layers of a family, and a tokenizer with a token for each character.

It is as small as it may be. On a CPU, vLLM wants heads of at least 32, and of 64 in linear layers. Two tensor-parallel
ranks want two heads of keys and values, and two pipeline stages want two layers.
"""

import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

END, PAD = "<end>", "<pad>"
TOKENS = (*"0123456789+=", END, PAD)
VOCAB_SIZE = 16
HIDDEN_SIZE = 128
MAX_LENGTH = 64
"""Tokens of prompt and response together, at most."""
MEGATRON_FLAGS = (
    "--num-layers 2 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --kv-channels 32 --max-position-embeddings {MAX_LENGTH} --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --rotary-base 10000 "
    "--norm-epsilon 1e-6 --qk-layernorm --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion"
).split()
"""The Qwen3 as a script of Megatron's describes it. pretrain_grpo.py reads it from the model's config.json."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": TOKENS.index(END),
    "pad_token_id": TOKENS.index(PAD),
    "bos_token_id": None,
}
FAMILIES: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {}),
    # The first layer is dense; the second one has four experts, two for each token, and a shared one.
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
         "moe_intermediate_size": 96, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True},
    ),
    # A gated delta net, then a layer of gated attention, each with four experts, two for each token, and a shared one.
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    ),
}  # fmt: skip
"""The families that the demo can train, with what their config.json has beside the sizes."""
_KEPT = 0.7
"""The part of itself that the state of a linear layer's first head keeps from a token to the next, before training."""


def draw(seed: int, family: str = "qwen3", **changes: Any) -> transformers.PreTrainedModel:
    """Draw a model with fresh weights; `changes` are other values for its config.json."""
    make_config, others = FAMILIES[family]
    config = make_config(**{**_SIZES, **others, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.A_log"):
            # As transformers draws them, states of most heads, or of all, forget a token before the next but one.
            torch.nn.init.constant_(parameter[:1], math.log(-math.log(_KEPT) / math.log(1 + math.e)))
    return model


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of characters; nothing is added to a text, and another character is an error."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: index for index, token in enumerate(TOKENS)}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    words.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def save(
    model: transformers.PreTrainedModel, folder: Path, tokenizer: transformers.PreTrainedTokenizerFast | None = None
) -> None:
    """Save a folder that transformers, vLLM and `--hf-model` load without the network."""
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
