"""The kernels of the `triton` backend. Importing this imports Triton, and decides whether it compiles or interprets.

A program has some rows of one group: its query heads, its key head and its value head. Each number of the product and
of its gradient is read or written once. Numbers are fp32 between reading and writing. Sums are taken in a fixed order,
without atomics: the same numbers give the same bits.

A head is processed as two halves, whose numbers rotate in pairs. Its first 2F dimensions rotate: i with F + i. The
other dimensions are paired too, and their angle is 0.

Letters: T rows, G groups, H query heads, D dimensions of a head, C columns of the product, F pairs that rotate. A
program has R rows at once, and P pairs of a head with padding.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def split_heads_kernel(
    mixed_TC: tl.tensor,
    rotation_T2F: tl.tensor,
    q_weight_D: tl.tensor,
    k_weight_D: tl.tensor,
    q_THD: tl.tensor,
    k_TGD: tl.tensor,
    v_TGD: tl.tensor,
    num_rows: tl.tensor,
    epsilon: tl.tensor,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Divide rows of the product into heads, normalize queries and keys, and rotate them."""
    group, num_groups = tl.program_id(1), tl.num_programs(1)
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_P, second_P, is_pair_P = _find_columns(HEAD_DIM, ROTATED, WIDTH)
    mask_RP = (rows_R < num_rows)[:, None] & is_pair_P[None, :]
    cos_RP, sin_RP = _load_rotation(rotation_T2F, rows_R, mask_RP, ROTATED, WIDTH)
    mixed_R = mixed_TC + (rows_R * num_groups + group) * (QUERIES + 2) * HEAD_DIM
    q_R = q_THD + (rows_R * num_groups + group) * QUERIES * HEAD_DIM
    k_R = k_TGD + (rows_R * num_groups + group) * HEAD_DIM
    v_R = v_TGD + (rows_R * num_groups + group) * HEAD_DIM
    weight1_P, weight2_P = _load_weight(q_weight_D, first_P, second_P, is_pair_P, IS_NORMALIZED, ADDED)
    for head in range(QUERIES):
        x1_RP, x2_RP = _load_head(mixed_R + head * HEAD_DIM, first_P, second_P, mask_RP)
        x1_RP, x2_RP = _normalize(x1_RP, x2_RP, weight1_P, weight2_P, epsilon, HEAD_DIM, IS_NORMALIZED)
        y1_RP, y2_RP = x1_RP * cos_RP - x2_RP * sin_RP, x2_RP * cos_RP + x1_RP * sin_RP
        _store_head(q_R + head * HEAD_DIM, first_P, second_P, mask_RP, y1_RP, y2_RP)
    weight1_P, weight2_P = _load_weight(k_weight_D, first_P, second_P, is_pair_P, IS_NORMALIZED, ADDED)
    x1_RP, x2_RP = _load_head(mixed_R + QUERIES * HEAD_DIM, first_P, second_P, mask_RP)
    x1_RP, x2_RP = _normalize(x1_RP, x2_RP, weight1_P, weight2_P, epsilon, HEAD_DIM, IS_NORMALIZED)
    y1_RP, y2_RP = x1_RP * cos_RP - x2_RP * sin_RP, x2_RP * cos_RP + x1_RP * sin_RP
    _store_head(k_R, first_P, second_P, mask_RP, y1_RP, y2_RP)
    x1_RP, x2_RP = _load_head(mixed_R + (QUERIES + 1) * HEAD_DIM, first_P, second_P, mask_RP)
    _store_head(v_R, first_P, second_P, mask_RP, x1_RP, x2_RP)


@triton.jit(do_not_specialize=["num_rows"])
def heads_gradient_kernel(
    mixed_TC: tl.tensor,
    rotation_T2F: tl.tensor,
    q_weight_D: tl.tensor,
    k_weight_D: tl.tensor,
    grad_q_THD: tl.tensor,
    grad_k_TGD: tl.tensor,
    grad_v_TGD: tl.tensor,
    grad_mixed_TC: tl.tensor,
    partial_2D: tl.tensor,
    num_rows: tl.tensor,
    epsilon: tl.tensor,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    ADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Compute the gradient of rows of the product, and these rows' part of the gradients of the norms' weights."""
    group, num_groups = tl.program_id(1), tl.num_programs(1)
    first_P, second_P, is_pair_P = _find_columns(HEAD_DIM, ROTATED, WIDTH)
    q_sum1_RP, q_sum2_RP = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    k_sum1_RP, k_sum2_RP = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in range(TILES):
        rows_R = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        mask_RP = (rows_R < num_rows)[:, None] & is_pair_P[None, :]
        cos_RP, sin_RP = _load_rotation(rotation_T2F, rows_R, mask_RP, ROTATED, WIDTH)
        mixed_R = mixed_TC + (rows_R * num_groups + group) * (QUERIES + 2) * HEAD_DIM
        grad_R = grad_mixed_TC + (rows_R * num_groups + group) * (QUERIES + 2) * HEAD_DIM
        grad_q_R = grad_q_THD + (rows_R * num_groups + group) * QUERIES * HEAD_DIM
        grad_k_R = grad_k_TGD + (rows_R * num_groups + group) * HEAD_DIM
        grad_v_R = grad_v_TGD + (rows_R * num_groups + group) * HEAD_DIM
        # Weights are loaded where they are used, so that they take no registers elsewhere.
        weight1_P, weight2_P = _load_weight(q_weight_D, first_P, second_P, is_pair_P, IS_NORMALIZED, ADDED)
        for head in range(QUERIES):
            y1_RP, y2_RP = _load_head(grad_q_R + head * HEAD_DIM, first_P, second_P, mask_RP)
            y1_RP, y2_RP = y1_RP * cos_RP + y2_RP * sin_RP, y2_RP * cos_RP - y1_RP * sin_RP
            if IS_NORMALIZED:
                x1_RP, x2_RP = _load_head(mixed_R + head * HEAD_DIM, first_P, second_P, mask_RP)
                scale_R = _find_scale(x1_RP, x2_RP, epsilon, HEAD_DIM)
                x1_RP, x2_RP = x1_RP * scale_R[:, None], x2_RP * scale_R[:, None]
                q_sum1_RP += y1_RP * x1_RP
                q_sum2_RP += y2_RP * x2_RP
                y1_RP, y2_RP = _differentiate(
                    x1_RP, x2_RP, y1_RP * weight1_P[None, :], y2_RP * weight2_P[None, :], scale_R, HEAD_DIM
                )
            _store_head(grad_R + head * HEAD_DIM, first_P, second_P, mask_RP, y1_RP, y2_RP)
        weight1_P, weight2_P = _load_weight(k_weight_D, first_P, second_P, is_pair_P, IS_NORMALIZED, ADDED)
        y1_RP, y2_RP = _load_head(grad_k_R, first_P, second_P, mask_RP)
        y1_RP, y2_RP = y1_RP * cos_RP + y2_RP * sin_RP, y2_RP * cos_RP - y1_RP * sin_RP
        if IS_NORMALIZED:
            x1_RP, x2_RP = _load_head(mixed_R + QUERIES * HEAD_DIM, first_P, second_P, mask_RP)
            scale_R = _find_scale(x1_RP, x2_RP, epsilon, HEAD_DIM)
            x1_RP, x2_RP = x1_RP * scale_R[:, None], x2_RP * scale_R[:, None]
            k_sum1_RP += y1_RP * x1_RP
            k_sum2_RP += y2_RP * x2_RP
            y1_RP, y2_RP = _differentiate(
                x1_RP, x2_RP, y1_RP * weight1_P[None, :], y2_RP * weight2_P[None, :], scale_R, HEAD_DIM
            )
        _store_head(grad_R + QUERIES * HEAD_DIM, first_P, second_P, mask_RP, y1_RP, y2_RP)
        y1_RP, y2_RP = _load_head(grad_v_R, first_P, second_P, mask_RP)
        _store_head(grad_R + (QUERIES + 1) * HEAD_DIM, first_P, second_P, mask_RP, y1_RP, y2_RP)
    if IS_NORMALIZED:
        place_D = partial_2D + (tl.program_id(0).to(tl.int64) * num_groups + group) * 2 * HEAD_DIM
        tl.store(place_D + first_P, tl.sum(q_sum1_RP, axis=0), mask=is_pair_P)
        tl.store(place_D + second_P, tl.sum(q_sum2_RP, axis=0), mask=is_pair_P)
        tl.store(place_D + HEAD_DIM + first_P, tl.sum(k_sum1_RP, axis=0), mask=is_pair_P)
        tl.store(place_D + HEAD_DIM + second_P, tl.sum(k_sum2_RP, axis=0), mask=is_pair_P)


@triton.jit
def _find_columns(HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, WIDTH: tl.constexpr) -> tuple:
    """Return the dimensions of both halves of the pairs, and whether there is such a pair."""
    first_P = tl.arange(0, WIDTH)
    is_pair_P = first_P < HEAD_DIM // 2
    second_P = first_P + HEAD_DIM // 2
    if 2 * ROTATED != HEAD_DIM:
        is_rotated_P = first_P < ROTATED
        second_P = tl.where(is_rotated_P, first_P + ROTATED, second_P)
        first_P = tl.where(is_rotated_P, first_P, first_P + ROTATED)
    return first_P, second_P, is_pair_P


@triton.jit
def _load_rotation(
    rotation_T2F: tl.tensor, rows_R: tl.tensor, mask_RP: tl.tensor, ROTATED: tl.constexpr, WIDTH: tl.constexpr
) -> tuple:
    """Load the cosine and the sine of each pair's angle; pairs that do not rotate have an angle of 0."""
    pairs_P = tl.arange(0, WIDTH)
    places_RP = rotation_T2F + rows_R[:, None] * (2 * ROTATED) + pairs_P[None, :]
    is_rotated_RP = mask_RP & (pairs_P < ROTATED)[None, :]
    cos_RP = tl.load(places_RP, mask=is_rotated_RP, other=1.0)
    return cos_RP, tl.load(places_RP + ROTATED, mask=is_rotated_RP, other=0.0)


@triton.jit
def _load_weight(
    weight_D: tl.tensor,
    first_P: tl.tensor,
    second_P: tl.tensor,
    is_pair_P: tl.tensor,
    IS_NORMALIZED: tl.constexpr,
    ADDED: tl.constexpr,
) -> tuple:
    """Load both halves of a norm's weight; without norms they are not used."""
    weight1_P = first_P.to(tl.float32)
    weight2_P = weight1_P
    if IS_NORMALIZED:
        weight1_P = tl.load(weight_D + first_P, mask=is_pair_P, other=0.0).to(tl.float32) + ADDED
        weight2_P = tl.load(weight_D + second_P, mask=is_pair_P, other=0.0).to(tl.float32) + ADDED
    return weight1_P, weight2_P


@triton.jit
def _load_head(head_R: tl.tensor, first_P: tl.tensor, second_P: tl.tensor, mask_RP: tl.tensor) -> tuple:
    """Load both halves of a head in each row, in fp32."""
    x1_RP = tl.load(head_R[:, None] + first_P[None, :], mask=mask_RP, other=0.0).to(tl.float32)
    return x1_RP, tl.load(head_R[:, None] + second_P[None, :], mask=mask_RP, other=0.0).to(tl.float32)


@triton.jit
def _store_head(
    head_R: tl.tensor,
    first_P: tl.tensor,
    second_P: tl.tensor,
    mask_RP: tl.tensor,
    y1_RP: tl.tensor,
    y2_RP: tl.tensor,
) -> None:
    """Store both halves of a head in each row, rounded once."""
    tl.store(head_R[:, None] + first_P[None, :], y1_RP.to(head_R.dtype.element_ty), mask=mask_RP)
    tl.store(head_R[:, None] + second_P[None, :], y2_RP.to(head_R.dtype.element_ty), mask=mask_RP)


@triton.jit
def _find_scale(x1_RP: tl.tensor, x2_RP: tl.tensor, epsilon: tl.tensor, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Return what a head's numbers in each row are multiplied by to have a mean square of 1."""
    return tl.rsqrt(tl.sum(x1_RP * x1_RP + x2_RP * x2_RP, axis=1) / HEAD_DIM + epsilon)


@triton.jit
def _normalize(
    x1_RP: tl.tensor,
    x2_RP: tl.tensor,
    weight1_P: tl.tensor,
    weight2_P: tl.tensor,
    epsilon: tl.tensor,
    HEAD_DIM: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
) -> tuple:
    """Normalize a head in each row, if heads are normalized."""
    if IS_NORMALIZED:
        scale_R1 = _find_scale(x1_RP, x2_RP, epsilon, HEAD_DIM)[:, None]
        x1_RP = x1_RP * scale_R1 * weight1_P[None, :]
        x2_RP = x2_RP * scale_R1 * weight2_P[None, :]
    return x1_RP, x2_RP


@triton.jit
def _differentiate(
    x1_RP: tl.tensor,
    x2_RP: tl.tensor,
    y1_RP: tl.tensor,
    y2_RP: tl.tensor,
    scale_R: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple:
    """Compute a head's gradient from its normalized numbers x and from their gradient y."""
    along_R1 = (tl.sum(x1_RP * y1_RP + x2_RP * y2_RP, axis=1) / HEAD_DIM)[:, None]
    return (y1_RP - x1_RP * along_R1) * scale_R[:, None], (y2_RP - x2_RP * along_R1) * scale_R[:, None]
