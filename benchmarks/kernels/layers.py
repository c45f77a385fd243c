"""The computations of a layer and of the output layer.

Letters: N rows, F the width of a gate, E hidden size, G groups of heads, C columns, D dimensions of a head, I inputs, O
outputs, V columns of the vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernels.computation import Computation
from megatron_rl.ops.elementwise import plain, triton_fused
from megatron_rl.ops.linear import linear
from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from megatron_rl.ops.qkv import HeadNorms, make_rotation, split_heads
from tests.naive_log_probs import naive_log_probs

_EPS = 1e-6
_TEMPERATURE = 0.7


def list_elementwise(sizes: Sequence[tuple[int, int]]) -> Iterator[Computation]:
    """Yield SwiGLU, that of experts, and a residual with its norm, for numbers of rows and widths."""
    for num_rows, width in sizes:
        size = 2 * num_rows * width
        yield Computation(
            f"SwiGLU, {num_rows:,} x {width:,}",
            ("out", "gate and up"),
            triton_fused.swiglu,
            plain.swiglu,
            _draw((num_rows, 1, 2 * width)),
            num_bytes=(3 * size, 5 * size),
        )
        yield Computation(
            f"SwiGLU of experts, {num_rows:,} x {width:,}",
            ("out", "gate and up", "weights"),
            triton_fused.weighted_swiglu,
            plain.weighted_swiglu,
            _draw((num_rows, 2 * width), (num_rows,)),
            num_bytes=(3 * size, 5 * size),
        )
        yield Computation(
            f"residual with norm, {num_rows:,} x {width:,}",
            ("sum", "norm", "one", "other", "weight"),
            functools.partial(triton_fused.add_and_normalize, eps=_EPS),
            functools.partial(plain.add_and_normalize, eps=_EPS),
            _draw((num_rows, 1, width), (num_rows, 1, width), (width,)),
            num_bytes=(4 * size, 4 * size),
        )


def list_heads(sizes: Sequence[tuple[int, int, int, int, bool]]) -> Iterator[Computation]:
    """Yield heads for numbers of rows, groups and queries of a group, widths, and with norms or without."""
    for num_rows, num_groups, queries, head_dim, with_norms in sizes:
        num_columns = num_groups * (queries + 2) * head_dim
        names = ("queries", "keys", "values", "product", *(("norm of queries", "norm of keys") if with_norms else ()))
        shapes = [(num_rows, num_columns), *[(head_dim,)] * (2 * with_norms)]
        size = 2 * num_rows * num_columns
        divide = functools.partial(_divide, num_groups, head_dim)
        yield Computation(
            f"heads, {num_rows:,} rows of {num_groups} x {queries} of {head_dim}"
            f"{'' if with_norms else ', without norms'}",
            names,
            functools.partial(divide, "triton"),
            functools.partial(divide, "torch"),
            _draw(*shapes),
            num_bytes=(2 * size, (3 if with_norms else 2) * size),
        )


def list_linear(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Computation]:
    """Yield linear layers, with a bias and without, for numbers of rows, inputs and outputs."""
    for place, (num_rows, inputs, outputs) in enumerate(sizes):
        with_bias = place % 2 == 1
        shapes = [(num_rows, 1, inputs), (outputs, inputs), *[(outputs,)] * with_bias]
        moved = 2 * (num_rows * (inputs + outputs) + inputs * outputs)
        yield Computation(
            f"linear layer, {num_rows:,} x {inputs:,} x {outputs:,}",
            ("out", "input", "weight", *(("bias",) if with_bias else ())),
            linear,
            torch.nn.functional.linear,
            _draw(*shapes, scale=inputs**-0.25),
            num_bytes=(moved, 2 * moved),
        )


def list_output_layers(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Computation]:
    """Yield output layers for numbers of rows, hidden sizes and vocabularies, which padding follows."""
    for num_rows, hidden_size, vocab_size in sizes:
        draw_numbers = _draw((num_rows, hidden_size), (vocab_size + 24, hidden_size), scale=hidden_size**-0.25)

        def draw(
            generator: torch.Generator,
            draw_numbers: Callable[[torch.Generator], list[torch.Tensor]] = draw_numbers,
            num_rows: int = num_rows,
            vocab_size: int = vocab_size,
        ) -> list[torch.Tensor]:
            return [*draw_numbers(generator), torch.randint(vocab_size, (num_rows,), generator=generator)]

        yield Computation(
            f"output layer, {num_rows:,} x {hidden_size:,} x {vocab_size:,}",
            ("log-probs", "hidden states", "weight"),
            functools.partial(
                output_log_probs, shard=VocabularyShard(0, vocab_size), temperature=_TEMPERATURE, backend="triton"
            ),
            functools.partial(naive_log_probs, vocab_size=vocab_size, temperature=_TEMPERATURE),
            draw,
        )


def _divide(
    num_groups: int, head_dim: int, name: str, mixed_NC: torch.Tensor, *weights_D: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    norms = HeadNorms(weights_D[0], weights_D[1], _EPS) if weights_D else None
    rotation = _rotation(len(mixed_NC), head_dim, mixed_NC.device, torch.promote_types(mixed_NC.dtype, torch.float32))
    return split_heads(mixed_NC, num_groups, head_dim, rotation, norms, name)


@functools.lru_cache(maxsize=4)
def _rotation(num_rows: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines, which a pack has once for all layers."""
    angles = torch.arange(num_rows, dtype=torch.float32)[:, None] * 10.0 ** -torch.linspace(0, 4, head_dim // 2)
    return make_rotation(angles.to(device, dtype))


def _draw(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[torch.Generator], list[torch.Tensor]]:
    return lambda generator: [scale * torch.randn(shape, generator=generator) for shape in shapes]
