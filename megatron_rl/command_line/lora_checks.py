"""Checks of the flags of low-rank adapters."""

from collections.abc import Iterator

from megatron_rl.config.settings import DraftSettings
from megatron_rl.errors import InputError
from megatron_rl.shared.weights.adapters import AdapterMapping
from megatron_rl.shared.weights.families import find_family
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.types import Architecture


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
        ("--frozen-offload", settings.loop.frozen_offload, "frozen roles share the policy's weights, which it needs"),
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
