"""The checks of a sidecar's settings for engines of vLLM's: what these could not run, or not as a run needs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.shared.device_memory import LORA_RANKS
from megatron_rl.shared.weights.families import read_config
from megatron_rl.sidecar.vllm import flags as vllm_flags
from megatron_rl.sidecar.vllm.speculation import find_draft_problems
from megatron_rl.types import Architecture

# The head sizes that vLLM's CPU attention is compiled for. With another one it starts, and the first request fails.
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# The columns that its multi-latent attention keeps of a token.
CPU_LATENT_SIZE = 576

_INVARIANT_FLAG = "--batch-invariant"
_VARYING_FLAGS = (("--worker-cls",), vllm_flags.FLAGS_OF_DRAFTS, ("--enable-lora",), vllm_flags.FLAGS_OF_STAGES)

# Flags of vLLM that are set for a judge already, or would replace what its hash describes.
_FLAGS_OF_JUDGES = (
    "--model", "--tokenizer", "--uds", "--served-model-name", "--api-key", "--config", "--enable-prefix-caching",
    "--max-num-seqs", "--tensor-parallel-size", "-tp", "--generation-config",
)  # fmt: skip


def find_judge_problems(vllm_args: str) -> Iterator[str]:
    """Yield each flag of vLLM that a user may not set for a judge; words that cannot be read are another problem."""
    for flag in _FLAGS_OF_JUDGES:
        if vllm_flags.find_flag(vllm_args, flag):
            yield f"--judge-vllm-args sets {flag}, which is set for the judge already: drop it"


def find_problems(
    rollout: RolloutConfig,
    device: Literal["cpu", "cuda", "npu"],
    hf_model: Path | None,
    architecture: Architecture | None,
    seq_length: int | None,
) -> Iterator[str]:
    """Yield each mistake in settings for engines of vLLM's; --hf-model has the architecture."""
    yield from find_draft_problems(rollout, hf_model)
    yield from find_invariance_problems(rollout, device)
    if rollout.script is not None:
        yield f"--rollout-script {rollout.script} is for --rollout-engine scripted, not {rollout.engine}: drop one"
    yield from vllm_flags.find_problems(rollout.vllm_args)
    if rollout.replay_routing:
        yield from vllm_flags.find_problems_of_replay(rollout.vllm_args)
        if device == "cpu":
            yield "--rollout-replay-routing: vLLM on a CPU does not return experts; drop it, or use accelerators"
    if rollout.lora_rank > (most := LORA_RANKS[-1]):
        yield f"--rollout-lora-rank {rollout.lora_rank} is above {most}, the largest rank of vLLM's: lower --lora-rank"
    if rollout.lora_rank and device == "cpu" and architecture is not None and architecture.experts is not None:
        yield (
            f"--rollout-lora-rank {rollout.lora_rank}: vLLM's kernel for experts on CPUs takes no adapters, so an "
            "engine with slots for them does not start: write --publish-lora merged"
        )
    if hf_model is None:
        yield "--hf-model is missing: engines start from a Hugging Face folder"
    if rollout.max_model_len is None and seq_length is None:
        yield "--rollout-max-model-len is missing: write it, or --seq-length"
    python = rollout.python
    if python is not None and (not python.is_file() or not os.access(python, os.X_OK)):
        yield (
            f"--rollout-python {python} must be a program: name the interpreter of the environment that vLLM is "
            "installed in, its bin/python"
        )
    if architecture is not None:
        if hf_model is not None and read_config(hf_model).get("quantization_config"):
            yield (
                f"--hf-model {hf_model} has a quantization_config, and engines get weights that are not "
                "quantized: write a folder without it by megatron-rl convert --hf-model DIR --save-hf DIR, and name it"
            )
        size, length = rollout.tensor_parallel_size, rollout.max_model_len
        yield from find_model_problems(architecture, device, size, length, rollout.dtype)


def find_model_problems(
    model: Architecture,
    device: Literal["cpu", "cuda", "npu"],
    tensor_parallel_size: int,
    max_model_len: int | None,
    dtype: str | None = None,
) -> Iterator[str]:
    """Yield each reason why an engine could not run this model, in its own dtype or another."""
    dtype = dtype or model.dtype
    if device == "cpu" and model.linear is not None and dtype != "bfloat16":
        yield (
            f"--hf-model: vLLM's linear layers compute in bfloat16 on a CPU, and the engines' dtype is {dtype}: write "
            "--rollout-dtype bfloat16, and --publish-dtype bfloat16 for the trainer, or choose engines on accelerators"
        )
    if device == "cpu" and model.has_sinks and dtype == "float16":
        yield (
            "--hf-model: in float16 vLLM's attention on a CPU computes with a copy of the model's sinks, which no "
            "publish changes: write --rollout-dtype bfloat16 or float32, or choose engines on accelerators"
        )
    latents = model.latents
    if device == "cpu" and latents is not None and model.cached_channels != CPU_LATENT_SIZE:
        yield (
            f"--hf-model: a token's narrow row has {latents.kv_rank} + {latents.rotary_dim} columns (kv_lora_rank and "
            f"qk_rope_head_dim), and vLLM's attention on a CPU takes {CPU_LATENT_SIZE}: choose a model with these, or "
            "engines on accelerators"
        )
    if device == "cpu" and latents is None and model.kv_channels not in CPU_HEAD_SIZES:
        yield (
            f"--hf-model: the model's heads have {model.kv_channels} columns (head_dim), and vLLM's attention on a CPU "
            f"takes {', '.join(map(str, CPU_HEAD_SIZES))}: choose a model with one of these, or engines on accelerators"
        )
    yield from _division(model, tensor_parallel_size)
    longest = model.longest_sequence
    if max_model_len is not None and max_model_len > longest:
        yield (
            f"--rollout-max-model-len {max_model_len} is above the model's longest sequence, {longest} "
            "(max_position_embeddings): write at most that"
        )


def _division(model: Architecture, size: int) -> Iterator[str]:
    """Yield a problem if parts of the model do not divide evenly; several devices may hold the same keys and values."""
    if size < 1:
        return
    groups = model.num_query_groups
    experts = model.experts
    shared = experts.shared_ffn_hidden_size if experts else 0
    uneven = [
        what
        for is_even, what in (
            (model.num_attention_heads % size == 0, f"{model.num_attention_heads} attention heads"),
            (max(groups, size) % min(groups, size) == 0, f"{groups} heads of keys and values"),
            (
                model.linear is None or model.linear.num_key_heads % size == 0,
                f"{model.linear and model.linear.num_key_heads} key heads of linear layers",
            ),
            (
                not experts or experts.ffn_hidden_size % size == 0,
                f"{experts and experts.ffn_hidden_size} columns of an expert",
            ),
            (shared % size == 0, f"{shared} columns of the shared expert"),
            (model.has_experts(0) or model.ffn_hidden_size % size == 0, f"{model.ffn_hidden_size} columns of the MLP"),
        )
        if not is_even
    ]
    if uneven:
        yield (
            f"--rollout-tensor-parallel-size {size}: the model's {' and '.join(uneven)} cannot be divided by it: write "
            "another number"
        )


def find_invariance_problems(rollout: RolloutConfig, device: str) -> Iterator[str]:
    """Yield each setting with which engines could not compute each token's log-prob to the same bits."""
    if not rollout.is_batch_invariant:
        return
    if device == "npu":
        yield f"{_INVARIANT_FLAG} is for engines on a CPU or on CUDA: drop it"
    for flag, is_given in (
        ("--rollout-tensor-parallel-size above 1", rollout.tensor_parallel_size > 1),
        ("--rollout-speculative", rollout.speculative is not None),
        ("--rollout-lora-rank", rollout.lora_rank > 0),
        *(
            (f"{vllm_flags.FLAG} with {flag}", True)
            for flags in _VARYING_FLAGS
            if (flag := vllm_flags.find_flag(rollout.vllm_args, *flags))
        ),
    ):
        if is_given and device == "cpu":
            yield (
                f"{_INVARIANT_FLAG} and {flag} cannot be given together, because sums would have other orders: drop "
                "one of them"
            )
