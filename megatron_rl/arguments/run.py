"""The settings of a run that trains: those of its command line, and all that follows from them."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_rl.arguments.model_checks import countable_sizes
from megatron_rl.arguments.plan import Sizes, resolve_sizes, run_folder
from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.child import problems as sidecar_problems
from megatron_rl.sidecar.settings import SidecarSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """What every rank of a run is made of."""

    sizes: Sizes
    folder: Path
    """Where everything of the run lies but its checkpoints."""
    sidecar: SidecarSettings | None
    """Of the sidecar that rank 0 starts; None with one that is running."""


def resolve_run(settings: Settings, is_first: bool) -> tuple[RunSettings | None, list[str]]:
    """The settings of the run, and everything that is wrong with it beside what is wrong with any command.

    What the sidecar needs is on the host of the first rank, which starts it.
    """
    replicas = None
    if settings.world_size is not None:
        # Too few ranks are a problem of their own.
        replicas = max(1, settings.world_size // countable_sizes(settings).model)
    sizes, problems = resolve_sizes(settings, replicas)
    folder = None
    try:
        folder = run_folder(settings)
    except UsageError as error:
        problems += error.problems
    sidecar = None if settings.service.endpoint is not None else sidecar_of(settings, folder)
    if is_first:
        longest = None if sizes is None else sizes.longest_prompt + sizes.longest_response
        problems += sidecar_problems(settings, sidecar, longest)
    if sizes is None or folder is None:
        return None, problems
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Settings)}
    return RunSettings(**given, sizes=sizes, folder=folder, sidecar=sidecar), problems


def sidecar_of(settings: Settings, folder: Path | None) -> SidecarSettings:
    """What a run says to the sidecar that it starts."""
    platform: Any = settings.platform
    # A run that is killed goes on from its checkpoint: the groups since then are not generated again.
    journals = max(settings.rollout.retain_journals, (settings.checkpoint.save_interval or 0) + 1)
    return SidecarSettings(
        platform=platform,
        hf_model=settings.model.hf_model,
        seq_length=settings.training.seq_length,
        rollout=dataclasses.replace(settings.rollout, folder=folder, retain_journals=journals),
        reward=settings.reward,
    )
