"""Compile our kernels for GPUs that this machine need not have, and print what each takes.

    python -m tests.kernels.compiled attention 90 gfx942 --head-dims 64 192x128

Without --all only some precisions and variants of a kernel are compiled. Values are as wide as keys, unless their width
is given after an x. Registers are counted for a thread, and memory for a program. A stack means that registers were
spilled.
"""

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_rl.ops.elementwise import triton_fused as elementwise_fused
from megatron_rl.ops.elementwise import triton_kernels as elementwise_kernels
from megatron_rl.ops.log_probs import triton_fused as output_layer_fused
from megatron_rl.ops.log_probs import triton_kernels as output_layer_kernels
from megatron_rl.ops.qkv import triton_fused as heads_fused
from megatron_rl.ops.qkv import triton_kernels as heads_kernels
from megatron_rl.ops.sampled import triton_kernels as sampled_kernels
from megatron_rl.ops.shared_prompt.backends import cudnn, triton_fused, triton_kernels
from megatron_rl.ops.shared_prompt.backends.triton_blocks import HOPPER, Blocks, Chip, choose_blocks
from megatron_rl.ops.shared_prompt.backends.triton_tables import TILE
from megatron_rl.ops.slices import triton_fused as slices_fused
from megatron_rl.ops.slices import triton_kernels as slices_kernels
from megatron_rl.ops.slices.triton_tables import SliceKind

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
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as its launcher has it compiled, for tensors that begin where the launcher finds them."""

    function: Any
    types: Mapping[str, str]
    """The types of arguments by patterns of their names, of which the first that matches counts."""
    constants: Mapping[str, Any]
    """By name, also of parameters that the kernel does not have."""
    properties: Mapping[str, Any]
    """Words that are printed beside the figures."""
    num_warps: int = 4
    num_stages: int = 3
    multiples: tuple[str, ...] = ()
    """The integers that are multiples of 16, as most models' are."""

    def compile(self, target: str) -> dict[str, Any]:
        """Compile for a chip, and return the properties and what it takes."""
        constants = {one.name: self.constants[one.name] for one in self.function.params if one.name in self.constants}
        signature = {
            one.name: "constexpr" if one.name in constants else self._find_type(one.name)
            for one in self.function.params
        }
        is_aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or name in self.multiples
        }
        is_hip = CHIPS[target].kind == "hip"
        compiled = triton.compile(
            ASTSource(fn=self.function, signature=signature, constexprs=constants, attrs=is_aligned),
            target=GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target), 32),
            options={"num_warps": self.num_warps, "num_stages": self.num_stages},
        )
        registers, stack = read_hip(compiled.asm["amdgcn"]) if is_hip else read_cuda(compiled.asm["cubin"])
        assembly = compiled.asm["amdgcn"] if is_hip else compiled.asm["ptx"]
        return {
            "target": target, "kernel": self.function.__name__, **self.properties,
            "registers": registers, "stack": stack,
            "shared_memory": compiled.metadata.shared, "most_shared_memory": CHIPS[target].shared_memory,
            "num_atomics": assembly.count("global_atomic") if is_hip else assembly.count("atom."),
            "num_divisions": assembly.count("v_div_fixup_f32") if is_hip else assembly.count("div.rn.f32"),
            "num_wide_loads": assembly.count("global_load_dwordx4") + assembly.count("ld.global.v4.b32"),
            "num_tensor_core_instructions": len(
                re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_mfma", assembly)
            ),
        }  # fmt: skip

    def _find_type(self, name: str) -> str:
        return next(kind for pattern, kind in self.types.items() if re.fullmatch(pattern, name))


def list_attention(target: str, is_all: bool, head_dims: list[str]) -> Iterator[Kernel]:
    dtypes, widths = (DTYPES, ["64", "96", "128", "256", "192x128"]) if is_all else (["bf16"], head_dims)
    for dtype, given in itertools.product(dtypes, widths):
        dims = [int(width) for width in given.split("x")]
        head_dim, value_dim = dims[0], dims[-1]
        blocks = choose_blocks(triton_fused.compute_width(max(dims)), DTYPES[dtype], CHIPS[target])
        heads = {"Q": (32, head_dim), "GRAD": (32, value_dim), "K": (8, head_dim), "V": (8, value_dim)}
        sizes = {
            **triton_fused.compute_sizes(head_dim, value_dim), "TILE": TILE, "WINDOW": 0,
            **{f"{tensor}_STRIDE_T": num_heads * width for tensor, (num_heads, width) in heads.items()},
            **{f"{tensor}_STRIDE_{letter}": width for tensor, (_, width) in heads.items() for letter in "HG"},
        }  # fmt: skip
        types = {
            "query_tiles|ranges|key_items|sums|positions_T": "*i32", r".*_T[HG][DV]": f"*{dtype}",
            ".*_HT|partial_.*": "*fp32", "scale": "fp32", ".*": "i32",
        }  # fmt: skip
        for name, of_kernel in (*blocks._asdict().items(), ("sum", Blocks(0, triton_fused.SUMMED, 4, 3))):
            constants = {**sizes, "QUERIES": of_kernel.queries, "KEYS": of_kernel.keys}
            properties = {"dtype": dtype, "head_dim": head_dim, "value_dim": value_dim, "blocks": of_kernel}
            function = getattr(triton_kernels, f"{name}_kernel")
            yield Kernel(function, types, constants, properties, of_kernel.num_warps, of_kernel.num_stages)


def list_join(target: str, is_all: bool) -> Iterator[Kernel]:
    for dtype, head_dim in (("bf16", 128), ("fp16", 256)):
        sizes = {"HEAD_DIM": head_dim, "WIDTH": triton_fused.compute_width(head_dim), "ROWS": cudnn.ROWS}
        types = {".*_NHD": f"*{dtype}", "num_rows|length": "i32", ".*": "*fp32"}
        properties = {"dtype": dtype, "head_dim": head_dim}
        yield Kernel(triton_kernels.join_results_kernel, types, sizes, properties, cudnn.NUM_WARPS)


def list_elementwise(target: str, is_all: bool) -> Iterator[Kernel]:
    fused, kernels = elementwise_fused, elementwise_kernels
    for dtype in DTYPES if is_all else ("bf16", "fp32"):
        types = {
            "scale_N|weight_grads_PE|weights_N|weight_grads_N": "*fp32", "eps": "fp32",
            ".*_(N2F|NF|NE|E)": f"*{dtype}", ".*": "i32",
        }  # fmt: skip
        swiglu, summing = (fused.SWIGLU_COLUMNS, fused.SWIGLU_WARPS), (fused.SUMMING_COLUMNS, fused.SUMMING_WARPS)
        programs: list[tuple[Any, Sequence[int], dict[str, bool]]] = [
            (kernels.swiglu_kernel, swiglu, {}),
            (kernels.swiglu_gradient_kernel, swiglu, {}),
            (kernels.weighted_swiglu_kernel, swiglu, {}),
            (kernels.weighted_swiglu_gradient_kernel, summing, {}),
        ]
        # A norm's program has whole rows.
        for width in (1024, *((2048, 4096) if is_all else ()), fused.MOST_HIDDEN_SIZE):
            sizes = tuple(fused.choose_sizes(width).values())
            programs.append((kernels.add_norm_kernel, sizes, {}))
            for with_sum in (False, True) if is_all else (True,):
                programs.append((kernels.add_norm_gradient_kernel, sizes, {"WITH_SUM": with_sum}))
        for function, (columns, num_warps), more in programs:
            constants = {"COLUMNS": columns, **more}
            yield Kernel(function, types, constants, {"dtype": dtype, **constants}, num_warps, multiples=("width",))


def list_output_layer(target: str, is_all: bool) -> Iterator[Kernel]:
    fused, kernels = output_layer_fused, output_layer_kernels
    uses = itertools.product((False, True), repeat=2) if is_all else ((False, False), (True, True))
    for dtype, (is_scaled, with_moments) in itertools.product(DTYPES if is_all else ("bf16", "fp32"), uses):
        types = {
            "logits_NC": f"*{dtype}", "targets_N": "*i64", ".*N": "*fp32", "temperature": "fp32", ".*": "i32",
        }  # fmt: skip
        constants = {"IS_SCALED": is_scaled, "WITH_MOMENTS": with_moments}
        sizes = {"COLUMNS": fused.COLUMNS, "ROWS": fused.JOINED_ROWS}
        for function, num_warps in (
            (kernels.statistics_kernel, fused.NUM_WARPS),
            (kernels.join_kernel, 4),
            (kernels.gradient_kernel, fused.NUM_WARPS),
        ):
            yield Kernel(
                function, types, {**constants, **sizes}, {"dtype": dtype, **constants}, num_warps,
                multiples=("num_columns", "part_columns"),
            )  # fmt: skip


def list_heads(target: str, is_all: bool) -> Iterator[Kernel]:
    fused = heads_fused
    # Query heads of a group, width of a head, pairs that rotate.
    for queries, head_dim, rotated, dtype, has_norms in (
        (2, 128, 64, "bf16", True),
        (8, 128, 64, "bf16", False),
        (2, 64, 32, "fp16", True),
        (4, 256, 64, "fp32", True),
        (4, 80, 40, "bf16", True),
    ):
        types = {
            "num_rows": "i32", "rotation_T2F|partial_2D": "*fp32", "epsilon": "fp32", ".*": f"*{dtype}",
        }  # fmt: skip
        shape = {"QUERIES": queries, "HEAD_DIM": head_dim, "ROTATED": rotated, "IS_NORMALIZED": has_norms}
        sizes = {"ADDED": 0, "TILES": fused.count_tiles(has_norms), **fused.compute_sizes(head_dim)}
        for function in (heads_kernels.split_heads_kernel, heads_kernels.heads_gradient_kernel):
            yield Kernel(function, types, {**shape, **sizes}, {"dtype": dtype, **shape}, fused.NUM_WARPS)


def list_sampled(target: str, is_all: bool) -> Iterator[Kernel]:
    for dtype in DTYPES:
        types = {"logits": f"*{dtype}", "chosen|ranks": "*i64", "log_probs": "*fp32", ".*": "i32"}
        constants, multiples = {"COLUMNS": sampled_kernels.NUM_COLUMNS}, ("row_stride", "num_columns")
        properties = {"dtype": dtype}
        num_warps = sampled_kernels.NUM_WARPS
        yield Kernel(sampled_kernels.score_kernel, types, constants, properties, num_warps, multiples=multiples)


def list_slices(target: str, is_all: bool) -> Iterator[Kernel]:
    words, fp32, bf16, fp16 = torch.int64, torch.float32, torch.bfloat16, torch.float16
    conversions = [(words, words), (fp32, bf16), (bf16, fp32)]
    more = [(bf16, bf16), (fp32, fp16), (fp16, bf16)] if is_all else []
    digest, copy = slices_kernels.digest_kernel, slices_kernels.copy_kernel
    for dtypes, is_narrow in itertools.product([*conversions, *more], (False, True)):
        kind = SliceKind(*dtypes, 1, is_narrow)
        constants = {**slices_fused.name_constants(kind, rows_per_task=16), "column_stride": 1}
        types = {"tasks": "*i32", "buffer": f"*i{8 * kind.target.itemsize}", ".*": "*i64"}
        for function, to_places in ((digest, {}), (copy, {}), (copy, {"buffer": None})):
            yield Kernel(function, types, {**constants, **to_places}, {"kind": str(kind)})


FAMILIES = {
    "attention": list_attention,
    "join": list_join,
    "elementwise": list_elementwise,
    "output_layer": list_output_layer,
    "heads": list_heads,
    "sampled": list_sampled,
    "slices": list_slices,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("targets", nargs="+", choices=CHIPS)
    parser.add_argument("--all", action="store_true", help="all precisions and variants")
    parser.add_argument("--head-dims", nargs="+", default=["128"], help="of attention, without --all")
    given = parser.parse_args()
    more = [given.head_dims] if given.family == "attention" else []
    for target in given.targets:
        for kernel in FAMILIES[given.family](target, given.all, *more):
            print(json.dumps(kernel.compile(target)), flush=True)


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
