"""Log-probs of given tokens from hidden states: the output layer and its softmax, fused.

The vocabulary may be divided over ranks. A rank processes its part in blocks of columns, and keeps a few numbers for
each row (`statistics`). The backward pass computes each block's logits again (`function`). Neither pass ever holds an
array of all logits. A backend says what is computed of a block: `torch` in torch's operations, `triton` in kernels that
read each block once, `invariant` in operations that engines have too (`--batch-invariant`).

Letters: N targets, E hidden size, V this rank's columns of the vocabulary, C the columns of one block.
"""

import torch

from megatron_rl.ops.choice import Choice, choose_by_flag
from megatron_rl.ops.log_probs import invariant, plain, triton_fused
from megatron_rl.ops.log_probs.backend import BlockBackend
from megatron_rl.ops.log_probs.columns import Columns, VocabularyShard
from megatron_rl.ops.log_probs.function import LogProbs

__all__ = ["BACKENDS", "VocabularyShard", "choose_backend", "output_log_probs"]

BACKENDS: dict[str, BlockBackend] = {"triton": triton_fused.BACKEND, "torch": plain.BACKEND}
# Those that another flag than --output-layer-backend asks for: --batch-invariant.
_OTHERS = {"invariant": invariant.BACKEND}
# `auto` takes the first that can run. On a CPU the kernels only run in Triton's interpreter, as a test.
_ORDERS = {"cuda": ("triton", "torch")}


def choose_backend(name: str, device: str, dtype: torch.dtype) -> Choice:
    """Choose the named backend, or the fastest with `auto`; raise a UsageError if the named one cannot run.

    `device` is the type of a torch.device, such as `cuda`.
    """
    order = _ORDERS.get(device, ("torch",))
    return choose_by_flag("--output-layer-backend", name, order, lambda one: _find(one).refusal(device, dtype))


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
    chosen = _find(choose_backend(backend, hidden_NE.device.type, hidden_NE.dtype).name)
    if block_columns is None:
        block_columns = chosen.choose_block_columns(len(hidden_NE), hidden_NE.dtype)
    columns = Columns(shard, targets_N - shard.first, shard.num_real(len(weight_VE)), block_columns)
    result: torch.Tensor = LogProbs.apply(
        hidden_NE, weight_VE, columns, temperature, with_entropies, chosen, adds_to_main_grad
    )
    return result


def _find(name: str) -> BlockBackend:
    return BACKENDS[name] if name in BACKENDS else _OTHERS[name]
