"""The computations outside a layer: the optimizer's step, the score of sampled tokens, and slices of weights.

Letters: N elements, R rows, V columns of the vocabulary, C columns of a slice.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.kernels.computation import Computation
from megatron_rl.ops import sampled
from megatron_rl.ops.adam import OnePassAdam, OnePassAdamW
from megatron_rl.ops.sampled import score_naively
from megatron_rl.ops.slices import Move, Placed, Slice, naive, triton_fused

_NUM_STEPS = 3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def list_adam(sizes: Sequence[int]) -> Iterator[Computation]:
    """Yield Adam and AdamW, for numbers of elements. Megatron keeps main parameters, which it updates, in fp32."""
    for ours, theirs in ((OnePassAdam, torch.optim.Adam), (OnePassAdamW, torch.optim.AdamW)):
        for size in sizes:
            yield Computation(
                f"{theirs.__name__}, {size:,}",
                ("parameters", "averages", "averages of squares"),
                functools.partial(_take_steps, ours),
                functools.partial(_take_steps, theirs),
                functools.partial(_draw_steps, size),
                has_gradients=False,
                dtypes=("fp32",),
            )


def _draw_steps(size: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(size, generator=generator) for _ in range(1 + _NUM_STEPS)]


def _take_steps(kind: type[torch.optim.Optimizer], start_N: torch.Tensor, *grads: torch.Tensor) -> list[torch.Tensor]:
    parameter_N = torch.nn.Parameter(start_N.clone())
    optimizer = kind([parameter_N], **SETTINGS)
    for grad_N in grads:
        parameter_N.grad = grad_N
        optimizer.step()
    state = optimizer.state[parameter_N]
    return [parameter_N.detach(), state["exp_avg"], state["exp_avg_sq"]]


def list_sampled(sizes: Sequence[tuple[int, int]]) -> Iterator[Computation]:
    """Yield the scores of chosen columns for numbers of rows and columns."""
    for num_rows, num_columns in sizes:
        yield Computation(
            f"sampled tokens, {num_rows:,} x {num_columns:,}",
            ("log-probs", "ranks"),
            sampled.score,
            score_naively,
            functools.partial(_draw_logits, num_rows, num_columns),
            has_gradients=False,
            num_bytes=(2 * num_rows * num_columns, 0),
        )


def _draw_logits(num_rows: int, num_columns: int, generator: torch.Generator) -> list[torch.Tensor]:
    logits_RV = 4 * torch.randn(num_rows, num_columns, generator=generator)
    return [logits_RV, torch.randint(num_columns, (num_rows,), generator=generator)]


def list_slices(sizes: Sequence[tuple[int, int]]) -> Iterator[Computation]:
    """Yield digests, packs and moves of slices of matrices, for numbers of rows and columns."""
    for num_rows, num_columns in sizes:
        size = 2 * num_rows * num_columns
        operations = ((_digest, size), (_pack, 2 * size), (_move, 2 * size))
        for operation, moved in operations:
            yield Computation(
                f"{operation.__name__.removeprefix('_')} of slices, {num_rows:,} x {num_columns:,}",
                ("bits",),
                functools.partial(operation, True),
                functools.partial(operation, False),
                functools.partial(_draw_matrix, num_rows, num_columns),
                has_gradients=False,
                is_exact=True,
                num_bytes=(moved, 0),
            )


def _draw_matrix(num_rows: int, num_columns: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(num_rows, num_columns, generator=generator)]


def list_parts(matrix_RC: torch.Tensor) -> list[Slice]:
    """Return slices: the whole matrix, and parts that begin and end within words."""
    num_rows, num_columns = matrix_RC.shape
    first_row, first_column = num_rows // 3, num_columns // 5
    return [
        Slice(matrix_RC, 0),
        Slice(matrix_RC[first_row:, first_column:], 1, first_row, first_column),
        Slice(matrix_RC[::2, 1:], 2, 0, 1),
        Slice(matrix_RC[:, ::3], 3),
    ]


def _digest(is_ours: bool, matrix_RC: torch.Tensor) -> torch.Tensor:
    """Digest parts as they are, and as numbers of another dtype."""
    kind: Any = triton_fused.KernelDigester if is_ours else naive.NaiveDigester
    parts = list_parts(matrix_RC)
    return torch.stack([kind(parts, dtype, len(parts)).digest() for dtype in (matrix_RC.dtype, _other(matrix_RC))])


def _pack(is_ours: bool, matrix_RC: torch.Tensor) -> list[torch.Tensor]:
    kind: Any = triton_fused.KernelPacker if is_ours else naive.NaivePacker
    buffers = []
    for dtype in (matrix_RC.dtype, _other(matrix_RC)):
        placed, end = [], 0
        for part in list_parts(matrix_RC):
            placed.append(Placed(part.values_RC, end))
            end += part.values_RC.numel() * dtype.itemsize
        buffer = torch.zeros(end, dtype=torch.uint8, device=matrix_RC.device)
        kind([placed], dtype).pack(0, buffer)
        buffers.append(buffer)
    return [torch.cat(buffers)]


def _move(is_ours: bool, matrix_RC: torch.Tensor) -> list[torch.Tensor]:
    kind: Any = triton_fused.KernelMover if is_ours else naive.NaiveMover
    places = []
    for dtype in (matrix_RC.dtype, _other(matrix_RC)):
        # Places whose rows have gaps.
        wide = [torch.zeros(len(one.values_RC), 3 + one.values_RC.shape[1], dtype=dtype, device=matrix_RC.device)
                for one in list_parts(matrix_RC)]  # fmt: skip
        kind(
            [Move(one.values_RC, place[:, 2:-1]) for one, place in zip(list_parts(matrix_RC), wide, strict=True)]
        ).move()
        places += [place.view(torch.uint8).flatten() for place in wide]
    return [torch.cat(places)]


def _other(matrix_RC: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if matrix_RC.dtype is torch.float32 else torch.float32
