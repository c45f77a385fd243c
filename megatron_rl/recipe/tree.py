"""Which Megatron a recipe runs in: megatron.training and megatron.core must be of one copy."""

import importlib.util
from pathlib import Path

from megatron_rl.errors import PlatformError


def check_one_tree() -> Path:
    """Return the folder that both are in. The platform must be installed; nothing of Megatron need be imported."""
    training, core = _find("megatron.training"), _find("megatron.core")
    if core is None:
        raise PlatformError("megatron.core is not found: install megatron-core, or start in a Megatron-LM tree")
    if training is None:
        raise PlatformError(
            f"megatron.training is not found beside {core / 'core'}: start a script of a Megatron-LM tree, or put the "
            "tree on PYTHONPATH; up to 0.18 the wheel of megatron-core does not hold it"
        )
    if training != core:
        raise PlatformError(
            f"two copies of Megatron are on the path: megatron.core is of {core}, megatron.training of {training}; "
            f"put the tree {training.parent} first on PYTHONPATH, or uninstall the other copy"
        )
    return core


def _find(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    # Links are not followed: a tree may borrow its core.
    return Path(next(iter(spec.submodule_search_locations))).absolute().parent
