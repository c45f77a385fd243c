"""The host that ranks run on: cores to bind a process to, gloo's device, and oneDNN's products of fp32 matrices."""

import datetime
import functools
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from megatron_rl.types import MKL_MODE

_log = logging.getLogger(__name__)
_NEEDED = ("_Options", "create_default_device", "create_device")
_INTERFACES = "GLOO_SOCKET_IFNAME"
_MARK = "_shares_device"
_CPUINFO = Path("/proc/cpuinfo")
# The registration of a kernel lasts as long as this object.
_library: torch.library.Library | None = None


def read_core_list(path: Path) -> set[int]:
    """Read a list of cores as the kernel writes it, "0-31,64-95"; return an empty set if it cannot be read."""
    try:
        parts = [part.split("-") for part in path.read_text().split(",")]
        return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def is_bound_to_cores() -> bool:
    """Return whether this process is already bound to some of the host's cores."""
    return len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def bind_to_cores(cores: set[int]) -> None:
    """Bind this process to these cores, unless it is already bound or may not use them."""
    if cores and not is_bound_to_cores() and cores <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)


def share_gloo_device() -> None:
    """Give all groups that this process makes the same devices of gloo; a second call does nothing.

    torch makes a device for each group, and a device's thread wakes up a hundred times a second to check whether it
    must end. Megatron makes some forty groups, so a rank that only waits takes 4 % of a core, which other ranks need.
    """
    group = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if group is None or not all(hasattr(group, name) for name in _NEEDED):
        _log.info("the groups of gloo cannot share a device in this torch: each has a thread of its own")
        return
    if hasattr(group, _MARK):
        return
    original = group.__init__

    @functools.cache
    def find_devices() -> list[Any]:
        # The default device is that of the host's name, which may be the loopback.
        names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
        return [group.create_device(interface=name) for name in names] or [group.create_default_device()]

    @functools.wraps(original)
    def make(self: Any, store: Any, rank: int, size: int, *others: Any, **keywords: Any) -> None:
        timeout = keywords.get("timeout")
        if others or len(keywords) != 1 or not isinstance(timeout, datetime.timedelta):
            # The caller has chosen a device by other options.
            original(self, store, rank, size, *others, **keywords)
            return
        options = group._Options()
        options._devices = find_devices()
        options._timeout = timeout
        original(self, store, rank, size, options)

    group.__init__ = make
    setattr(group, _MARK, True)


def choose_mkl_mode() -> None:
    """Have MKL compute fp32 products whose bits do not depend on the number of threads, unless a mode is set.

    MKL reads the variable at its first call in a process. Products are as fast as without it.
    """
    for name, mode in MKL_MODE.items():
        os.environ.setdefault(name, mode)


def multiply_with_onednn() -> None:
    """Make torch's `mm` use oneDNN for fp32 if MKL has no kernels for the processor's vector units.

    torch uses MKL, which uses AVX-512 on Intel's processors only. On an AMD EPYC with AVX-512, oneDNN does 2.2 times
    the operations a second. Both compute in fp32 throughout. On other processors nothing changes.
    """
    if torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available() and _vendor() == "AuthenticAMD":
        replace_mm()


def _vendor() -> str | None:
    """Read the vendor that this processor names; return None if it names none."""
    try:
        with _CPUINFO.open(encoding="utf-8") as file:
            return next((line.split(":")[1].strip() for line in file if line.startswith("vendor_id")), None)
    except OSError:
        return None


def replace_mm() -> None:
    """Make torch's `mm` use oneDNN for fp32 on any processor; a second call does nothing."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        _library.impl("mm", _mm, "CPU")


def _mm(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    if not _fits(a_MK, b_KN):
        # This is torch's own kernel: only the operator without `out` is replaced.
        return torch.ops.aten.mm.out(a_MK, b_KN, out=a_MK.new_empty(0))
    rows, columns = b_KN.stride()
    # oneDNN takes rows or columns with gaps between them, but not elements that share memory.
    if not ((columns == 1 and rows >= b_KN.shape[1]) or (rows == 1 and columns >= b_KN.shape[0])):
        b_KN = b_KN.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(a_MK, b_KN.t(), None, "none", [], "")


def _fits(a_MK: torch.Tensor, b_KN: torch.Tensor) -> bool:
    """Return whether oneDNN can compute this product; torch reports products that are wrong."""
    return (
        a_MK.dtype is torch.float32
        and b_KN.dtype is torch.float32
        and a_MK.dim() == b_KN.dim() == 2
        and a_MK.shape[1] == b_KN.shape[0]
        and a_MK.numel() > 0
        and b_KN.numel() > 0
    )
