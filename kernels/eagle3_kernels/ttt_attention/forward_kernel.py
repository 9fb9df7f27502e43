"""TTT attention forwards in Triton: online softmax in fp32 over a tile's own keys, then the step-0 keys it sees."""

# pyright takes tl.zeros for a function that never returns
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from eagle3_kernels.columns_kernel import (
    add_product,
    add_scaled,
    inner,
    load_row,
    product,
    scaled,
    store_row,
    zero_row,
)


@triton.jit
def queries_of_tile(last, low, tile, count, BLOCK_M: tl.constexpr):
    """Of a tile's queries [M]: index, whether it is real, the first and the last key; beyond the end the last again."""
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = index < count
    index = tl.minimum(index, count - 1)
    return index, real, tl.load(low + index), tl.load(last + index)


@triton.jit(do_not_specialize=["count", "steps", "own_first"])
def forward_kernel(
    query,  # [Hq, R, d], last stride 1
    key,  # [Hkv, T, d], last stride 1
    value,  # [Hkv, T, dv], last stride 1
    own_key,  # [k, Hkv, R, d], contiguous
    own_value,  # [k, Hkv, R, dv], contiguous
    last,  # int32 [R], ascending: a query sees the keys low .. last
    low,  # int32 [R], ascending
    out,  # [R, Hq, dv], contiguous
    sums,  # fp32 [Hq, R]: log-sum-exp of a query's scores, in their own unit (times `scale`: powers of two)
    count,  # R
    steps,  # k
    own_first,  # own keys before this one are out of the window
    scale,  # scaling * log2(e)
    query_head,  # elements from a head to the next
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    # a width in two powers of two, see widths()
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
):
    """Program (query tile, head). Heads are neighbours, as they share keys; late tiles, which see most, go first."""
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    tile = tl.num_programs(0) // HEADS - 1 - program // HEADS
    kv_head = head // GROUP
    index, real, first_key, last_key = queries_of_tile(last, low, tile, count, BLOCK_M)
    wide = index.to(tl.int64)
    q, q_rest = load_row(query + head * query_head + wide * query_row, D, BLOCK_D, REST_D)
    key += kv_head * key_head
    value += kv_head * value_head

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o, o_rest = zero_row(BLOCK_M, BLOCK_DV, REST_DV)
    for step in range(own_first, steps):
        own = (step * (HEADS // GROUP) + kv_head) * count + wide
        k, k_rest = load_row(own_key + own * D, D, BLOCK_D, REST_D)
        score = inner(q, q_rest, k, k_rest, REST_D)
        higher = tl.maximum(maximum, score)
        weight = tl.exp2((score - higher) * scale)
        decay = tl.exp2((maximum - higher) * scale)
        maximum = higher
        total = total * decay + weight
        v, v_rest = load_row(own_value + own * DV, DV, BLOCK_DV, REST_DV)
        o, o_rest = scaled(o, o_rest, decay, REST_DV)
        o, o_rest = add_scaled(o, o_rest, weight, v, v_rest, REST_DV)

    stop = tl.max(last_key) + 1
    for start in range(tl.min(first_key), stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        rows = tl.minimum(at, stop - 1).to(tl.int64)
        k, k_rest = load_row(key + rows * key_row, D, BLOCK_D, REST_D)
        scores = product(q, q_rest, k, k_rest, REST_D)
        if (start < tl.max(first_key)) | (start + BLOCK_N - 1 > tl.min(last_key)):
            seen = (at[None, :] >= first_key[:, None]) & (at[None, :] <= last_key[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, 1))
        # a row that has seen nothing yet
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # scaled after the difference: rounding then is relative to it, not to the scores
        weights = tl.exp2((scores - base[:, None]) * scale)
        decay = tl.exp2((maximum - base) * scale)
        maximum = higher
        total = total * decay + tl.sum(weights, 1)
        v, v_rest = load_row(value + rows * value_row, DV, BLOCK_DV, REST_DV)
        o, o_rest = scaled(o, o_rest, decay, REST_DV)
        o, o_rest = add_product(o, o_rest, weights.to(v.dtype), v, v_rest, REST_DV)

    # every query sees itself or its last own key: no sum is zero
    tl.store(sums + head * count + index, maximum + tl.log2(total) / scale, mask=real)
    to = out + (wide * HEADS + head) * DV
    store_row(to, real, o / total[:, None], o_rest / total[:, None], DV, BLOCK_DV, REST_DV)
