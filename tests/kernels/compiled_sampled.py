"""Compile the kernel that scores sampled tokens for GPUs that this machine need not have, and print what it takes.

python -m tests.kernels.compiled_sampled 80 90 gfx942
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.sampled.triton_kernels import NUM_COLUMNS, NUM_WARPS, score_kernel
from tests.kernels.compiled_triton import read_cuda, read_hip


def main() -> None:
    for target in sys.argv[1:]:
        for dtype in ("bf16", "fp16", "fp32"):
            print(json.dumps(compile_kernel(target, dtype)), flush=True)


def compile_kernel(target: str, dtype: str) -> dict[str, Any]:
    """Compile the kernel as the launcher would have it compiled."""
    types = {
        "logits": f"*{dtype}", "row_stride": "i32", "chosen": "*i64", "log_probs": "*fp32", "ranks": "*i64",
        "num_columns": "i32", "COLUMNS": "constexpr",
    }  # fmt: skip
    is_aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if name != "COLUMNS"}
    is_hip = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=score_kernel, signature=types, constexprs={"COLUMNS": NUM_COLUMNS}, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
        options={"num_warps": NUM_WARPS},
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    return {"target": target, "dtype": dtype, "registers": registers, "stack": stack}


if __name__ == "__main__":
    main()
