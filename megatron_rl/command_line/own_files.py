"""The flags of a run's objective, and its files of user-defined code, for records."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.algorithm.plug_ins import describe_plug_ins
from megatron_rl.config.settings import DraftSettings
from megatron_rl.flag import derive_flags, format_value, names_function
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.weights.families import describe_guest

# Subjects whose flags decide what is rewarded and how the policy learns from it; None stands for all but _NO_OBJECTIVE.
_SUBJECTS: dict[str, frozenset[str] | None] = {
    "algorithm": None,
    "sampling": None,
    "environment": frozenset({"source", "max_turns", "on_error", "agent", "verifiers"}),
    "reward": frozenset({"functions", "on_error"}),
}
# Metrics change nothing, and the reference's weights are compared by their fingerprint.
_NO_OBJECTIVE = frozenset({"metrics", "ref_model"})


def describe_own_files(settings: DraftSettings) -> dict[str, str]:
    """Map each flag with its FILE.py:NAME to the hash of the file."""
    return describe_plug_ins(settings.algorithm) | describe_guest(settings.model.weights_bridge)


def describe_objective(settings: DraftSettings) -> dict[str, str]:
    """Map each flag of the objective to its value, and each file that they name to its hash."""
    if settings.run.stage != "grpo":
        return {}
    return dict(_list_values(settings)) | {str(path): text for path, text in _list_hashes(settings)}


def _list_values(settings: DraftSettings) -> Iterator[tuple[str, str]]:
    for subject, names in _SUBJECTS.items():
        config = getattr(settings, subject)
        for flag, field in zip(derive_flags(type(config), subject), dataclasses.fields(config), strict=True):
            value = getattr(config, field.name)
            if field.name in _NO_OBJECTIVE or (names is not None and field.name not in names):
                continue
            if flag.is_switch:
                yield flag.name, "on" if value == flag.const else "off"
            else:
                yield flag.name, "not given" if value is None else format_value(value)


def _list_hashes(settings: DraftSettings) -> Iterator[tuple[Path, str]]:
    """Yield the files of rewards, environments and agents, each with its hash; one on another host has none."""
    specs = parse_specs(settings.reward.functions or (), settings.reward.timeout)
    named = (settings.environment.source, settings.environment.agent)
    others = [source.rpartition(":")[0] for source in named if source is not None and names_function(source)]
    for path in [*(spec.source for spec in specs if spec.is_file), *others]:
        with contextlib.suppress(OSError):
            yield Path(path), f"sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
