"""The kernels by name, with the sizes that are checked and those that are timed."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.kernels import layers, others
from benchmarks.kernels.computation import Computation
from megatron_rl.ops.triton_support import refuse_triton

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# For each name: how its computations are listed, the sizes to check on a GPU, and those on a CPU. Programs are slow in
# Triton's interpreter. Most lengths end within a program.
_KERNELS: Mapping[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "elementwise": (
        layers.list_elementwise,
        ((1, 2), (777, 1001), (4099, 3072), (129, 8192), (8704, 1024)),
        ((1, 2), (9, 97)),
    ),
    "qkv": (
        layers.list_heads,
        ((1, 2, 2, 64, True), (777, 8, 2, 128, True), (777, 2, 5, 64, False), (4099, 8, 4, 128, True),
         (301, 4, 1, 96, True), (301, 1, 3, 256, True)),
        ((9, 2, 2, 16, True), (5, 1, 3, 24, False)),
    ),
    "linear": (
        layers.list_linear,
        ((777, 1000, 504), (33, 72, 1001), (4099, 1024, 3072), (1, 8, 8)),
        ((9, 7, 5), (1, 8, 3)),
    ),
    "output_layer": (
        layers.list_output_layers,
        ((1, 64, 151), (33, 64, 9001), (1201, 1024, 20_011)),
        ((5, 16, 301),),
    ),
    "adam": (others.list_adam, (1, 70_001, 5_000_003), (1, 1001)),
    "sampled": (
        others.list_sampled, ((1, 3), (5, 8201), (256, 151_936), (33, 32_001)), ((3, 4099),),
    ),
    "slices": (others.list_slices, ((3, 7), (801, 1001), (1024, 3072)), ((11, 37),)),
}  # fmt: skip
NAMES = tuple(_KERNELS)
# Torch's operations alone.
_WITHOUT_TRITON = ("adam", "linear")


def find_refusal(name: str, device: str) -> str | None:
    """Return why a kernel cannot run on this device; None if it can."""
    return None if name in _WITHOUT_TRITON else refuse_triton(device, torch.float32)


def list_computations(name: str, device: str) -> Iterator[Computation]:
    """Yield the computations to check on a device."""
    make, on_gpu, on_cpu = _KERNELS[name]
    yield from make(on_gpu if device == "cuda" else on_cpu)


def list_timed(device: str) -> Iterator[Computation]:
    """Yield the computations to time: those of a layer of Qwen3-0.6B, one of 30B-A3B's experts, one of 4B's width."""
    is_gpu = device == "cuda"
    rows = 8704 if is_gpu else 5
    # What is listed for each size: SwiGLU, that of experts, a residual with its norm.
    swiglu, experts, residual = range(3)
    widths = {swiglu: (3072,), experts: (768,), residual: (1024, 2560)} if is_gpu else dict.fromkeys(range(3), (40,))
    for kind, of_kind in widths.items():
        for width in of_kind:
            yield list(layers.list_elementwise([(rows, width)]))[kind]
    yield from layers.list_heads([(rows, 8, 2, 128, True) if is_gpu else (rows, 1, 2, 16, True)])
    yield from layers.list_linear([(rows, 1024, 6144) if is_gpu else (rows, 8, 12)])
    yield from others.list_sampled([(256, 151_936) if is_gpu else (2, 4099)])
