"""The conditions under which Triton kernels of `ops` run. It imports no Triton."""

import functools
import importlib.util
import os

import torch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refuse_triton(device: str, dtype: torch.dtype) -> str | None:
    """Refuse other dtypes and devices other than CUDA; on the CPU only Triton's interpreter runs the kernels."""
    if device not in ("cuda", "cpu"):
        return f"it is not known to work on {device}"
    if dtype not in _DTYPES:
        return "it supports fp32, fp16 and bf16 only"
    if not _has_triton():
        return "the package triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on the CPU it needs Triton's interpreter, TRITON_INTERPRET=1"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
