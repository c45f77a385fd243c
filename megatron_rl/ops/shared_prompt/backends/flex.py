"""Shared-prompt attention by torch's FlexAttention, compiled: a rule compares three numbers of two tokens.

Tokens are numbered in the order of a depth-first walk of the forest: a token, then all tokens that see it, then the
others. So the tokens that see a token are exactly those from its own number up to an end.

Letters: T tokens, B blocks of the buffer, H query heads, G key-value heads, D head dimension.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_rl.ops.shared_prompt.backends import Conditions, attend_to_nothing
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.ops.shared_prompt.tables import find_tables

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
# The number of kinds of inputs that torch compiles FlexAttention for. A run has up to nine: one token, one block, and
# more blocks, each with gradients, without, and in another memory layout. torch's own limit for a process is eight.
KINDS = 64
# The tensors of a BlockMask.
BLOCKS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def refusal(conditions: Conditions) -> str | None:
    """Refuse devices other than CUDA: FlexAttention is compiled with Triton, and has no backward on the CPU."""
    if conditions.device != "cuda":
        return f"FlexAttention does not train on {conditions.device}"
    return None


@dataclasses.dataclass(frozen=True)
class BlockTables:
    """The tensors of a mask."""

    blocks: dict[str, Any]
    """Numbers and lists of blocks, by BlockMask's names."""
    entered_T: torch.Tensor
    left_T: torch.Tensor
    positions_T: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, window: int | None) -> "BlockTables":
        """List the blocks that see each other entirely, and those that may in part."""
        from torch.nn.attention.flex_attention import BlockMask

        numbers_T = (*_number_tokens(layout), layout.positions)
        is_whole_BB, is_in_part_BB = _compare_blocks(*numbers_T, window)
        mask = BlockMask.from_kv_blocks(*_list_blocks(is_in_part_BB), *_list_blocks(is_whole_BB), BLOCK_SIZE=BLOCK)
        blocks = {name: getattr(mask, name) for name in BLOCKS}
        return cls(blocks, *(torch.from_numpy(number_T.astype(np.int32)) for number_T in numbers_T))


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> BlockTables | None:
    """Make the tables of the mask."""
    return layout.once(BlockTables.of, window) if layout.num_tokens else None


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`."""
    if layout.num_tokens == 0:
        return attend_to_nothing(q_THD, k_TGD, v_TGD, sinks_H)
    found = _flex_attention()(
        *(tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_THD, k_TGD, v_TGD)),
        block_mask=layout.once(build_block_mask, q_THD.device, window),
        scale=scale,
        enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
        **({} if sinks_H is None else _ask_for_denominators()),
    )
    if sinks_H is None:
        return found.squeeze(0).transpose(0, 1)
    # torch differentiates the logarithm of a softmax's denominator too.
    out_1HTD, aux = found
    lse_1HT = getattr(aux, "lse", aux)
    share_1HT1 = torch.sigmoid(lse_1HT - sinks_H.to(lse_1HT.dtype)[:, None]).unsqueeze(-1)
    return (out_1HTD * share_1HT1).to(q_THD.dtype).squeeze(0).transpose(0, 1)


def _ask_for_denominators() -> dict[str, Any]:
    """Return the argument that asks FlexAttention for the logarithms of denominators; older torch has another."""
    from torch.nn.attention import flex_attention

    request = getattr(flex_attention, "AuxRequest", None)
    return {"return_lse": True} if request is None else {"return_aux": request(lse=True)}


def build_block_mask(layout: Layout, device: torch.device, window: int | None) -> "BlockMask":
    """Build the mask: the blocks that see each other entirely, those that may in part, and the rule for tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    tables = find_tables(layout, device, BlockTables.of, window)
    return BlockMask(
        seq_lengths=(layout.num_tokens, layout.num_tokens),
        **tables.blocks,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=_make_rule(tables, window),
    )


def _number_tokens(layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's number, and the end of the numbers of tokens that see it."""
    sizes = list(layout.lengths)
    for segment in reversed(range(layout.num_segments)):
        if layout.parents[segment] != ROOT:
            sizes[layout.parents[segment]] += sizes[segment]
    firsts: list[int] = []
    # For each segment, the first number of its next child; the last entry is for roots.
    free = [0] * (layout.num_segments + 1)
    for segment, parent in enumerate(layout.parents):
        firsts.append(free[parent])
        free[parent] += sizes[segment]
        free[segment] = firsts[segment] + layout.lengths[segment]
    offsets = np.array(firsts, dtype=np.int64) - layout.starts[:-1]
    entered_T = np.arange(layout.num_tokens) + np.repeat(offsets, layout.lengths)
    left_T = np.repeat(np.array(firsts, dtype=np.int64) + np.array(sizes, dtype=np.int64), layout.lengths)
    return entered_T, left_T


def _compare_blocks(
    entered_T: np.ndarray, left_T: np.ndarray, positions_T: np.ndarray, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the blocks of queries that see blocks of keys entirely, and the others that may see a part."""
    starts = np.arange(0, len(entered_T), BLOCK)
    (first_B, last_B), (_, end_B), (lowest_B, highest_B) = (
        (np.minimum.reduceat(numbers_T, starts), np.maximum.reduceat(numbers_T, starts))
        for numbers_T in (entered_T, left_T, positions_T)
    )
    soonest_end_B = np.minimum.reduceat(left_T, starts)
    is_whole_BB = (last_B <= first_B[:, None]) & (last_B[:, None] < soonest_end_B)
    may_see_BB = (first_B <= last_B[:, None]) & (first_B[:, None] < end_B)
    if window is not None:
        is_whole_BB &= highest_B[:, None] - lowest_B < window
        may_see_BB &= lowest_B[:, None] - highest_B < window
    if len(entered_T) % BLOCK:
        # The last block has rows beyond the buffer's end, so the rule must be applied token by token.
        is_whole_BB[-1] = is_whole_BB[:, -1] = False
    return is_whole_BB, may_see_BB & ~is_whole_BB


def _list_blocks(is_seen_BB: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks that each block sees, and all blocks with these first."""
    order_BB = np.argsort(~is_seen_BB, axis=1, kind="stable")
    numbers = (is_seen_BB.sum(axis=1), order_BB)
    num_B, blocks_BB = (torch.from_numpy(number.astype(np.int32))[None, None] for number in numbers)
    return num_B, blocks_BB


def _make_rule(tables: BlockTables, window: int | None) -> Callable[..., torch.Tensor]:
    entered, left, position = tables.entered_T, tables.left_T, tables.positions_T

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (entered[key] <= entered[query]) & (entered[query] < left[key])

    if window is None:
        return sees

    def sees_in_window(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return sees(_batch, _head, query, key) & (position[query] - position[key] < window)

    return sees_in_window


@functools.cache
def _flex_attention() -> Callable[..., Any]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    # Micro-batches have different lengths. Beyond the limit, torch would compute all scores at once, uncompiled: 50 GiB
    # for 20,480 tokens and 32 heads. `fullgraph` makes that an error.
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return config.patch(cache_size_limit=KINDS)(compiled)
