"""Forms in which a checkpoint's files store tensors that everything else knows in another one.

Experts may be stored together. Everything but files knows the gate, up and down projection of each expert as tensors of
their own. The files have, for each layer, a tensor of the gates and ups of all experts, row after row in turn and
transposed, and one of their downs.

Weights may be 8-bit floats with a factor for each block of 128 x 128 numbers, as DeepSeek-V3's. The factors of a tensor
are in a tensor whose name has a suffix. The weights themselves are the products.

Letters: E experts, R rows of an expert's projection, C its columns, B blocks of 32 numbers.
In scaled blocks: B blocks in a column of blocks, D blocks in a row of blocks.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from megatron_rl.shared.weights.families.values import SCALED_BLOCK
from megatron_rl.shared.weights.mapping import TensorSpec

_NAME = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_STORED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
# The numbers of MXFP4: a sign, two bits of exponent and one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
_EXPONENT_BIAS = 127
BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"


class ExpertTensor(NamedTuple):
    """The parts of the name of a tensor of an expert."""

    block: str
    """The name of the layer's experts."""
    expert: int
    projection: str
    """`gate`, `up` or `down`."""
    kind: str
    """`weight` or `bias`."""


@dataclasses.dataclass(frozen=True)
class StackedPlace:
    """The place of an expert's tensor in a stored one."""

    stored: str
    expert: int
    rows: slice
    """The rows of the projection among those that are stored together."""
    is_bias: bool

    def view(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the expert's tensor as a view of the stored one."""
        own = stored[self.expert]
        return (own if self.is_bias else own.T)[self.rows]

    def unpack(self, blocks_ERBN: torch.Tensor, scales_ERB: torch.Tensor) -> torch.Tensor:
        """Return the expert's weight from MXFP4, which stores it with its rows first: exactly, in bfloat16."""
        return unpack_mxfp4(blocks_ERBN[self.expert][self.rows], scales_ERB[self.expert][self.rows])


def find_place(name: str) -> StackedPlace | None:
    """Find the place of a tensor; None if it is stored under its own name."""
    part = parse_part(name)
    if part is None:
        return None
    is_bias = part.kind == "bias"
    stem = "down_proj" if part.projection == "down" else "gate_up_proj"
    rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part.projection]
    return StackedPlace(f"{part.block}.{stem}{'_bias' if is_bias else ''}", part.expert, rows, is_bias)


def parse_part(name: str) -> ExpertTensor | None:
    """Read the name of a tensor of an expert; None for any other name."""
    found = _NAME.fullmatch(name)
    return None if found is None else ExpertTensor(found[1], int(found[2]), found[3], found[4])


def split_stored(name: str, stored: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the experts' tensors that a stored one holds, as views; any other tensor as it is."""
    found = _STORED.fullmatch(name)
    if found is None:
        yield name, stored
        return
    block, stem, is_bias = found.groups()
    for expert in range(len(stored)):
        for projection in ("gate", "up") if stem == "gate_up" else ("down",):
            own_name = f"{block}.{expert}.{projection}_proj.{'bias' if is_bias else 'weight'}"
            place = find_place(own_name)
            assert place is not None
            yield own_name, place.view(stored)


def stack_specs(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """List the stored tensors, each in the place of the first one that it holds."""
    stored: dict[str, TensorSpec] = {}
    for spec in specs:
        place = find_place(spec.name)
        if place is None:
            stored[spec.name] = spec
            continue
        rows = spec.shape[0] * (place.rows.step or 1)
        shape = (place.expert + 1, *spec.shape[1:], rows)
        stored[place.stored] = TensorSpec(place.stored, shape, spec.dtype)
    return list(stored.values())


def describe_mxfp4(spec: TensorSpec) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the two tensors that store this stacked weight in MXFP4."""
    experts, columns, rows = spec.shape
    num_blocks = math.ceil(columns / BLOCK)
    return {
        f"{spec.name}{BLOCKS}": (experts, rows, num_blocks, BLOCK // 2),
        f"{spec.name}{SCALES}": (experts, rows, num_blocks),
    }


def unpack_mxfp4(blocks_RBN: torch.Tensor, scales_RB: torch.Tensor) -> torch.Tensor:
    """Return the numbers [R, C] of blocks whose bytes hold two numbers each, the first in the lower half."""
    numbers = torch.tensor(_NUMBERS, dtype=torch.bfloat16)
    pairs_RBN2 = torch.stack((blocks_RBN & 0xF, blocks_RBN >> 4), dim=-1).int()
    exponents_RB11 = (scales_RB.int() - _EXPONENT_BIAS)[..., None, None]
    return torch.ldexp(numbers[pairs_RBN2], exponents_RB11).flatten(1)


SCALE_SUFFIX = "_scale_inv"
SCALED_CODE = "F8_E4M3"
"""The format's code for such floats."""
SCALED_DTYPE = "bfloat16"
"""The dtype of the products."""


def shape_factors(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors of a tensor; the last blocks may be smaller."""
    return tuple(-(-length // SCALED_BLOCK) for length in shape)


def unpack_scaled(stored_RC: torch.Tensor, factors_BD: torch.Tensor) -> torch.Tensor:
    """Return the products [R, C], which are computed in float32 and rounded once."""
    num_columns = stored_RC.shape[1]
    product_RC = torch.empty(stored_RC.shape, dtype=getattr(torch, SCALED_DTYPE))
    for block, factors_D in enumerate(factors_BD.float()):
        rows = slice(block * SCALED_BLOCK, (block + 1) * SCALED_BLOCK)
        product_RC[rows] = stored_RC[rows].float() * factors_D.repeat_interleave(SCALED_BLOCK)[:num_columns]
    return product_RC
