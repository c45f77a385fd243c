"""Compile the kernels of the `triton` backend for GPUs that this machine need not have, and print what each takes.

    python -m tests.kernels.compiled_triton --dtypes bf16 --head-dims 64 192x128 --targets 90 gfx942

Values are as wide as keys, unless their width is given after an x.

Registers are counted for a thread, and memory for a program. A stack means that registers were spilled.
"""

import argparse
import dataclasses
import itertools
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
from megatron_rl.ops.shared_prompt.backends.triton_blocks import HOPPER, Blocks, Chip, choose_blocks
from megatron_rl.ops.shared_prompt.backends.triton_tables import TILE

CHIPS = {
    "80": Chip("cuda", 8, 163 * 1024),
    "86": Chip("cuda", 8, 99 * 1024),
    "89": Chip("cuda", 8, 99 * 1024),
    "90": HOPPER,
    "100": Chip("cuda", 10, 227 * 1024),
    "120": Chip("cuda", 12, 99 * 1024),
    "gfx942": Chip("hip", 0, 64 * 1024),
}
"""By compute capability, or AMD's name; the memory is from the makers' documents."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLES = ("query_tiles", "ranges", "key_items", "sums", "positions_T")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The resources that a compiled kernel takes."""

    target: str
    kernel: str
    dtype: str
    head_dim: int
    value_dim: int
    blocks: Blocks
    registers: int
    stack: int
    shared_memory: int
    """Bytes of shared memory."""
    most_shared_memory: int
    """The bytes that the chip has for a program."""
    num_tensor_core_instructions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dims", nargs="+", default=["64", "96", "128", "256", "192x128"])
    parser.add_argument("--targets", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--window", type=int, default=0)
    arguments = parser.parse_args()
    for target, dtype, head_dims in itertools.product(arguments.targets, arguments.dtypes, arguments.head_dims):
        dims = [int(width) for width in head_dims.split("x")]
        head_dim, value_dim = dims[0], dims[-1]
        blocks = choose_blocks(triton_fused.compute_width(max(dims)), DTYPES[dtype], CHIPS[target])
        for name, sizes in (*blocks._asdict().items(), ("sum", Blocks(0, triton_fused.SUMMED, 4, 3))):
            window = arguments.window
            compiled = compile_kernel(target, f"{name}_kernel", dtype, head_dim, value_dim, sizes, window)
            print(json.dumps(dataclasses.asdict(compiled)), flush=True)


def compile_kernel(
    target: str, name: str, dtype: str, head_dim: int, value_dim: int, blocks: Blocks, window: int = 0
) -> Compiled:
    """Compile a kernel as the launcher would have it compiled."""
    kernel = getattr(triton_kernels, name)
    heads = {"Q": (32, head_dim), "GRAD": (32, value_dim), "K": (8, head_dim), "V": (8, value_dim)}
    sizes = {
        **triton_fused.compute_sizes(head_dim, value_dim),
        "TILE": TILE,
        "WINDOW": window,
        "QUERIES": blocks.queries,
        "KEYS": blocks.keys,
        **{f"{tensor}_STRIDE_T": num_heads * width for tensor, (num_heads, width) in heads.items()},
        **{f"{tensor}_STRIDE_{letter}": width for tensor, (_, width) in heads.items() for letter in "HG"},
    }
    signature = {parameter.name: _type_of(parameter, dtype) for parameter in kernel.params}
    constants = {parameter: sizes[parameter] for parameter, kind in signature.items() if kind == "constexpr"}
    # Tensors and tables begin where the launcher finds them.
    is_aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    is_hip = CHIPS[target].kind == "hip"
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=is_aligned),
        target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
        options={"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
    )
    registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
    assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
    instructions = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma", assembly))
    memory, most = compiled.metadata.shared, CHIPS[target].shared_memory
    return Compiled(target, name, dtype, head_dim, value_dim, blocks, registers, stack, memory, most, instructions)


def _type_of(parameter: Any, dtype: str) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if parameter.name in TABLES:
        return "*i32"
    if parameter.name.endswith(("_THD", "_TGD", "_THV", "_TGV")):
        return f"*{dtype}"
    if parameter.name.endswith("_HT") or parameter.name.startswith("partial_"):
        return "*fp32"
    return "fp32" if parameter.name == "scale" else "i32"


def read_cuda(binary: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return used["REG"], used["STACK"]


def read_hip(assembly: str) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread."""
    used = {
        name: int(number)
        for name, number in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", assembly)
    }
    return used["vgpr_count"], used["private_segment_fixed_size"]


if __name__ == "__main__":
    main()
