"""Compile the kernels of the output layer for GPUs that this machine need not have, and print what each takes.

python -m tests.kernels.compiled_output_layer 90 gfx942 --all

Without --all only the least and the most that a kernel may compute is compiled, in a narrow and in the wide dtype.
"""

import argparse
import itertools
import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.log_probs import triton_fused, triton_kernels
from tests.kernels.compiled_triton import read_cuda, read_hip

KERNELS = ("statistics_kernel", "join_kernel", "gradient_kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    dtypes = ("bf16", "fp16", "fp32") if given.all else ("bf16", "fp32")
    choices = itertools.product((False, True), repeat=2) if given.all else ((False, False), (True, True))
    for target, dtype, name, (is_scaled, with_moments) in itertools.product(given.targets, dtypes, KERNELS, choices):
        print(json.dumps(compile_kernel(target, dtype, name, is_scaled, with_moments)), flush=True)


def compile_kernel(target: str, dtype: str, name: str, is_scaled: bool, with_moments: bool) -> dict[str, Any]:
    """Compile a kernel as the launcher would have it compiled, for rows whose columns are a multiple of 16."""
    kernel = getattr(triton_kernels, name)
    sizes = {"COLUMNS": triton_fused.COLUMNS, "ROWS": triton_fused.JOINED_ROWS}
    constants = {"IS_SCALED": is_scaled, "WITH_MOMENTS": with_moments, **sizes}
    signature = {parameter.name: _type_of(parameter, dtype) for parameter in kernel.params}
    constants = {parameter: constants[parameter] for parameter, kind in signature.items() if kind == "constexpr"}
    is_aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (parameter, kind) in enumerate(signature.items())
        if kind.startswith("*") or parameter in ("num_columns", "part_columns")
    }
    is_hip = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
        options={"num_warps": 4 if name == "join_kernel" else triton_fused.NUM_WARPS},
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
    return {
        "target": target, "kernel": name, "dtype": dtype, "is_scaled": is_scaled, "with_moments": with_moments,
        "registers": registers, "stack": stack,
        "num_atomics": assembly.count("global_atomic") if is_hip else assembly.count("atom."),
        "num_divisions": assembly.count("v_div_fixup_f32") if is_hip else assembly.count("div.rn.f32"),
        "num_wide_loads": assembly.count("global_load_dwordx4") + assembly.count("ld.global.v4.b32"),
    }  # fmt: skip


def _type_of(parameter: Any, dtype: str) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name == "logits_NC":
        return f"*{dtype}"
    if parameter.name == "targets_N":
        return "*i64"
    if parameter.name.endswith("N"):
        return "*fp32"
    return "fp32" if parameter.name == "temperature" else "i32"


if __name__ == "__main__":
    main()
