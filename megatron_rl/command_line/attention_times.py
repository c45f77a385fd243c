"""The measured times of attention for the groups of a run, from which `auto` chooses."""

import dataclasses

import torch

from megatron_rl.config.settings import DraftSettings
from megatron_rl.ops.shared_prompt.backends.triton_blocks import BY_CHIP, FLAG, read_blocks
from megatron_rl.ops.shared_prompt.measured import GroupShape, Measured, find_nearest_measured, read_times
from megatron_rl.types import Architecture


def find_measured(settings: DraftSettings, architecture: Architecture, chip: str | None) -> Measured | None:
    """Find the measurement on this chip that is nearest to the groups of the run; None if none is near.

    The file of the user is read first, and a UsageError names it if it has mistakes.
    """
    own = [] if settings.attention.times is None else read_times(settings.attention.times)
    shape = _find_shape(settings, architecture)
    if chip is None or shape is None:
        return None
    return find_nearest_measured(chip, shape, own) or find_nearest_measured(chip, shape, read_times())


def choose_blocks(settings: DraftSettings, measured: Measured | None) -> DraftSettings:
    """Return the settings with the blocks of `triton` chosen; raise a UsageError if no kernel can have the named ones.

    `cudnn` leaves packs to `triton`.
    """
    name, sources, notes = settings.attention.blocks, dict(settings.sources), settings.notes
    if name == "auto":
        name = BY_CHIP
        if measured is not None and measured.blocks is not None and settings.attention.backend in ("triton", "cudnn"):
            name = measured.blocks
            sources["attention.blocks"] = f"{FLAG} auto takes {name}, measured for {measured}"
            notes = (*notes, sources["attention.blocks"])
    elif name != BY_CHIP:
        read_blocks(name)
    attention = dataclasses.replace(settings.attention, blocks=name)
    return dataclasses.replace(settings, attention=attention, sources=sources, notes=notes)


def _find_shape(settings: DraftSettings, architecture: Architecture) -> GroupShape | None:
    """Return the longest group of a run in half precision, and the heads of a rank; None if it has no such groups."""
    response = settings.sampling.max_tokens
    if settings.run.stage != "grpo" or not settings.attention.is_shared or response is None:
        return None
    prompt = settings.data.max_prompt_tokens or (settings.training.seq_length or 0) - response
    # Times were measured with values as wide as keys.
    if architecture.value_channels != architecture.kv_channels:
        return None
    if prompt < 1 or settings.transformer.params_dtype not in (torch.float16, torch.bfloat16):
        return None
    split = settings.parallel_sizes.tensor * settings.parallel_sizes.context
    return GroupShape(
        prompt,
        response,
        settings.algorithm.group_size,
        max(1, architecture.num_attention_heads // split),
        max(1, architecture.num_query_groups // split),
        architecture.kv_channels,
    )
