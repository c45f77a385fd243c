"""Log-probs of given tokens from hidden states: the output layer and its softmax, fused.

The vocabulary may be divided over ranks. A rank processes its part in blocks of columns, and keeps a few numbers for
each row. The backward pass computes each block's logits again (`function`). Neither pass ever holds an
array of all logits. A backend says what is computed of a block: `torch` in torch's operations, `triton` in kernels that
read each block once, `invariant` in operations that engines have too (`--batch-invariant`).

Letters: N targets, E hidden size, V this rank's columns of the vocabulary, C the columns of one block.
"""

from collections.abc import Iterator

import torch

from megatron_rl.ops.backends import Backends, Conditions, Example
from megatron_rl.ops.log_probs import plain
from megatron_rl.ops.log_probs.function import BlockBackend, Columns, LogProbs, TargetRows, VocabularyShard

__all__ = ["BACKENDS", "TargetRows", "VocabularyShard", "output_log_probs"]

# The trial's rows are divided over programs. Its columns end within a step of a program. There are blocks of two sizes,
# and padding.
_NUM_ROWS, _HIDDEN_SIZE, _VOCAB_SIZE, _NUM_COLUMNS, _BLOCK_COLUMNS = 33, 64, 9_000, 9_024, 5_120
_TEMPERATURE = 0.7
_RESULTS = ("log-probs", "entropies", "the gradient of hidden states", "the gradient of the weight")


def output_log_probs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_N: torch.Tensor,
    shard: VocabularyShard,
    temperature: float = 1.0,
    block_columns: int | None = None,
    with_entropies: bool = False,
    backend: str = "auto",
    adds_to_main_grad: bool = False,
) -> torch.Tensor:
    """Compute log softmax(hidden @ weight.T / temperature) at each row's target, in fp32, without padded columns.

    With `with_entropies`, return [N, 2]: the second column is the entropy of each row's distribution over the whole
    vocabulary.

    The gradient of the hidden states comes from this rank's columns alone, and must be summed over the ranks. A target
    outside the vocabulary gives NaN, since it has no probability. `block_columns` is for tests, and changes results
    only by rounding. With `adds_to_main_grad`, the gradient of a weight that has a main gradient is added there.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    chosen = find_backend(hidden_NE, backend)
    columns = divide_columns(TargetRows(hidden_NE, weight_VE), targets_N, shard, chosen, block_columns)
    result: torch.Tensor = LogProbs.apply(
        hidden_NE, weight_VE, columns, temperature, with_entropies, chosen, adds_to_main_grad
    )
    return result


def find_backend(hidden_NE: torch.Tensor, name: str) -> BlockBackend:
    """Return the backend of this name for these hidden states."""
    return BACKENDS.find(BACKENDS.choose(name, Conditions(hidden_NE.device.type, hidden_NE.dtype)).name)


def divide_columns(
    rows: TargetRows, targets_N: torch.Tensor, shard: VocabularyShard, backend: BlockBackend, size: int | None = None
) -> Columns:
    """Divide this rank's columns into blocks of a size, or of the one that the backend chooses."""
    size = size or backend.choose_block_columns(len(rows.hidden_NE), rows.hidden_NE.dtype)
    return Columns(shard, targets_N - shard.first, shard.num_real(len(rows.weight_VE)), size)


def _list_examples(conditions: Conditions) -> Iterator[Example]:
    """Yield the output layer with entropies."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((_NUM_ROWS, _HIDDEN_SIZE), (_NUM_COLUMNS, _HIDDEN_SIZE), (_NUM_ROWS, 2))
    hidden_NE, weight_VE, grad_N2 = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [tensor.to(conditions.dtype) for tensor in (hidden_NE, weight_VE / _HIDDEN_SIZE**0.5)]
    targets_N = torch.randint(_VOCAB_SIZE, (_NUM_ROWS,), generator=generator)

    def compute(name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        hidden_NE, weight_VE = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
        out_N2 = output_log_probs(
            hidden_NE, weight_VE, targets_N.to(device), VocabularyShard(0, _VOCAB_SIZE), _TEMPERATURE, _BLOCK_COLUMNS,
            with_entropies=True, backend=name,
        )  # fmt: skip
        return [
            *out_N2.unbind(1),
            *torch.autograd.grad(out_N2, (hidden_NE, weight_VE), grad_N2.to(device, out_N2.dtype)),
        ]

    # A column of small probability counts like any other.
    yield Example("log-probs", _RESULTS, compute, by_row=True)


BACKENDS: Backends[BlockBackend] = Backends(
    "--output-layer-backend",
    {"triton": "megatron_rl.ops.log_probs.triton_fused", "torch": plain},
    orders={"cuda": ("triton", "torch")},
    # On a CPU the kernels only run in Triton's interpreter, as a test.
    elsewhere=("torch",),
    definition="torch",
    list_examples=_list_examples,
    others={"invariant": "megatron_rl.ops.log_probs.invariant"},
)
