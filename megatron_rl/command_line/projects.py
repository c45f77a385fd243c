"""Defaults of other projects' launch scripts, and flags that follow from several of their flags together."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.errors import UsageError

Words = Mapping[str, Sequence[str]]
"""Flags as they were written, each with its values."""


def is_of_project(project: Mapping[str, Any], written: Words) -> bool:
    """Check whether a flag shows that a script belongs to this project."""
    return not written.keys().isdisjoint(project.get("signs", "").split())


def list_implied(project: Mapping[str, Any], written: Words) -> dict[str, list[str]]:
    """List the flags that hold in a project without being written, each with its values."""
    implied = {}
    for text, unless in project.get("implies", {}).items():
        name, *values = text.split()
        if written.keys().isdisjoint(unless.split()):
            implied[name] = list(written.get(project.get("follows", {}).get(name), values))
    return implied | list_implied_by(project, written)


def list_implied_by(project: Mapping[str, Any], written: Words) -> dict[str, list[str]]:
    """List the flags that single flags of a project imply, each with its values."""
    return {
        text.split()[0]: text.split()[1:] for name, text in project.get("implied_by", {}).items() if name in written
    }


def choose_estimator(estimator: str | None, is_unbiased: bool) -> str:
    """Return this package's name for slime's estimator of a divergence in the loss.

    A divergence that is weighted by the ratio has the same mean gradient with k1 as with k3.
    """
    estimator = estimator or "k1"
    if is_unbiased and estimator == "k2":
        raise UsageError("--use-unbiased-kl with --kl-loss-type k2 has no estimator here: write --kl-loss-type k3")
    return "unbiased" if is_unbiased else estimator
