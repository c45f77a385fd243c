"""Huawei's Ascend NPUs, through torch_npu and MindSpeed.

This module is written against the sources of MindSpeed's branch core_r0.16.0; it has not run on an NPU.
"""

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from megatron_rl import versions
from megatron_rl.errors import PlatformError
from megatron_rl.platforms.host import is_bound_to_cores
from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.platforms.platform import Accelerator, sum_in_fixed_order

# The minor version of megatron-core, MindSpeed's branch for it, and the version in that branch's setup.py.
_MINDSPEED = {"0.16": ("core_r0.16.0", "0.16")}


class NpuPlatform(Accelerator):
    """One rank an NPU."""

    noun = "NPU"
    name = "npu"
    device_type = "npu"
    collective_backend = "hccl"
    weight_transports = ("shm", "hccl")
    # MindSpeed replaces the class with which Megatron computes norms again.
    cheap_modules = ()

    @property
    def namespace(self) -> Any:
        return _npu()

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]:
        # MindSpeed has kernels for the other fusions. Its fused rope and fused norm depend on its own flags.
        return {"apply_rope_fusion": False, "persist_layer_norm": False}

    def _prepare(self) -> None:
        """Check everything before MindSpeed changes torch."""
        _check_torch_npu()
        _check_mindspeed()
        if not is_bound_to_cores():
            # This keeps an NPU's threads on that NPU's own cores. torch_npu reads the variable when it is loaded.
            os.environ.setdefault("CPU_AFFINITY_CONF", "1")

    def _after_install(self) -> None:
        # torch_npu comes first, since the adaptor needs it. The adaptor installs stand-ins for TransformerEngine and
        # apex before it imports megatron, so nothing may import megatron earlier.
        _load("torch_npu", "run CANN's set_env.sh in this shell, and install the torch_npu that was built for torch")
        # The adaptor parses the command line itself, and puts flags that it knows, unconverted, into configurations.
        with replaced(sys, "argv", sys.argv[:1]):
            _load(
                "mindspeed.megatron_adaptor",
                "install MindSpeed from its branch for your megatron-core, and its dependencies",
            )
        if not _npu().is_available():
            raise PlatformError("torch_npu finds no NPU; check npu-smi info and ASCEND_RT_VISIBLE_DEVICES")

    def place(self, num_threads: int) -> None:
        """Do nothing: torch_npu binds threads itself, by CPU_AFFINITY_CONF."""

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        return "torch_npu has no function for it"

    def page_unlock(self, mapped: torch.Tensor) -> None:
        """Do nothing, since nothing was locked."""

    def choose_fixed_order(self) -> None:
        sum_in_fixed_order({"HCCL_DETERMINISTIC": "true"})


def has_device() -> bool:
    """Return whether torch_npu loads and finds a device; log a warning if it is installed but does not load."""
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        logging.getLogger(__name__).warning("torch_npu is installed but does not load, so no NPU is used: %s", error)
        return False
    return bool(_npu().is_available())


def _npu() -> Any:
    """Return the namespace that torch_npu adds to torch."""
    return torch.npu  # type: ignore[attr-defined]


def _load(name: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PlatformError(f"{name} does not load ({error}): {remedy}") from error


def _check_torch_npu() -> None:
    wanted = _leading(torch.__version__, 3)
    found = versions.installed("torch_npu")
    if found is None:
        raise PlatformError(f"torch_npu is not installed: pip install torch_npu=={wanted}, beside CANN")
    if _leading(found, 3) != wanted:
        raise PlatformError(
            f"torch_npu is {found}, torch is {torch.__version__}: the two must have the same version, install "
            f"torch_npu=={wanted} or the torch that this torch_npu was built for"
        )


def _check_mindspeed() -> None:
    megatron = versions.installed("megatron-core") or ""
    minor = _leading(megatron, 2)
    if minor not in _MINDSPEED:
        raise PlatformError(
            f"NPUs are supported with megatron-core {', '.join(_MINDSPEED)}, and this is {megatron}: from 0.17 on "
            "MindSpeed leaves Megatron to MegatronAdaptor and TransformerEngineNPU, with which this package has not "
            f"been tried; pip install 'megatron-core=={', '.join(_MINDSPEED)}.*'"
        )
    branch, version = _MINDSPEED[minor]
    remedy = f"git checkout {branch} in a clone of MindSpeed, then pip install -e MindSpeed"
    found = versions.installed("mindspeed")
    if found is None:
        raise PlatformError(f"mindspeed is not installed: {remedy}")
    if _leading(found, 2) != version:
        raise PlatformError(
            f"mindspeed is {found}, megatron-core is {megatron}, which needs the branch {branch}: {remedy}"
        )


def _leading(version: str, count: int) -> str:
    """Return the first `count` numbers of a version: 2.7 of 2.7.1.post2 for a count of 2."""
    return ".".join(map(str, versions.release(version)[:count]))
