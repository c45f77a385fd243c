"""The flags that only one stage has: --stage sft does not sample, reward or publish."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import get_type_hints

from megatron_rl.config.settings import DraftSettings, Subjects

# Subjects about sampling, each with the fields that --stage sft reads too.
_READ_BY_BOTH: Mapping[str, tuple[str, ...]] = {
    "rollout": ("folder",),
    "publish": ("dtype",),
    "environment": (),
    "reward": (),
    "sampling": (),
    "service": (),
    "algorithm": (),
}
# The fields of the other subjects that are about sampling, and those that are about demonstrations.
_OF_SAMPLING: Mapping[str, tuple[str, ...]] = {
    "attention": ("is_shared", "times"),
    "data": ("answer_key", "max_prompt_tokens", "rest_below", "rest_above", "rest_epochs"),
    "loop": ("schedule", "consume_order", "frozen_offload", "tri_model"),
    "evaluation": ("num_samples", "temperature", "pass_reward"),
    "observe": ("log_samples", "log_sample_tokens", "mismatch_warning", "mismatch_error"),
}
_OF_DEMONSTRATIONS: Mapping[str, tuple[str, ...]] = {"data": ("completion_key", "messages_key")}


def list_others() -> dict[str, tuple[str, ...]]:
    """List, by stage, the fields that only the other stage reads, as "subject.field"."""
    configs = get_type_hints(Subjects)
    of_sampling = [
        f"{subject}.{field.name}"
        for subject, kept in _READ_BY_BOTH.items()
        for field in dataclasses.fields(configs[subject])
        if field.name not in kept
    ]
    return {"sft": (*of_sampling, *_join(_OF_SAMPLING)), "grpo": _join(_OF_DEMONSTRATIONS)}


def check_stage(settings: DraftSettings) -> Iterator[str]:
    """Yield each written flag that only the other stage has."""
    stage = settings.run.stage
    needed = "--stage grpo, which samples responses" if stage == "sft" else "--stage sft, which reads responses"
    # A flag such as --algorithm sets several fields.
    sources = {settings.sources.get(target, ""): None for target in list_others()[stage]}
    for source in sources:
        if source.startswith("--"):
            yield f"{source} needs {needed}: write that, or drop {source.partition(' ')[0]}"


def _join(fields: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(f"{subject}.{field}" for subject, names in fields.items() for field in names)
