"""The conditions under which Triton kernels of `ops` run. It imports no Triton before it is called."""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def without_compile_hook() -> Iterator[None]:
    """Compile without the hook of another package, such as vLLM's, which warns of kernels after its warm-up or fails.

    Our kernels compile when an engine is prepared and at its first publish, while it serves no request.
    """
    try:
        from triton import knobs

        runtime: Any = knobs.runtime
        hook, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    except (ImportError, AttributeError):
        # No Triton, or one that has no such hook, as Ascend's.
        yield
        return
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = hook


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
