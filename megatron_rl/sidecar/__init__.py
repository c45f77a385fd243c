"""The rollout service, which samples groups with engines that it keeps alive and at one version."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Literal

OPTIONAL_PARTS: Mapping[str, str] = {
    # --rollout-hosts
    "hosts": "megatron_rl.sidecar.hosts.membership",
    # --rollout-env
    "environments": "megatron_rl.sidecar.user_environments",
    # --rollout-agent, --rollout-verifiers
    "agents": "megatron_rl.sidecar.agent_rollouts",
    # --reward judge:FOLDER
    "judge": "megatron_rl.sidecar.judge",
    # --teacher NAME=engines:FOLDER
    "teachers": "megatron_rl.sidecar.teachers",
    # --eval-command
    "eval_command": "megatron_rl.sidecar.eval_command",
}
"""The modules that only some runs need. They are imported when a setting asks for them, and by nothing else."""


def load_part(
    name: Literal["hosts", "environments", "agents", "judge", "teachers", "eval_command"],
) -> ModuleType:
    """Import an optional part, and return its module."""
    return importlib.import_module(OPTIONAL_PARTS[name])
