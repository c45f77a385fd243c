"""Compile the kernels over slices for GPUs that this machine need not have, and print what each takes.

python -m tests.kernels.compiled_slices 90 gfx942 --all

Without --all only a conversion to a narrower and one to a wider number are compiled, and none.
"""

import argparse
import itertools
import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.slices import triton_kernels
from megatron_rl.ops.slices.triton_fused import name_constants
from megatron_rl.ops.slices.triton_tables import SliceKind
from tests.kernels.compiled_triton import read_cuda, read_hip

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CONVERSIONS = [(torch.int64, torch.int64), (FP32, BF16), (BF16, FP32)]
MORE_CONVERSIONS = [(BF16, BF16), (FP32, FP16), (FP16, BF16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    conversions = [*CONVERSIONS, *MORE_CONVERSIONS] if given.all else CONVERSIONS
    kernels = ("digest", "pack", "move")
    for target, dtypes, is_narrow, name in itertools.product(given.targets, conversions, (False, True), kernels):
        print(json.dumps(compile_kernel(target, name, SliceKind(*dtypes, 1, is_narrow))), flush=True)


def compile_kernel(target: str, name: str, kind: SliceKind) -> dict[str, Any]:
    """Compile a kernel as the launcher would have it compiled."""
    kernel = triton_kernels.digest_kernel if name == "digest" else triton_kernels.copy_kernel
    constants = {**name_constants(kind, rows_per_task=16), "column_stride": 1}
    if name == "move":
        constants["buffer"] = None
    signature = {
        parameter.name: "constexpr" if parameter.name in constants else _type_of(parameter, kind)
        for parameter in kernel.params
    }
    is_aligned = {(i,): [["tt.divisibility", 16]] for i, one in enumerate(signature.values()) if one.startswith("*")}
    is_hip = target.startswith("gfx")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
    num_atomics = assembly.count("global_atomic_add_x2") if is_hip else assembly.count("atom.")
    return {
        "target": target, "kernel": name, "kind": str(kind), "registers": registers, "stack": stack,
        "num_atomics": num_atomics,
    }  # fmt: skip


def _type_of(parameter: Any, kind: SliceKind) -> str:
    if parameter.name == "tasks":
        return "*i32"
    if parameter.name == "buffer":
        return f"*i{8 * kind.target.itemsize}"
    return "*i64"


if __name__ == "__main__":
    main()
