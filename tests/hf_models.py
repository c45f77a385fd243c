"""Small transformers models, drawn so that a fault in a conversion shows, and their log-probs of a sequence."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from tests.truth import everything_in

VOCAB_SIZE = 131
_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_LINEAR = {
    "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
}  # fmt: skip

_FULL, _LOCAL = "full_attention", "sliding_attention"
_LATENT_YARN_ROPE = {**_YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 0.6}
_LATENT_EXPERTS = {
    "num_key_value_heads": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_method": "noaux_tc",
}  # fmt: skip

_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_TOWERS = ("model.visual.", "vision_tower.", "multi_modal_projector.")
_GEMMA3 = {
    "sliding_window": 11, "head_dim": 16, "query_pre_attn_scalar": 40, "pad_token_id": None,
    "layer_types": [_LOCAL, _LOCAL, _FULL, _LOCAL],
    "rope_parameters": {
        _FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
        _LOCAL: {"rope_type": "default", "rope_theta": 100.0},
    },
}  # fmt: skip


def _qwen3_vl(**text: Any) -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    tied = text.pop("tie_word_embeddings", False)
    return transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope, "tie_word_embeddings": tied}, tie_word_embeddings=tied,
        vision_config={**_VISION, "deepstack_visual_indexes": [1]},
    )  # fmt: skip


def _qwen3_5(**text: Any) -> transformers.PretrainedConfig:
    tied = text["tie_word_embeddings"]
    return transformers.Qwen3_5Config(text_config=text, vision_config=_VISION, tie_word_embeddings=tied)


def _gemma3(**text: Any) -> transformers.PretrainedConfig:
    return transformers.Gemma3Config(text_config=text, vision_config=_SIGLIP, mm_tokens_per_image=4)


# The settings that each family's conversion could get wrong, switched on between them.
CONFIGS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
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
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5,
         "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 16,
         "attention_bias": True, "use_qk_norm": True},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {**_EXPERTS, **_LINEAR, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "qwen3_5": (transformers.Qwen3_5TextConfig, {**_LINEAR, "tie_word_embeddings": True}),
    "gemma3_text": (
        transformers.Gemma3TextConfig, _GEMMA3
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {**_EXPERTS, "num_local_experts": 4, "intermediate_size": 48, "head_dim": 16, "sliding_window": 11,
         "rms_norm_eps": 1e-5, "rope_parameters": {**_YARN_ROPE, "beta_slow": 1.0, "truncate": False}},
    ),
    "seed_oss": (transformers.SeedOssConfig, {"head_dim": 16, "pad_token_id": None}),
    "ernie4_5": (
        transformers.Ernie4_5Config, {"head_dim": 24, "tie_word_embeddings": True, "pad_token_id": None}
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        {**_EXPERTS, **_LINEAR, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        {"num_local_experts": 6, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.0, "intermediate_size": 48,
         "head_dim": 16, "rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True, "bos_token_id": None,
         "eos_token_id": None},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {**_LATENT_EXPERTS, "q_lora_rank": 24, "scoring_func": "sigmoid", "rope_parameters": _LATENT_YARN_ROPE},
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        {**_LATENT_EXPERTS, "q_lora_rank": 24, "v_head_dim": 24, "rope_parameters": {"rope_theta": 1e6}},
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        # Two experts in each of two groups: sums of two scores and largest scores choose different groups.
        {**_LATENT_EXPERTS, "q_lora_rank": 24, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
         "num_experts_per_tok": 4, "n_shared_experts": 2, "topk_method": "group_limited_greedy",
         "rope_parameters": _LATENT_YARN_ROPE},
    ),
    "deepseek_v3_direct": (
        transformers.DeepseekV3Config, {**_LATENT_EXPERTS, "q_lora_rank": None, "scoring_func": "sigmoid"}
    ),
    "qwen3_vl": (_qwen3_vl, {"head_dim": 32}),
    "qwen3_5_images": (_qwen3_5, {**_LINEAR, "tie_word_embeddings": True}),
    "gemma3": (_gemma3, _GEMMA3),
}  # fmt: skip
# Of what these have, each part is in a model above too, or computed by one line of Megatron: compared less often.
# Linear layers are compared in `tests/distributed/test_linear_layers.py` with each change.
COMPARED_LESS_OFTEN = (
    "qwen2_moe",
    "seed_oss",
    "qwen3_next",
    "qwen3_5",
    "deepseek_v3_direct",
    "glm4_moe_lite",
    "deepseek_v2",
    "ernie4_5",
    "qwen3_5_moe",
    "minimax_m2",
    "qwen3_vl",
    "qwen3_5_images",
    "gemma3",
)
_ROUTER_BIAS = "e_score_correction_bias"
WITH_WINDOW = ("mistral", "gemma3_text", "gpt_oss", "gemma3")
WITH_EXPERTS = (
    "qwen3_moe", "qwen3_moe_raw", "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "qwen3_next", "deepseek_v3",
    "deepseek_v3_direct", "glm4_moe_lite", "deepseek_v2", "qwen3_5_moe", "minimax_m2",
)  # fmt: skip


def draw(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a model of that kind with large random weights, uneven norms and biases that are not zero."""
    make, settings = CONFIGS[name]
    return draw_model(make, folder, seed, **{**settings, **changes})


def draw_model(make: Callable[..., Any], folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Save such a model of a transformers configuration."""
    transformers.utils.logging.disable_progress_bar()
    config = make(**{**_SIZES, **settings})
    config._attn_implementation = "eager"
    model = _find_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scale(parameter_name, noise))
            if config.model_type == "gpt_oss" and parameter_name.endswith("gate_up_proj"):
                # Some gates and ups must reach the limit of 7.
                parameter.copy_(0.5 * noise)
        for buffer_name, bias in model.named_buffers():
            if buffer_name.endswith(_ROUTER_BIAS):
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def _find_class(config: transformers.PretrainedConfig) -> Any:
    has_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM


def is_of_tower(name: str) -> bool:
    """Check whether a tensor of the checkpoint belongs to a vision model."""
    return name.startswith(_TOWERS)


def _scale(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Scale the noise of a parameter; states of linear layers decay slowly enough that prompts reach far."""
    if name.endswith("A_log"):
        return noise - 3
    if name.endswith("dt_bias"):
        return noise
    if "conv1d" in name:
        return 0.5 * noise
    return 1 + 0.3 * noise if "norm" in name or name.endswith("sinks") else 0.15 * noise


def load(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load transformers' model of that folder; inside `everything_in(float64)` it computes wholly in float64."""
    # Its default for experts is a product that float64 does not have.
    experts = "eager" if dtype == torch.float64 else None
    return _find_class(transformers.AutoConfig.from_pretrained(folder)).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation=experts
    )


def decode_log_probs(
    model: torch.nn.Module, sequences: list[list[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Return, with gradients, the log-probs of each token but the first; the softmax is in float32 at least."""
    # No token sees the padding after a shorter sequence.
    ids_BL = torch.nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in sequences], batch_first=True)
    logits_BLV = model(ids_BL).logits[:, :-1]
    scaled_BLV = logits_BLV.to(torch.promote_types(logits_BLV.dtype, torch.float32)) / temperature
    chosen_BL = scaled_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
    return [row[: len(tokens) - 1] for row, tokens in zip(chosen_BL, sequences, strict=True)]


def log_probs(
    folder: Path, sequences: list[list[int]], temperature: float = 1.0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Return transformers' log-probs of each token of each sequence but the first."""
    with torch.no_grad(), everything_in(dtype):
        return decode_log_probs(load(folder, dtype), sequences, temperature)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return gradients under the names and in the shapes of the checkpoint: they are saved as if they were weights."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in model.parameters():
            if parameter.grad is None:
                assert hasattr(model.config, "vision_config")
            else:
                parameter.copy_(parameter.grad)
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
        saved = {
            name: gradient
            for name, gradient in saved.items()
            if not name.endswith(_ROUTER_BIAS) and not is_of_tower(name)
        }
        return split_stacks(saved)


def split_stacks(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of each expert in place of those that hold a layer's experts, as GPT-OSS stores them."""
    found = {}
    for name, tensor in stored.items():
        block, _, stem = name.rpartition(".")
        if stem.removesuffix("_bias") not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        kind = "bias" if stem.endswith("_bias") else "weight"
        for expert, own in enumerate(tensor):
            rows = own if kind == "bias" else own.T
            parts = {"gate": rows[0::2], "up": rows[1::2]} if stem.startswith("gate_up") else {"down": rows}
            found |= {f"{block}.{expert}.{part}_proj.{kind}": one.contiguous() for part, one in parts.items()}
    return found


def sequences(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Draw sequences of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
