"""Small transformers models, drawn so that a fault in a conversion shows, and what they say of a sequence."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 131
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
}  # fmt: skip

# The settings that each family's conversion could get wrong, switched on between them.
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": _LLAMA3_ROPE}),
    "llama_biased": (
        transformers.LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 11, "head_dim": 24}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": _YARN_ROPE}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3_moe_raw": (
        transformers.Qwen3MoeConfig,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16, "norm_topk_prob": False},
    ),
    "mixtral": (transformers.MixtralConfig, {**_EXPERTS, "num_local_experts": 4}),
}  # fmt: skip
WITH_EXPERTS = ("qwen3_moe", "qwen3_moe_raw", "mixtral")


def draw(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a model of that kind with large random weights, uneven norms and biases that are not zero."""
    transformers.utils.logging.disable_progress_bar()
    make, settings = CONFIGS[name]
    config = make(**{**_SIZES, **settings, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in parameter_name else 0.15 * noise)
    model.save_pretrained(folder)
    return folder


def log_probs(folder: Path, sequences: list[list[int]], temperature: float = 1.0) -> list[torch.Tensor]:
    """transformers' log-prob of each token of each sequence but the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    results = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            logits = model(ids).logits[0, :-1] / temperature
            results.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    return results


def sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
