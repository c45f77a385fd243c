"""Checks of --batch-invariant in the trainer, and of Megatron's --batch-invariant-mode.

Those of engines are in `sidecar.vllm.server`.
"""

import os
from collections.abc import Iterator

from megatron_rl.config.settings import DraftSettings
from megatron_rl.ops.triton_support import refuse_triton
from megatron_rl.types import MKL_MODE, Architecture, RopeKind
from megatron_rl.versions import find_engine_refusal

FLAG = "--batch-invariant"
MODE_FLAG = "--batch-invariant-mode"
_FAMILY = "qwen3"


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
    missing = find_engine_refusal() or refuse_triton("cuda", config.params_dtype)
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
