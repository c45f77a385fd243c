"""Checks of what changes the whole model: low-rank adapters, --batch-invariant, and Megatron's --batch-invariant-mode.

Those of engines are in `sidecar.vllm.server`.
"""

import os
from collections.abc import Iterator

from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.config.settings import DraftSettings
from megatron_rl.errors import InputError
from megatron_rl.ops import elementwise
from megatron_rl.ops.backends import Conditions
from megatron_rl.shared.weights.adapters import AdapterMapping
from megatron_rl.shared.weights.families import find_family
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.types import MKL_MODE, Architecture, RopeKind
from megatron_rl.versions import find_engine_refusal

FLAG = "--batch-invariant"
MODE_FLAG = "--batch-invariant-mode"
_FAMILY = "qwen3"


def check_lora(settings: DraftSettings) -> Iterator[str]:
    """Yield each mistake in the flags of adapters, and each flag that they exclude."""
    lora = settings.lora
    if lora.dropout:
        yield (
            f"--lora-dropout {lora.dropout:g} must be 0: the policy that is trained would not be the one that engines "
            f"sample from; drop the flag"
        )
    if not lora.rank:
        if settings.publish.lora == "adapter":
            yield "--publish-lora adapter needs --lora-rank: write the rank of the adapters, or drop --publish-lora"
        for field, flag in (("alpha", "--lora-alpha"), ("targets", "--lora-targets"), ("load", "--load-lora")):
            if getattr(lora, field) is not None:
                yield f"{flag} needs --lora-rank: write the rank of the adapters, or drop {flag}"
        return
    if settings.model.hf_model is None:
        yield f"--lora-rank {lora.rank} needs --hf-model: write the folder of the base, whose weights are frozen"
    if lora.load is not None and not lora.load.is_dir():
        yield f"--load-lora {lora.load} must be a folder: write one in PEFT's format"
    if lora.load is not None and settings.model.weights_bridge is not None:
        yield (
            f"--load-lora {lora.load} and --weights-bridge cannot be given together, because a user-defined family is "
            f"compared with transformers at the start, and these adapters change the model: drop --load-lora"
        )
    yield from _check_others(settings)
    yield from _check_engines(settings)
    if settings.architecture is not None:
        yield from _check_targets(settings, settings.architecture)


def _check_others(settings: DraftSettings) -> Iterator[str]:
    """Yield each flag that has no place beside adapters."""
    config, algorithm = settings.transformer, settings.algorithm
    same = "the reference of adapters is their base"
    for flag, is_given, reason in (
        ("--grpo-ref-model", algorithm.ref_model is not None, same),
        ("--grpo-ref-interval", algorithm.ref_interval is not None, same),
        (
            "--frozen-offload",
            settings.loop.frozen_offload and not name_teachers(algorithm.teacher),
            "frozen roles share the policy's weights, which it needs",
        ),
        ("--publish-through ipc", settings.publish.through == "ipc", "merged weights are nowhere in a GPU's memory"),
        ("--grpo-replay-routing", algorithm.replay_routing, "a model with adapters cannot record its own routing yet"),
        (
            "--moe-router-bias-update-rate above 0",
            config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate > 0,
            "the base of adapters does not change",
        ),
    ):
        if is_given:
            yield f"{flag} and --lora-rank cannot be given together, because {reason}: drop one of them"


def _check_engines(settings: DraftSettings) -> Iterator[str]:
    """Yield each reason why engines could not get adapters alone."""
    rollout, rank = settings.rollout, settings.lora.rank
    if settings.publish.lora != "adapter":
        return
    if rollout.transport != "shm":
        yield (
            f"--publish-lora adapter and --rollout-transport {rollout.transport} cannot be given together, because a "
            f"stream carries whole weights: write shm, or --publish-lora merged"
        )
    if settings.model.weights_bridge is not None:
        yield (
            "--publish-lora adapter and --weights-bridge cannot be given together, because engines prove the base by "
            "the families that this package knows: write --publish-lora merged"
        )
    if 0 < rollout.lora_rank < rank:
        yield f"--rollout-lora-rank {rollout.lora_rank} is below --lora-rank {rank}: write at least {rank}, or drop it"


def _check_targets(settings: DraftSettings, model: Architecture) -> Iterator[str]:
    lora, sizes = settings.lora, settings.parallel_sizes
    if find_family(model.family).images is not None:
        yield (
            f"--lora-rank {lora.rank} is not possible with a {model.family} model yet, whose folder holds a vision "
            "model: train all weights, or take a model of text alone"
        )
    try:
        adapters = AdapterMapping(Mapping(model), lora.rank, lora.targets)
    except InputError as error:
        yield str(error)
        return
    has_experts = any(".experts." in spec.name for spec in adapters.manifest("float32"))
    if has_experts and settings.publish.lora == "adapter":
        yield (
            "--publish-lora adapter: the adapters of experts cannot be read back from vLLM's slots yet: write "
            "--publish-lora merged, or --lora-targets without modules of experts"
        )
    if model.latents is not None and settings.publish.lora == "adapter":
        yield (
            "--publish-lora adapter: vLLM joins products of latent attention, whose adapters cannot be read back from "
            "its slots yet: write --publish-lora merged"
        )
    expert_tensor = sizes.expert_tensor or sizes.tensor
    if has_experts and expert_tensor > 1:
        yield (
            f"--lora-targets names modules of experts, which {expert_tensor} ranks divide, and experts with adapters "
            f"cannot be divided: write --expert-tensor-parallel-size 1, or name other modules"
        )


def check_batch_invariant(settings: DraftSettings) -> Iterator[str]:
    """Yield each setting with which a token's log-prob could have other bits than an engine's."""
    # On other devices the trainer has no such operations, and only engines change.
    if not settings.rollout.is_batch_invariant or settings.platform != "cpu":
        return
    model, config, sizes = settings.model, settings.transformer, settings.parallel_sizes
    backends = {
        "--output-layer-backend": model.output_layer_backend,
        "--elementwise-backend": model.elementwise_backend,
        "--qkv-backend": model.qkv_backend,
        "--shared-prompt-backend": settings.attention.backend,
    }
    for flag, is_given, remedy in (
        ("--tensor-model-parallel-size above 1", sizes.tensor > 1, "write 1"),
        ("--context-parallel-size above 1", sizes.context > 1, "write 1"),
        ("--lora-rank", settings.lora.rank > 0, "drop it"),
        ("--fp16", config.fp16, "write --bf16, or neither"),
        ("--transformer-impl transformer_engine", config.transformer_impl != "local", "write local"),
        ("--fp32-residual-connection", config.fp32_residual_connection, "drop it"),
        *((flag, name not in ("auto", "invariant"), "write auto") for flag, name in backends.items()),
    ):
        if is_given:
            yield f"{FLAG} and {flag} cannot be given together, because sums would have other orders: {remedy}"
    trained = "bfloat16" if config.bf16 else "float32"
    for flag, dtype in (("--rollout-dtype", settings.rollout.dtype), ("--publish-dtype", settings.publish.dtype)):
        if dtype not in (None, trained):
            yield f"{flag} {dtype} must be {trained}, as the trainer computes, with {FLAG}: write that, or drop it"
    for name, mode in MKL_MODE.items():
        if (present := os.environ.get(name, mode)) != mode:
            yield f"{name}={present} must be {mode} with {FLAG}, as in engines: unset it"
    if settings.architecture is not None:
        yield from _check_architecture(settings.architecture)


def _check_architecture(one: Architecture) -> Iterator[str]:
    is_plain = one.rope.kind is RopeKind.DEFAULT and one.sliding_window is None and one.activation == "silu"
    if one.family != _FAMILY or not is_plain or one.linear_bias or one.qkv_bias:
        yield (
            f"{FLAG} is for models of the family {_FAMILY} with plain ropes, and without windows and biases: choose "
            "such a model with --hf-model, or drop the flag"
        )


def check_megatron_mode(settings: DraftSettings) -> Iterator[str]:
    """Yield each setting with which Megatron's batch-invariant mode does not compute, or computes something else."""
    config = settings.transformer
    if not getattr(config, "batch_invariant_mode", False):
        return
    if settings.platform != "cuda":
        instead = f", or write {FLAG}" if settings.platform == "cpu" else ""
        yield f"{MODE_FLAG} has kernels for CUDA, not for the platform {settings.platform}: drop it{instead}"
        return
    # Megatron replaces its functions in any case, also for layers that do not call them.
    missing = find_engine_refusal() or elementwise.BACKENDS.find("triton").refusal(
        Conditions("cuda", config.params_dtype)
    )
    if missing is not None:
        yield f"{MODE_FLAG} needs TransformerEngine and Triton, and {missing}: install it, or drop the flag"
    if settings.parallel_sizes.context > 1:
        yield f"{MODE_FLAG} does not go with --context-parallel-size above 1 in Megatron: write 1, or drop the flag"
    if settings.lora.rank > 0:
        # It replaces torch's addmm by one that takes no factor, and adapters scale their products by it.
        yield f"{MODE_FLAG} and --lora-rank cannot be given together, because it cannot scale adapters: drop one"
    if settings.architecture is not None and settings.architecture.zero_centered_norms:
        # Its norms multiply by their weight as it is.
        yield (f"{MODE_FLAG} computes other norms than this model has, whose weights are stored less 1: drop the flag")
