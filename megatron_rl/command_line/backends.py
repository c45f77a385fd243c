"""The backends of a run's operations, and the measured times of attention from which `auto` chooses."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl import platforms
from megatron_rl.config.settings import DraftSettings
from megatron_rl.errors import UsageError
from megatron_rl.ops import shared_prompt
from megatron_rl.ops.backends import Choice, Conditions
from megatron_rl.ops.operations import OPERATIONS
from megatron_rl.types import Architecture

if TYPE_CHECKING:
    from megatron_rl.ops.shared_prompt.measured import GroupShape, Measured

# Only chips have them.
_MEASURED = "megatron_rl.ops.shared_prompt.measured"
_BLOCKS = "megatron_rl.ops.shared_prompt.backends.triton_blocks"
_BY_CHIP = "chip"
Report = Callable[[Iterable[str]], None]
"""A function that takes problems."""


def choose_backends(
    settings: DraftSettings, architecture: Architecture, chip: str | None, report: Report
) -> DraftSettings:
    """Return the settings with the backends that will run, of each operation that has several.

    A backend that is named and cannot run is reported. `chip` is the name of this host's devices.
    """
    device, dtype = platforms.select(settings.platform).device_type, settings.transformer.params_dtype
    if settings.rollout.is_batch_invariant and device == "cpu":
        # `check_batch_invariant` allows no others.
        name: Any = "invariant"
        model = dataclasses.replace(
            settings.model, output_layer_backend=name, elementwise_backend=name, qkv_backend=name
        )
        return dataclasses.replace(
            settings, model=model, attention=dataclasses.replace(settings.attention, backend=name)
        )
    conditions = Conditions.of(device, dtype, architecture)
    settings = _choose_attention(settings, architecture, chip, report, conditions)
    for target, backends in OPERATIONS.items():
        if target != "attention.backend" and backends.is_used(conditions):
            choose = functools.partial(backends.choose, conditions=conditions)
            settings = _choose_backend(settings, target, report, choose)
    return settings


def _choose_attention(
    settings: DraftSettings,
    architecture: Architecture,
    chip: str | None,
    report: Report,
    conditions: Conditions,
) -> DraftSettings:
    """Return the settings with the backend of attention, from measured times if there are any, and its blocks."""
    try:
        near = find_measured(settings, architecture, chip)
        settings = _choose_backend(
            settings,
            "attention.backend",
            report,
            lambda name: shared_prompt.choose_backend(name, conditions, near),
            is_said=near is not None,
        )
        return choose_blocks(settings, near)
    except UsageError as error:
        report(error.problems)
        return settings


def _choose_backend(
    settings: DraftSettings,
    target: str,
    report: Report,
    choose: Callable[[str], Choice],
    is_said: bool = False,
) -> DraftSettings:
    """Return the settings with a field's backend chosen; if the named one cannot run, report that."""
    subject, field = target.split(".")
    config: Any = getattr(settings, subject)
    try:
        choice = choose(getattr(config, field))
    except UsageError as error:
        report(error.problems)
        return settings
    changed = {subject: dataclasses.replace(config, **{field: choice.name})}
    sources = dict(settings.sources)
    if choice.notes:
        sources[target] = "; ".join(choice.notes)
    notes = (*settings.notes, *(choice.notes if is_said or settings.observe.verbose else ()))
    return dataclasses.replace(settings, **changed, sources=sources, notes=notes)


def find_measured(settings: DraftSettings, architecture: Architecture, chip: str | None) -> "Measured | None":
    """Find the measurement on this chip that is nearest to the groups of the run; None if none is near.

    The file of the user is read first, and a UsageError names it if it has mistakes.
    """
    if chip is None and settings.attention.times is None:
        return None
    measured: Any = importlib.import_module(_MEASURED)
    own = [] if settings.attention.times is None else measured.read_times(settings.attention.times)
    shape = _find_shape(settings, architecture)
    if chip is None or shape is None:
        return None
    near: Measured | None = measured.find_nearest_measured(chip, shape, own)
    return near or measured.find_nearest_measured(chip, shape, measured.read_times())  # type: ignore[no-any-return]


def choose_blocks(settings: DraftSettings, measured: "Measured | None") -> DraftSettings:
    """Return the settings with the blocks of `triton` chosen; raise a UsageError if no kernel can have the named ones.

    `cudnn` leaves packs to `triton`.
    """
    name, sources, notes = settings.attention.blocks, dict(settings.sources), settings.notes
    if name == "auto":
        name = _BY_CHIP
        if measured is not None and measured.blocks is not None and settings.attention.backend in ("triton", "cudnn"):
            name = measured.blocks
            sources["attention.blocks"] = f"--shared-prompt-blocks auto takes {name}, measured for {measured}"
            notes = (*notes, sources["attention.blocks"])
    elif name != _BY_CHIP:
        importlib.import_module(_BLOCKS).read_blocks(name)
    attention = dataclasses.replace(settings.attention, blocks=name)
    return dataclasses.replace(settings, attention=attention, sources=sources, notes=notes)


def _find_shape(settings: DraftSettings, architecture: Architecture) -> "GroupShape | None":
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
    return importlib.import_module(_MEASURED).GroupShape(  # type: ignore[no-any-return]
        prompt,
        response,
        settings.algorithm.group_size,
        max(1, architecture.num_attention_heads // split),
        max(1, architecture.num_query_groups // split),
        architecture.kv_channels,
    )
