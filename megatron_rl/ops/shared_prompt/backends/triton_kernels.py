"""The kernels of the `triton` backend. Importing this imports Triton, and decides whether it compiles or interprets.

A program of the first two kernels has a block of queries of one head, and loops over the keys that they see. A program
of the third kernel has a block of keys of one key-value head, and loops over queries of all heads of its group. Rows
are rows of the buffer. A query never sees a later key, so `key <= query` and the ends of ranges are the only masks, and
the window's reach if WINDOW is above 0. Within a strand, or a part of it, rows and positions differ by one number.
Logarithms and exponentials are to base 2. `triton_tables` describes the tables.

Letters: T tokens, H query heads, G key-value heads, D head dimension, V that of values, M queries of a block, N keys of
a block. Blocks of D and V columns are padded with zeros to WIDTH and VALUE_WIDTH, powers of two.
"""

import os

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Before Triton 3.4, only the environment tells whether it interprets.
IS_INTERPRETED = tl.constexpr(
    triton.knobs.runtime.interpret if hasattr(triton, "knobs") else os.environ.get("TRITON_INTERPRET") == "1"
)


@triton.jit(do_not_specialize=["num_tokens", "heads_per_group"])
def forward_kernel(
    q_THD: tl.tensor,
    k_TGD: tl.tensor,
    v_TGV: tl.tensor,
    out_THV: tl.tensor,
    log_totals_HT: tl.tensor,
    query_tiles: tl.tensor,
    ranges: tl.tensor,
    positions_T: tl.tensor,
    scale: tl.tensor,
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_H: tl.constexpr,
    K_STRIDE_T: tl.constexpr,
    K_STRIDE_G: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    V_STRIDE_G: tl.constexpr,
    num_tokens: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute attention, stored densely, and the logarithm of each softmax's denominator."""
    head = tl.program_id(1)
    group = head // heads_per_group
    first, strand_start, strand_end, first_range, end_range = _query_block(query_tiles, TILE, QUERIES)
    rows_M = first + tl.arange(0, QUERIES)
    q_MD = _block(q_THD + head * Q_STRIDE_H, Q_STRIDE_T, first, strand_end, QUERIES, WIDTH, HEAD_DIM, True)
    k_TD = k_TGD + group * K_STRIDE_G
    v_TV = v_TGV + group * V_STRIDE_G
    out_MV = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    totals_M = tl.zeros([QUERIES], tl.float32)
    greatest_M = tl.full([QUERIES], float("-inf"), tl.float32)
    for index in range(first_range, end_range):
        start, edge, end, reach = _key_range(
            ranges, positions_T, index, end_range, strand_start, strand_end, first, WINDOW, QUERIES, KEYS
        )
        out_MV, totals_M, greatest_M = _attend(
            out_MV, totals_M, greatest_M, q_MD, rows_M, k_TD, v_TV, K_STRIDE_T, V_STRIDE_T,
            start, edge, reach, scale * LOG2_E, WINDOW, KEYS, WIDTH, HEAD_DIM, VALUE_DIM, VALUE_WIDTH, False,
        )  # fmt: skip
        out_MV, totals_M, greatest_M = _attend(
            out_MV, totals_M, greatest_M, q_MD, rows_M, k_TD, v_TV, K_STRIDE_T, V_STRIDE_T,
            edge, end, reach, scale * LOG2_E, WINDOW, KEYS, WIDTH, HEAD_DIM, VALUE_DIM, VALUE_WIDTH, True,
        )  # fmt: skip
    _store(out_THV + head * VALUE_DIM, tl.num_programs(1) * VALUE_DIM, out_MV / totals_M[:, None],
           first, strand_end, QUERIES, VALUE_WIDTH, VALUE_DIM)  # fmt: skip
    tl.store(
        log_totals_HT + head * num_tokens + rows_M,
        greatest_M + tl.math.log2(totals_M),
        mask=rows_M < strand_end,
    )


@triton.jit(do_not_specialize=["num_tokens", "heads_per_group"])
def query_gradients_kernel(
    q_THD: tl.tensor,
    k_TGD: tl.tensor,
    v_TGV: tl.tensor,
    grad_out_THV: tl.tensor,
    log_totals_HT: tl.tensor,
    deltas_HT: tl.tensor,
    out_THV: tl.tensor,
    grad_q_THD: tl.tensor,
    query_tiles: tl.tensor,
    ranges: tl.tensor,
    positions_T: tl.tensor,
    scale: tl.tensor,
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_H: tl.constexpr,
    K_STRIDE_T: tl.constexpr,
    K_STRIDE_G: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    V_STRIDE_G: tl.constexpr,
    GRAD_STRIDE_T: tl.constexpr,
    GRAD_STRIDE_H: tl.constexpr,
    num_tokens: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute the gradient of queries, stored densely, and each row's output times its gradient for the next kernel."""
    head = tl.program_id(1)
    group = head // heads_per_group
    first, strand_start, strand_end, first_range, end_range = _query_block(query_tiles, TILE, QUERIES)
    rows_M = first + tl.arange(0, QUERIES)
    num_heads = tl.num_programs(1)
    out_TV, stride = out_THV + head * VALUE_DIM, num_heads * VALUE_DIM
    out_MV = _block(out_TV, stride, first, strand_end, QUERIES, VALUE_WIDTH, VALUE_DIM, True)
    grad_out_TV = grad_out_THV + head * GRAD_STRIDE_H
    grad_out_MV = _block(grad_out_TV, GRAD_STRIDE_T, first, strand_end, QUERIES, VALUE_WIDTH, VALUE_DIM, True)
    deltas_M = tl.sum(out_MV.to(tl.float32) * grad_out_MV.to(tl.float32), 1)
    tl.store(deltas_HT + head * num_tokens + rows_M, deltas_M, mask=rows_M < strand_end)
    log_totals_M = tl.load(log_totals_HT + head * num_tokens + rows_M, mask=rows_M < strand_end, other=0.0)
    q_MD = _block(q_THD + head * Q_STRIDE_H, Q_STRIDE_T, first, strand_end, QUERIES, WIDTH, HEAD_DIM, True)
    k_TD = k_TGD + group * K_STRIDE_G
    v_TV = v_TGV + group * V_STRIDE_G
    grad_q_MD = tl.zeros([QUERIES, WIDTH], tl.float32)
    for index in range(first_range, end_range):
        start, edge, end, reach = _key_range(
            ranges, positions_T, index, end_range, strand_start, strand_end, first, WINDOW, QUERIES, KEYS
        )
        grad_q_MD = _query_gradients(
            grad_q_MD, q_MD, grad_out_MV, log_totals_M, deltas_M, rows_M, k_TD, v_TV, K_STRIDE_T, V_STRIDE_T,
            start, edge, reach, scale * LOG2_E, WINDOW, KEYS, WIDTH, HEAD_DIM, VALUE_DIM, VALUE_WIDTH, False,
        )  # fmt: skip
        grad_q_MD = _query_gradients(
            grad_q_MD, q_MD, grad_out_MV, log_totals_M, deltas_M, rows_M, k_TD, v_TV, K_STRIDE_T, V_STRIDE_T,
            edge, end, reach, scale * LOG2_E, WINDOW, KEYS, WIDTH, HEAD_DIM, VALUE_DIM, VALUE_WIDTH, True,
        )  # fmt: skip
    _store(grad_q_THD + head * HEAD_DIM, num_heads * HEAD_DIM, grad_q_MD * scale,
           first, strand_end, QUERIES, WIDTH, HEAD_DIM)  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "heads_per_group"])
def key_gradients_kernel(
    q_THD: tl.tensor,
    k_TGD: tl.tensor,
    v_TGV: tl.tensor,
    grad_out_THV: tl.tensor,
    log_totals_HT: tl.tensor,
    deltas_HT: tl.tensor,
    grad_k_TGD: tl.tensor,
    grad_v_TGV: tl.tensor,
    partial_k: tl.tensor,
    partial_v: tl.tensor,
    key_items: tl.tensor,
    positions_T: tl.tensor,
    scale: tl.tensor,
    Q_STRIDE_T: tl.constexpr,
    Q_STRIDE_H: tl.constexpr,
    K_STRIDE_T: tl.constexpr,
    K_STRIDE_G: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    V_STRIDE_G: tl.constexpr,
    GRAD_STRIDE_T: tl.constexpr,
    GRAD_STRIDE_H: tl.constexpr,
    num_tokens: tl.tensor,
    heads_per_group: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Compute gradients of keys and values, stored densely, or an item's part: [slots, G, TILE, columns] in fp32."""
    group = tl.program_id(1)
    num_groups = tl.num_programs(1)
    item = key_items + tl.program_id(0) // (TILE // KEYS) * 5
    offset = tl.program_id(0) % (TILE // KEYS) * KEYS
    first_key = tl.load(item) + offset
    end_key = tl.load(item) + tl.load(item + 1)
    start = tl.maximum(tl.load(item + 2), first_key)
    # After the last key of a short tile, no work is left.
    end = tl.where(first_key < end_key, tl.load(item + 3), start)
    slot = tl.load(item + 4)
    reach = start
    if WINDOW:
        # The queries of an item belong to one strand. After the last key's reach they see none of the block's keys.
        reach = _find_reach(positions_T, start, first_key, start < end, WINDOW)
        end = tl.minimum(end, first_key + KEYS - 1 + reach)
        edge = tl.maximum(start, end)
    else:
        # From here on, queries come after all keys of the block.
        edge = tl.minimum(end, tl.maximum(start, first_key + KEYS))
    keys_N = first_key + tl.arange(0, KEYS)
    k_ND = _block(k_TGD + group * K_STRIDE_G, K_STRIDE_T, first_key, end_key, KEYS, WIDTH, HEAD_DIM, True)
    v_NV = _block(v_TGV + group * V_STRIDE_G, V_STRIDE_T, first_key, end_key, KEYS, VALUE_WIDTH, VALUE_DIM, True)
    grad_k_ND = tl.zeros([KEYS, WIDTH], tl.float32)
    grad_v_NV = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    for number in range(heads_per_group):
        head = group * heads_per_group + number
        q_TD = q_THD + head * Q_STRIDE_H
        grad_out_TV = grad_out_THV + head * GRAD_STRIDE_H
        log_totals_T = log_totals_HT + head * num_tokens
        deltas_T = deltas_HT + head * num_tokens
        grad_k_ND, grad_v_NV = _key_gradients(
            grad_k_ND, grad_v_NV, k_ND, v_NV, keys_N, q_TD, grad_out_TV, log_totals_T, deltas_T, Q_STRIDE_T,
            GRAD_STRIDE_T, start, edge, reach, scale * LOG2_E, WINDOW, QUERIES, WIDTH, HEAD_DIM, VALUE_DIM,
            VALUE_WIDTH, True,
        )  # fmt: skip
        grad_k_ND, grad_v_NV = _key_gradients(
            grad_k_ND, grad_v_NV, k_ND, v_NV, keys_N, q_TD, grad_out_TV, log_totals_T, deltas_T, Q_STRIDE_T,
            GRAD_STRIDE_T, edge, end, reach, scale * LOG2_E, WINDOW, QUERIES, WIDTH, HEAD_DIM, VALUE_DIM,
            VALUE_WIDTH, False,
        )  # fmt: skip
    grad_k_ND *= scale
    if slot < 0:
        _store(grad_k_TGD + group * HEAD_DIM, num_groups * HEAD_DIM, grad_k_ND,
               first_key, end_key, KEYS, WIDTH, HEAD_DIM)  # fmt: skip
        _store(grad_v_TGV + group * VALUE_DIM, num_groups * VALUE_DIM, grad_v_NV,
               first_key, end_key, KEYS, VALUE_WIDTH, VALUE_DIM)  # fmt: skip
    else:
        # Rows of keys beyond the end were computed with the item's queries too.
        is_seen_N1 = (keys_N < end_key)[:, None]
        first = ((slot * num_groups + group) * TILE + offset).to(tl.int64)
        tl.store(partial_k + _within(first, KEYS, WIDTH), tl.where(is_seen_N1, grad_k_ND, 0.0))
        tl.store(partial_v + _within(first, KEYS, VALUE_WIDTH), tl.where(is_seen_N1, grad_v_NV, 0.0))


@triton.jit
def sum_kernel(
    grad_k_TGD: tl.tensor,
    grad_v_TGV: tl.tensor,
    partial_k: tl.tensor,
    partial_v: tl.tensor,
    sums: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Sum the results of a tile's items, slot after slot."""
    group = tl.program_id(1)
    num_groups = tl.num_programs(1)
    record = sums + tl.program_id(0) // (TILE // KEYS) * 4
    offset = tl.program_id(0) % (TILE // KEYS) * KEYS
    first_key = tl.load(record) + offset
    end_key = tl.load(record) + tl.load(record + 1)
    grad_k_ND = tl.zeros([KEYS, WIDTH], tl.float32)
    grad_v_NV = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    for slot in range(tl.load(record + 2), tl.load(record + 3)):
        first = tl.cast((slot * num_groups + group) * TILE + offset, tl.int64)
        grad_k_ND += tl.load(partial_k + _within(first, KEYS, WIDTH))
        grad_v_NV += tl.load(partial_v + _within(first, KEYS, VALUE_WIDTH))
    _store(grad_k_TGD + group * HEAD_DIM, num_groups * HEAD_DIM, grad_k_ND,
           first_key, end_key, KEYS, WIDTH, HEAD_DIM)  # fmt: skip
    _store(grad_v_TGV + group * VALUE_DIM, num_groups * VALUE_DIM, grad_v_NV,
           first_key, end_key, KEYS, VALUE_WIDTH, VALUE_DIM)  # fmt: skip


@triton.jit
def _within(first: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Return the places of rows from `first` on, which lie densely."""
    return first * WIDTH + (tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def _query_block(
    query_tiles: tl.tensor, TILE: tl.constexpr, QUERIES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load the block's first row, its strand's start and end, and the first index and the end of its ranges of keys."""
    tile = query_tiles + tl.program_id(0) // (TILE // QUERIES) * 5
    first = tl.load(tile) + tl.program_id(0) % (TILE // QUERIES) * QUERIES
    strand_end = tl.load(tile + 2)
    first_range = tl.load(tile + 3)
    # The strand itself is one more range. After the last row of a short tile, no work is left.
    end_range = tl.where(first < strand_end, tl.load(tile + 4) + 1, first_range)
    return first, tl.load(tile + 1), strand_end, first_range, end_range


@triton.jit
def _key_range(
    ranges: tl.tensor,
    positions_T: tl.tensor,
    index: tl.tensor,
    end_range: tl.tensor,
    strand_start: tl.tensor,
    strand_end: tl.tensor,
    first: tl.tensor,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load a range's start and end, and the edge between them: up to it, all queries see whole blocks of keys.

    With a window the range starts with the first key that a query of the block may see, and every block of keys is at
    the edge. The last result is the difference of rows from which on the window hides a key.
    """
    is_above = index < end_range - 1
    start = tl.load(ranges + 2 * index, mask=is_above, other=strand_start)
    end = tl.load(ranges + 2 * index + 1, mask=is_above, other=tl.minimum(first + QUERIES, strand_end))
    reach = first
    if WINDOW:
        reach = _find_reach(positions_T, first, start, start < end, WINDOW)
        start = tl.maximum(start, first - reach + 1)
        edge = start
    else:
        edge = start + (tl.minimum(end, first) - start) // KEYS * KEYS
    return start, edge, end, reach


@triton.jit
def _attend(
    out_MV: tl.tensor,
    totals_M: tl.tensor,
    greatest_M: tl.tensor,
    q_MD: tl.tensor,
    rows_M: tl.tensor,
    k_TD: tl.tensor,
    v_TV: tl.tensor,
    K_STRIDE_T: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    start: tl.tensor,
    end: tl.tensor,
    reach: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a range of keys to the three running values; the output is not yet divided by its totals."""
    for first in tl.range(start, end, KEYS):
        k_ND = _block(k_TD, K_STRIDE_T, first, end, KEYS, WIDTH, HEAD_DIM, IS_EDGE)
        v_NV = _block(v_TV, V_STRIDE_T, first, end, KEYS, VALUE_WIDTH, VALUE_DIM, IS_EDGE)
        scores_MN = _dot(q_MD, tl.trans(k_ND))
        if IS_EDGE:
            scores_MN = tl.where(_is_visible(rows_M, first, end, reach, WINDOW, KEYS), scores_MN, float("-inf"))
        now_greatest_M = tl.maximum(greatest_M, tl.max(scores_MN, 1) * scale)
        subtracted_M = now_greatest_M
        if WINDOW:
            # A row may see none of the keys so far. Its weights are zero, and infinities have no difference.
            subtracted_M = tl.where(now_greatest_M == float("-inf"), 0.0, now_greatest_M)
        weights_MN = tl.math.exp2(scores_MN * scale - subtracted_M[:, None])
        share_M = tl.math.exp2(greatest_M - subtracted_M)
        totals_M = totals_M * share_M + tl.sum(weights_MN, 1)
        out_MV = _dot(_rounded(weights_MN, v_NV.dtype), v_NV, out_MV * share_M[:, None])
        greatest_M = now_greatest_M
    return out_MV, totals_M, greatest_M


@triton.jit
def _query_gradients(
    grad_q_MD: tl.tensor,
    q_MD: tl.tensor,
    grad_out_MV: tl.tensor,
    log_totals_M: tl.tensor,
    deltas_M: tl.tensor,
    rows_M: tl.tensor,
    k_TD: tl.tensor,
    v_TV: tl.tensor,
    K_STRIDE_T: tl.constexpr,
    V_STRIDE_T: tl.constexpr,
    start: tl.tensor,
    end: tl.tensor,
    reach: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tl.tensor:
    """Add the contribution of a range of keys to the gradient of queries, without the scale."""
    for first in tl.range(start, end, KEYS):
        k_ND = _block(k_TD, K_STRIDE_T, first, end, KEYS, WIDTH, HEAD_DIM, IS_EDGE)
        v_NV = _block(v_TV, V_STRIDE_T, first, end, KEYS, VALUE_WIDTH, VALUE_DIM, IS_EDGE)
        weights_MN = tl.math.exp2(_dot(q_MD, tl.trans(k_ND)) * scale - log_totals_M[:, None])
        if IS_EDGE:
            weights_MN = tl.where(_is_visible(rows_M, first, end, reach, WINDOW, KEYS), weights_MN, 0.0)
        grad_scores_MN = weights_MN * (_dot(grad_out_MV, tl.trans(v_NV)) - deltas_M[:, None])
        grad_q_MD = _dot(_rounded(grad_scores_MN, k_ND.dtype), k_ND, grad_q_MD)
    return grad_q_MD


@triton.jit
def _key_gradients(
    grad_k_ND: tl.tensor,
    grad_v_NV: tl.tensor,
    k_ND: tl.tensor,
    v_NV: tl.tensor,
    keys_N: tl.tensor,
    q_TD: tl.tensor,
    grad_out_TV: tl.tensor,
    log_totals_T: tl.tensor,
    deltas_T: tl.tensor,
    Q_STRIDE_T: tl.constexpr,
    GRAD_STRIDE_T: tl.constexpr,
    start: tl.tensor,
    end: tl.tensor,
    reach: tl.tensor,
    scale: tl.tensor,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add a range of queries of one head to the gradients of keys, without the scale, and of values."""
    for first in tl.range(start, end, QUERIES):
        rows_M = first + tl.arange(0, QUERIES)
        # Rows after the end are read as zeros, which add nothing.
        q_MD = _block(q_TD, Q_STRIDE_T, first, end, QUERIES, WIDTH, HEAD_DIM, True)
        grad_out_MV = _block(grad_out_TV, GRAD_STRIDE_T, first, end, QUERIES, VALUE_WIDTH, VALUE_DIM, True)
        log_totals_M = tl.load(log_totals_T + rows_M, mask=rows_M < end, other=0.0)
        deltas_M = tl.load(deltas_T + rows_M, mask=rows_M < end, other=0.0)
        weights_NM = tl.math.exp2(_dot(k_ND, tl.trans(q_MD)) * scale - log_totals_M[None, :])
        if IS_EDGE:
            is_visible_NM = keys_N[:, None] <= rows_M[None, :]
            if WINDOW:
                is_visible_NM = is_visible_NM & (rows_M[None, :] - keys_N[:, None] < reach)
            weights_NM = tl.where(is_visible_NM, weights_NM, 0.0)
        grad_v_NV = _dot(_rounded(weights_NM, grad_out_MV.dtype), grad_out_MV, grad_v_NV)
        grad_scores_NM = weights_NM * (_dot(v_NV, tl.trans(grad_out_MV)) - deltas_M[None, :])
        grad_k_ND = _dot(_rounded(grad_scores_NM, q_MD.dtype), q_MD, grad_k_ND)
    return grad_k_ND, grad_v_NV


@triton.jit
def _is_visible(
    rows_M: tl.tensor, first: tl.tensor, end: tl.tensor, reach: tl.tensor, WINDOW: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    keys_N = first + tl.arange(0, KEYS)
    is_visible_MN = (keys_N < end)[None, :] & (keys_N[None, :] <= rows_M[:, None])
    if WINDOW:
        is_visible_MN = is_visible_MN & (rows_M[:, None] - keys_N[None, :] < reach)
    return is_visible_MN


@triton.jit
def _find_reach(
    positions_T: tl.tensor, query: tl.tensor, key: tl.tensor, is_read: tl.tensor, WINDOW: tl.constexpr
) -> tl.tensor:
    """Return the difference of rows from which on a key is outside the window, for this query's and key's strands."""
    query_position = tl.load(positions_T + query, mask=is_read, other=0)
    key_position = tl.load(positions_T + key, mask=is_read, other=0)
    return WINDOW + (query - query_position) - (key - key_position)


@triton.jit
def _block(
    rows_TD: tl.tensor,
    stride_T: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_EDGE: tl.constexpr,
) -> tl.tensor:
    """Load rows of one head from `first` on. Columns from HEAD_DIM on are zeros, and at an edge rows from `end` on."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = rows_TD + tl.cast(first, tl.int64) * stride_T + (rows[:, None] * stride_T + columns[None, :])
    if IS_EDGE:
        block = tl.load(pointers, mask=(first + rows < end)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif WIDTH != HEAD_DIM:
        block = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def _store(
    rows_TD: tl.tensor,
    stride_T: tl.tensor,
    block: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store rows where `_block` would read them."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    pointers = rows_TD + tl.cast(first, tl.int64) * stride_T + (rows[:, None] * stride_T + columns[None, :])
    mask = (first + rows < end)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, _rounded(block, rows_TD.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, added: tl.tensor = None) -> tl.tensor:
    """Multiply two blocks, fp32 without rounding. The interpreter would multiply the bits of bf16 as integers."""
    if IS_INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    # Before 3.4, Triton does not take None for a block.
    return tl.dot(a, b, input_precision="ieee") if added is None else tl.dot(a, b, added, input_precision="ieee")


@triton.jit
def _rounded(block: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round to the nearest value. The interpreter would truncate to bf16 instead."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = block.to(tl.uint32, bitcast=True)
        block = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return block.to(dtype)


@triton.jit(do_not_specialize=["num_rows", "length"])
def join_results_kernel(
    own_NHD: tl.tensor,
    above_NHD: tl.tensor,
    own_lse: tl.tensor,
    above_lse: tl.tensor,
    out_NHD: tl.tensor,
    own_joined: tl.tensor,
    above_joined: tl.tensor,
    num_rows: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Average rows of one head by their shares of the joined denominator, whose logarithm is stored in both orders."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    rows_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = rows_M < num_rows
    # A strand's logarithms lie head after head, and so do those of all strands together.
    of_own_M = (rows_M // length * num_heads + head) * length + rows_M % length
    of_above_M = head * num_rows + rows_M
    own_lse_M = tl.load(own_lse + of_own_M, mask=is_row_M, other=0.0)
    above_lse_M = tl.load(above_lse + of_above_M, mask=is_row_M, other=0.0)
    greatest_M = tl.maximum(own_lse_M, above_lse_M)
    own_M = tl.exp(own_lse_M - greatest_M)
    above_M = tl.exp(above_lse_M - greatest_M)
    totals_M = own_M + above_M
    joined_M = greatest_M + tl.log(totals_M)
    tl.store(own_joined + of_own_M, joined_M, mask=is_row_M)
    tl.store(above_joined + of_above_M, joined_M, mask=is_row_M)
    columns = tl.arange(0, WIDTH)
    places_MD = ((rows_M.to(tl.int64) * num_heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    mask_MD = is_row_M[:, None] & (columns < HEAD_DIM)[None, :]
    own_MD = tl.load(own_NHD + places_MD, mask=mask_MD, other=0.0).to(tl.float32)
    above_MD = tl.load(above_NHD + places_MD, mask=mask_MD, other=0.0).to(tl.float32)
    out_MD = own_MD * (own_M / totals_M)[:, None] + above_MD * (above_M / totals_M)[:, None]
    tl.store(out_NHD + places_MD, _rounded(out_MD, out_NHD.dtype.element_ty), mask=mask_MD)
