"""Compile the kernel that joins results of attention for GPUs that this machine need not have, and print what it takes.

python -m tests.kernels.compiled_join 80 90 100
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.shared_prompt.backends.join import NUM_WARPS, ROWS, compute_columns
from megatron_rl.ops.shared_prompt.backends.join_kernels import join_results_kernel
from tests.kernels.compiled_triton import read_cuda


def main() -> None:
    for target in sys.argv[1:]:
        for dtype, head_dim in (("bf16", 128), ("fp16", 256)):
            print(json.dumps(compile_kernel(target, dtype, head_dim)), flush=True)


def compile_kernel(target: str, dtype: str, head_dim: int) -> dict[str, Any]:
    """Compile the kernel as the launcher would have it compiled."""
    sizes = {"HEAD_DIM": head_dim, "WIDTH": compute_columns(head_dim), "ROWS": ROWS}
    types = {
        parameter.name: "constexpr" if parameter.is_constexpr
        else f"*{dtype}" if parameter.name.endswith("_NHD")
        else "i32" if parameter.name in ("num_rows", "length") else "*fp32"
        for parameter in join_results_kernel.params
    }  # fmt: skip
    is_aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    compiled = triton.compile(
        ASTSource(fn=join_results_kernel, signature=types, constexprs=sizes, attrs=is_aligned),
        target=GPUTarget("cuda", int(target), 32),
        options={"num_warps": NUM_WARPS},
    )
    registers, stack = read_cuda(compiled.asm["cubin"])
    return {"target": target, "dtype": dtype, "head_dim": head_dim, "registers": registers, "stack": stack}


if __name__ == "__main__":
    main()
