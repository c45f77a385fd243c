"""The trial of batch-invariant operations at a run's start: rows alone, among others and elsewhere must be equal.

The promise is about bits, so `ops.trials`, which allows for rounding, cannot check it.

Rows are computed with one thread and with several, since engines and ranks have different numbers of them.
"""

import os
from collections.abc import Callable, Iterable, Iterator

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops.invariant import rows
from megatron_rl.ops.invariant.attention import NUM_KEYS, Tiles, attend
from megatron_rl.types import MKL_MODE

_NUM_ROWS = 4 * rows.NUM_ROWS + 7
_ALONE = (0, 1, 7, rows.NUM_ROWS - 1, rows.NUM_ROWS, _NUM_ROWS - 1)
_SIZES = (2, 3, 4, 5, 7, rows.NUM_ROWS, rows.NUM_ROWS + 1, 2 * rows.NUM_ROWS, 3 * rows.NUM_ROWS + 5)
_LENGTHS = (2 * NUM_KEYS + 5, 9, NUM_KEYS)
_GROUPS = 2


def check_operations(shapes: Iterable[tuple[int, int]], num_queries: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raise a PlatformError if a row's bits depend on other rows here.

    `shapes` has the inputs and outputs of each product, `num_queries` the query heads of a key head.
    """
    present = torch.get_num_threads()
    try:
        firsts: dict[str, torch.Tensor] = {}
        for num_threads in sorted({1, 2, present}):
            torch.set_num_threads(num_threads)
            found = dict(_compute(sorted(set(shapes)), num_queries, head_dim, dtype))
            for what, (first, others) in found.items():
                whole = firsts.setdefault(what, first)
                if not all(torch.equal(whole, other) for other in (first, *others)):
                    raise PlatformError(
                        f"--batch-invariant: {what} in {str(dtype).removeprefix('torch.')} has other bits in another "
                        f"batch or with {num_threads} threads on this processor, with {_name_mode()}: drop the flag"
                    )
    finally:
        torch.set_num_threads(present)


def _name_mode() -> str:
    return " and ".join(f"{name}={os.environ.get(name, '')}" for name in MKL_MODE)


Found = tuple[torch.Tensor, list[torch.Tensor]]


def _compute(
    shapes: Iterable[tuple[int, int]], num_queries: int, head_dim: int, dtype: torch.dtype
) -> Iterator[tuple[str, Found]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    for num_inputs, num_outputs in shapes:
        rows_NI, weight_OI = draw(_NUM_ROWS, num_inputs), draw(num_outputs, num_inputs)

        def multiply(rows_NI: torch.Tensor, weight_OI: torch.Tensor = weight_OI) -> torch.Tensor:
            return rows.multiply(rows_NI, weight_OI)

        yield f"the product of {num_inputs} by {num_outputs}", _compare(multiply, rows_NI)

        def normalize(rows_NI: torch.Tensor, weight_I: torch.Tensor = weight_OI[0]) -> torch.Tensor:
            return rows.normalize(rows_NI, weight_I, 1e-6)

        yield f"the norm of {num_inputs}", _compare(normalize, rows_NI)
    yield f"SwiGLU of {2 * head_dim + 6}", _compare(rows.swiglu, draw(_NUM_ROWS, 2 * head_dim + 6))
    yield "attention", _compare_attention(draw, num_queries, head_dim)


def _compare(compute: Callable[[torch.Tensor], torch.Tensor], rows_NI: torch.Tensor) -> Found:
    """Return a function of rows, and what it gives for the same rows in other batches."""
    order_N = torch.randperm(len(rows_NI), generator=torch.Generator().manual_seed(1))
    shuffled = torch.empty_like(whole := compute(rows_NI))
    shuffled[order_N] = compute(rows_NI[order_N])
    alone = whole.clone()
    for row in _ALONE:
        alone[row : row + 1] = compute(rows_NI[row : row + 1])
    parts = [torch.cat((compute(rows_NI[:size]), compute(rows_NI[size:]))) for size in _SIZES]
    return whole, [shuffled, alone, *parts]


def _compare_attention(draw: Callable[..., torch.Tensor], num_queries: int, head_dim: int) -> Found:
    """Return attention of whole sequences, of each alone, and of their rows one by one, the last ones first."""
    total = sum(_LENGTHS)
    q_RHD = draw(total, _GROUPS * num_queries, head_dim)
    rows_NGW = draw(total, _GROUPS, 2 * head_dim)
    keys_SL = torch.zeros(len(_LENGTHS), 3 * NUM_KEYS, dtype=torch.int64)
    starts = [sum(_LENGTHS[:index]) for index in range(len(_LENGTHS))]
    for keys_L, start, length in zip(keys_SL, starts, _LENGTHS, strict=True):
        keys_L[:] = start
        keys_L[:length] = torch.arange(start, start + length)
    sequences_R = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))
    positions_R = torch.cat([torch.arange(length) for length in _LENGTHS])

    def compute(chosen_R: torch.Tensor) -> torch.Tensor:
        tiles = Tiles.of(sequences_R[chosen_R], positions_R[chosen_R])
        return attend(q_RHD[chosen_R], rows_NGW, tiles, keys_SL, head_dim**-0.5)[0]

    every_R = torch.arange(total)
    parted = torch.cat([compute(every_R[sequences_R == sequence]) for sequence in range(len(_LENGTHS))])
    backward = torch.cat([compute(row_1) for row_1 in every_R.flip(0).split(1)]).flip(0)
    return compute(every_R), [parted, backward]
