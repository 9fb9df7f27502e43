"""TTT attention backwards in Triton: gradients per query tile, per key block and per own key, each written once.

With s the scores, P = exp(s - log-sum-exp), O = P V and D = sum(dO * O) over the value dim:
    dV = P^T dO        dP = dO V^T        ds = P * (dP - D)        dQ = scaling ds K        dK = scaling ds^T Q
Scores are computed again in each kernel. No atomics: two runs give the same bits.
"""

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
    store_row,
    zero_row,
)
from eagle3_kernels.ttt_attention.forward_kernel import queries_of_tile


@triton.jit(do_not_specialize=["count", "steps", "own_first"])
def backward_query_kernel(
    query,  # [Hq, R, d], last stride 1
    key,  # [Hkv, T, d], last stride 1
    value,  # [Hkv, T, dv], last stride 1
    own_key,  # [k, Hkv, R, d], contiguous
    own_value,  # [k, Hkv, R, dv], contiguous
    last,  # int32 [R], ascending: a query sees the keys low .. last
    low,  # int32 [R], ascending
    out,  # [R, Hq, dv], contiguous, as the forward wrote it
    sums,  # fp32 [Hq, R], too
    grad,  # of out [R, Hq, dv], contiguous
    delta,  # written: sum of grad * out, fp32 [Hq, R]
    d_query,  # written: [Hq, R, d], strides of query
    count,  # R
    steps,  # k
    own_first,  # own keys before this one are out of the window
    scale,  # scaling * log2(e)
    scaling,
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
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
):
    """Program (query tile, head), in the forward's order."""
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    tile = tl.num_programs(0) // HEADS - 1 - program // HEADS
    kv_head = head // GROUP
    index, real, first_key, last_key = queries_of_tile(last, low, tile, count, BLOCK_M)
    wide = index.to(tl.int64)
    at_query = head * query_head + wide * query_row
    at_out = (wide * HEADS + head) * DV
    do, do_rest = load_row(grad + at_out, DV, BLOCK_DV, REST_DV)
    o, o_rest = load_row(out + at_out, DV, BLOCK_DV, REST_DV)
    d = inner(do, do_rest, o, o_rest, REST_DV)
    tl.store(delta + head * count + index, d, mask=real)
    lse = tl.load(sums + head * count + index)
    q, q_rest = load_row(query + at_query, D, BLOCK_D, REST_D)
    key += kv_head * key_head
    value += kv_head * value_head

    dq, dq_rest = zero_row(BLOCK_M, BLOCK_D, REST_D)
    for step in range(own_first, steps):
        own = (step * (HEADS // GROUP) + kv_head) * count + wide
        k, k_rest = load_row(own_key + own * D, D, BLOCK_D, REST_D)
        v, v_rest = load_row(own_value + own * DV, DV, BLOCK_DV, REST_DV)
        p = tl.exp2((inner(q, q_rest, k, k_rest, REST_D) - lse) * scale)
        ds = p * (inner(do, do_rest, v, v_rest, REST_DV) - d)
        dq, dq_rest = add_scaled(dq, dq_rest, ds, k, k_rest, REST_D)

    stop = tl.max(last_key) + 1
    for start in range(tl.min(first_key), stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        rows = tl.minimum(at, stop - 1).to(tl.int64)
        k, k_rest = load_row(key + rows * key_row, D, BLOCK_D, REST_D)
        p = tl.exp2((product(q, q_rest, k, k_rest, REST_D) - lse[:, None]) * scale)
        if (start < tl.max(first_key)) | (start + BLOCK_N - 1 > tl.min(last_key)):
            seen = (at[None, :] >= first_key[:, None]) & (at[None, :] <= last_key[:, None])
            p = tl.where(seen, p, 0.0)
        v, v_rest = load_row(value + rows * value_row, DV, BLOCK_DV, REST_DV)
        ds = p * (product(do, do_rest, v, v_rest, REST_DV) - d[:, None])
        dq, dq_rest = add_product(dq, dq_rest, ds.to(k.dtype), k, k_rest, REST_D)
    store_row(d_query + at_query, real, dq * scaling, dq_rest * scaling, D, BLOCK_D, REST_D)


@triton.jit(do_not_specialize=["count", "tokens"])
def backward_key_kernel(
    query,  # [Hq, R, d], last stride 1
    key,  # [Hkv, T, d], last stride 1
    value,  # [Hkv, T, dv], last stride 1
    last,  # int32 [R], ascending: a query sees the keys low .. last
    low,  # int32 [R], ascending
    starts,  # int32 [key blocks]: a block is seen by the queries starts .. stops - 1, at most
    stops,
    sums,  # fp32 [Hq, R]
    grad,  # [R, Hq, dv], contiguous
    delta,  # fp32 [Hq, R]
    d_key,  # written: [Hkv, T, d], strides of key
    d_value,  # written: [Hkv, T, dv], strides of value
    count,  # R
    tokens,  # T
    scale,  # scaling * log2(e)
    scaling,
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
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
):
    """Program (key block, KV head): all queries of the group's heads that see it. Early blocks, seen by most, first."""
    program = tl.program_id(0)
    kv_head = (program % (HEADS // GROUP)).to(tl.int64)
    block = program // (HEADS // GROUP)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    real = at < tokens
    rows = tl.minimum(at, tokens - 1).to(tl.int64)
    key_rows = kv_head * key_head + rows * key_row
    value_rows = kv_head * value_head + rows * value_row
    k, k_rest = load_row(key + key_rows, D, BLOCK_D, REST_D)
    v, v_rest = load_row(value + value_rows, DV, BLOCK_DV, REST_DV)
    start = tl.load(starts + block)
    stop = tl.load(stops + block)
    tiles = tl.cdiv(stop - start, BLOCK_M)

    dk, dk_rest = zero_row(BLOCK_N, BLOCK_D, REST_D)
    dv, dv_rest = zero_row(BLOCK_N, BLOCK_DV, REST_DV)
    # one loop, as only the innermost is pipelined
    for i in range(GROUP * tiles):
        head = kv_head * GROUP + i // tiles
        index = start + i % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = index < stop
        index = tl.minimum(index, stop - 1)
        wide = index.to(tl.int64)
        q, q_rest = load_row(query + head * query_head + wide * query_row, D, BLOCK_D, REST_D)
        do, do_rest = load_row(grad + (wide * HEADS + head) * DV, DV, BLOCK_DV, REST_DV)
        lse = tl.load(sums + head * count + index)
        d = tl.load(delta + head * count + index)
        # transposed: keys by queries
        p = tl.exp2((product(k, k_rest, q, q_rest, REST_D) - lse[None, :]) * scale)
        first_key = tl.load(low + index)
        # a query beyond the end sees nothing
        last_key = tl.where(valid, tl.load(last + index), -1)
        p = tl.where((at[:, None] >= first_key[None, :]) & (at[:, None] <= last_key[None, :]), p, 0.0)
        dv, dv_rest = add_product(dv, dv_rest, p.to(do.dtype), do, do_rest, REST_DV)
        ds = p * (product(v, v_rest, do, do_rest, REST_DV) - d[None, :])
        dk, dk_rest = add_product(dk, dk_rest, ds.to(q.dtype), q, q_rest, REST_D)
    store_row(d_key + key_rows, real, dk * scaling, dk_rest * scaling, D, BLOCK_D, REST_D)
    store_row(d_value + value_rows, real, dv, dv_rest, DV, BLOCK_DV, REST_DV)


@triton.jit(do_not_specialize=["count", "own_first"])
def backward_own_kernel(
    query,  # [Hq, R, d], last stride 1
    own_key,  # [k, Hkv, R, d], contiguous
    own_value,  # [k, Hkv, R, dv], contiguous
    sums,  # fp32 [Hq, R]
    grad,  # [R, Hq, dv], contiguous
    delta,  # fp32 [Hq, R]
    d_own_key,  # written: [k, Hkv, R, d], contiguous
    d_own_value,  # written: [k, Hkv, R, dv], contiguous
    count,  # R
    own_first,  # own keys before this one are out of the window: their gradient is zero
    scale,  # scaling * log2(e)
    scaling,
    query_head,  # elements from a head to the next
    query_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    REST_DV: tl.constexpr,
):
    """Program (query tile, KV head, step): the group's heads share an own key."""
    kv_head, step = tl.program_id(1).to(tl.int64), tl.program_id(2)
    index = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = index < count
    index = tl.minimum(index, count - 1)
    wide = index.to(tl.int64)
    own = (step * (HEADS // GROUP) + kv_head) * count + wide
    k, k_rest = load_row(own_key + own * D, D, BLOCK_D, REST_D)
    v, v_rest = load_row(own_value + own * DV, DV, BLOCK_DV, REST_DV)

    dk, dk_rest = zero_row(BLOCK_M, BLOCK_D, REST_D)
    dv, dv_rest = zero_row(BLOCK_M, BLOCK_DV, REST_DV)
    if step >= own_first:
        for i in range(GROUP):
            head = kv_head * GROUP + i
            q, q_rest = load_row(query + head * query_head + wide * query_row, D, BLOCK_D, REST_D)
            do, do_rest = load_row(grad + (wide * HEADS + head) * DV, DV, BLOCK_DV, REST_DV)
            lse = tl.load(sums + head * count + index)
            d = tl.load(delta + head * count + index)
            p = tl.exp2((inner(q, q_rest, k, k_rest, REST_D) - lse) * scale)
            dv, dv_rest = add_scaled(dv, dv_rest, p, do, do_rest, REST_DV)
            ds = p * (inner(do, do_rest, v, v_rest, REST_DV) - d)
            dk, dk_rest = add_scaled(dk, dk_rest, ds, q, q_rest, REST_D)
    store_row(d_own_key + own * D, real, dk * scaling, dk_rest * scaling, D, BLOCK_D, REST_D)
    store_row(d_own_value + own * DV, real, dv, dv_rest, DV, BLOCK_DV, REST_DV)
