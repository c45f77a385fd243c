"""Compile the kernels that split heads for GPUs that this machine need not have, and print what each takes.

python -m tests.kernels.compiled_qkv 90 gfx942
"""

import dataclasses
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.qkv import triton_fused, triton_kernels
from tests.kernels.compiled_triton import read_cuda, read_hip


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model; `rotated` pairs rotate."""

    queries: int
    head_dim: int
    rotated: int
    dtype: str = "bf16"
    is_normalized: bool = True


SHAPES = (
    Shape(2, 128, 64),
    Shape(8, 128, 64, is_normalized=False),
    Shape(2, 64, 32, "fp16"),
    Shape(4, 256, 64, "fp32"),
    Shape(4, 80, 40),
)


def main() -> None:
    for target in sys.argv[1:]:
        for shape in SHAPES:
            for name in ("split_heads_kernel", "heads_gradient_kernel"):
                print(json.dumps(compile_kernel(target, name, shape)), flush=True)


def compile_kernel(target: str, name: str, shape: Shape) -> dict[str, Any]:
    """Compile a kernel as the launcher would have it compiled."""
    kernel = getattr(triton_kernels, name)
    sizes = {
        "QUERIES": shape.queries, "HEAD_DIM": shape.head_dim, "ROTATED": shape.rotated,
        "IS_NORMALIZED": shape.is_normalized, "ADDED": 0, "TILES": triton_fused.count_tiles(shape.is_normalized),
        **triton_fused.compute_sizes(shape.head_dim),
    }  # fmt: skip
    signature = {parameter.name: _type_of(parameter, shape.dtype) for parameter in kernel.params}
    constants = {parameter: sizes[parameter] for parameter, kind in signature.items() if kind == "constexpr"}
    is_aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    is_hip = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
        options={"num_warps": triton_fused.NUM_WARPS},
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
    return {
        "target": target, "kernel": name, **dataclasses.asdict(shape), "registers": registers, "stack": stack,
        "num_atomics": assembly.count("global_atomic") if is_hip else assembly.count("atom."),
        "num_wide_loads": assembly.count("global_load_dwordx4") + assembly.count("ld.global.v4.b32"),
        "num_narrow_loads": assembly.count("global_load_ushort") + assembly.count("ld.global.b16"),
    }  # fmt: skip


def _type_of(parameter: Any, dtype: str) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name == "num_rows":
        return "i32"
    if parameter.name in ("rotation_T2F", "partial_2D"):
        return "*fp32"
    return "fp32" if parameter.name == "epsilon" else f"*{dtype}"


if __name__ == "__main__":
    main()
