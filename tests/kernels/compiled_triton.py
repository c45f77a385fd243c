"""Compiles the kernels of the `triton` backend for a GPU that need not be there, and says what each one takes.

    python -m tests.kernels.compiled_triton --dtypes bf16 --head-dims 64 128

Registers are of a thread, memory is that of a program; a stack means that registers were spilled.
"""

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.shared_prompt.backends import triton_fused, triton_kernels
from megatron_rl.ops.shared_prompt.backends.triton_fused import Blocks
from megatron_rl.ops.shared_prompt.backends.triton_tables import TILE

CAPABILITY = 90
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = ("query_tiles", "ranges", "key_items", "sums")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes."""

    kernel: str
    dtype: str
    head_dim: int
    blocks: Blocks
    registers: int
    stack: int
    shared_memory: int
    """In bytes."""
    num_tensor_core_instructions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 96, 128, 256])
    arguments = parser.parse_args()
    for dtype in arguments.dtypes:
        for head_dim in arguments.head_dims:
            blocks = triton_fused.choose_blocks(triton_fused.compute_width(head_dim), DTYPES[dtype])
            for name, sizes in (*blocks._asdict().items(), ("sum", Blocks(0, triton_fused.SUMMED, 4, 3))):
                print(
                    json.dumps(dataclasses.asdict(compile_kernel(f"{name}_kernel", dtype, head_dim, sizes))), flush=True
                )


def compile_kernel(name: str, dtype: str, head_dim: int, blocks: Blocks) -> Compiled:
    """As the launcher would have it compiled."""
    kernel = getattr(triton_kernels, name)
    heads = dict.fromkeys(("Q", "GRAD"), 32) | dict.fromkeys(("K", "V"), 8)
    sizes = {
        "HEAD_DIM": head_dim,
        "WIDTH": triton_fused.compute_width(head_dim),
        "TILE": TILE,
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
        **{f"{tensor}_STRIDE_T": num_heads * head_dim for tensor, num_heads in heads.items()},
        **{f"{tensor}_STRIDE_{letter}": head_dim for tensor in heads for letter in "HG"},
    }
    signature = {parameter.name: _type_of(parameter, dtype) for parameter in kernel.params}
    constants = {parameter: sizes[parameter] for parameter, kind in signature.items() if kind == "constexpr"}
    # As tensors and tables begin where the launcher finds them.
    is_aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
    )
    used = _resources(compiled.asm["cubin"])
    instructions = len(re.findall(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"]))
    return Compiled(name, dtype, head_dim, blocks, used["REG"], used["STACK"], compiled.metadata.shared, instructions)


def _type_of(parameter: Any, dtype: str) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name in TABLES:
        return "*i32"
    if parameter.name.endswith(("_THD", "_TGD")):
        return f"*{dtype}"
    if parameter.name.endswith("_HT") or parameter.name.startswith("partial_"):
        return "*fp32"
    return "fp32" if parameter.name == "scale" else "i32"


def _resources(binary: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}


if __name__ == "__main__":
    main()
