"""Compile the kernels of element-wise work for GPUs that this machine need not have, and print what each takes.

python -m tests.kernels.compiled_elementwise few 90 gfx942

`few` compiles a selection, and `all` every dtype, width and use of the sum.
"""

import itertools
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.elementwise import triton_fused, triton_kernels
from tests.kernels.compiled_triton import read_cuda, read_hip

# A width of SwiGLU fits into the programs of all; a norm's program has whole rows.
WIDTHS = {"few": (1024, triton_fused.MOST_HIDDEN_SIZE), "all": (1024, 2048, 4096, triton_fused.MOST_HIDDEN_SIZE)}
DTYPES = {"few": ("bf16", "fp32"), "all": ("bf16", "fp16", "fp32")}
_PART_OF_ROW = {"COLUMNS": triton_fused.SWIGLU_COLUMNS, "num_warps": triton_fused.SWIGLU_WARPS}
_ROW = {"COLUMNS": triton_fused.SUMMING_COLUMNS, "num_warps": triton_fused.SUMMING_WARPS}
SWIGLU = {
    "swiglu_kernel": _PART_OF_ROW,
    "swiglu_gradient_kernel": _PART_OF_ROW,
    "weighted_swiglu_kernel": _PART_OF_ROW,
    "weighted_swiglu_gradient_kernel": _ROW,
}
"""The kernels of SwiGLU, and the sizes of a program."""
USES = {"few": (True,), "all": (False, True)}


def main() -> None:
    which, *targets = sys.argv[1:]
    for target, dtype in itertools.product(targets, DTYPES[which]):
        for name, sizes in SWIGLU.items():
            print(json.dumps(compile_kernel(target, dtype, name, sizes)), flush=True)
        for width in WIDTHS[which]:
            sizes = triton_fused.choose_sizes(width)
            print(json.dumps(compile_kernel(target, dtype, "add_norm_kernel", sizes)), flush=True)
            for with_sum in USES[which]:
                found = compile_kernel(target, dtype, "add_norm_gradient_kernel", {**sizes, "WITH_SUM": with_sum})
                print(json.dumps(found), flush=True)


def compile_kernel(target: str, dtype: str, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Compile a kernel as the launcher would have it compiled, for a width that is a multiple of 16."""
    kernel = getattr(triton_kernels, name)
    signature = {parameter.name: _type_of(parameter, dtype) for parameter in kernel.params}
    constants = {parameter: sizes[parameter] for parameter, kind in signature.items() if kind == "constexpr"}
    is_aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (parameter, kind) in enumerate(signature.items())
        if kind.startswith("*") or parameter == "width"
    }
    is_hip = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
        options={"num_warps": sizes["num_warps"]},
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
    return {
        "target": target, "kernel": name, "dtype": dtype, **sizes, "registers": registers, "stack": stack,
        "num_atomics": assembly.count("global_atomic") if is_hip else assembly.count("atom."),
        "num_wide_loads": assembly.count("global_load_dwordx4") + assembly.count("ld.global.v4.b32"),
    }  # fmt: skip


def _type_of(parameter: Any, dtype: str) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name in ("scale_N", "weight_grads_PE", "weights_N", "weight_grads_N"):
        return "*fp32"
    if parameter.name == "eps":
        return "fp32"
    return f"*{dtype}" if parameter.name.split("_")[-1] in ("N2F", "NF", "NE", "E") else "i32"


if __name__ == "__main__":
    main()
