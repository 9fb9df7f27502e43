"""tree_attention in Triton: one pass over the pages, split over a slot's rows, and a second one that joins the splits.

A program holds a tile of query rows (nodes x heads of one group) of one slot and one KV head, and walks its share of
that slot's key blocks: first committed rows, which every node sees, then fresh ones under the mask. So a page is read
once per KV head and tile. Softmax runs online in fp32, in powers of two.
"""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.columns_kernel import load_columns, power_of_two, store_columns, widths
from eagle3_kernels.testing import TRITON_TYPES, Case
from eagle3_kernels.tree_attention.view import TreeView

LOG2_E = math.log2(math.e)
MOST_TILE_ROWS = 128
MOST_SPLITS = 128
# splits joined per step of the second pass
JOINED = 8


@triton.jit
def _tanh(x):
    """tanh to a few ulp in fp32: the minimax rational function of Eigen; exp would cancel near 0."""
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    s = x * x
    p = s * -2.76076847742355e-16 + 2.00018790482477e-13
    p = p * s - 8.60467152213735e-11
    p = p * s + 5.12229709037114e-08
    p = p * s + 1.48572235717979e-05
    p = p * s + 6.37261928875436e-04
    p = p * s + 4.89352455891786e-03
    q = s * 1.19825839466702e-06 + 1.18534705686654e-04
    q = q * s + 2.26843463243900e-03
    q = q * s + 4.89352518554385e-03
    return x * p / q


@triton.jit
def _bits(rows, first, end, words, BLOCK: tl.constexpr):
    """Bits first .. first + BLOCK - 1 of rows of packed words (pointers [M]) -> int32 [M, BLOCK], 0 from `end` on."""
    bit = first + tl.arange(0, BLOCK)
    found = tl.zeros([rows.shape[0], BLOCK], tl.int32)
    for i in tl.static_range((BLOCK + 31) // 32):
        word = first // 32 + i
        packed = tl.load(rows + tl.minimum(word, words - 1))
        member = ((bit // 32 == word) & (bit < end)).to(tl.int32)
        found |= (packed[:, None] >> (bit % 32)[None, :]) & member[None, :]
    return found


@triton.jit(do_not_specialize=["nodes", "fresh", "splits", "window", "table_slot", "words", "slots"])
def attend_kernel(
    query,  # [B, N, Hq, d], last stride 1
    keys,  # pool [pages, PAGE_SIZE, Hkv, d], last stride 1
    values,  # pool [pages, PAGE_SIZE, Hkv, dv], last stride 1
    table,  # pages of each slot int32 [B, P], last stride 1
    lens,  # committed rows int32 [B]
    levels,  # of the fresh rows int32 [B, A], contiguous; None without a window
    mask,  # packed int32 [B, N, words], contiguous; None = causal
    sinks,  # [Hq], or None
    out,  # one split: the result [B, N, Hq, dv]; more: fp32 [splits, B, N, Hq, dv], unwritten where sums is -inf
    sums,  # fp32 [splits, B, N, Hq]: log2 of a split's sum of exponentials; None = one split
    nodes,  # N
    fresh,  # A
    splits,
    scale,  # of the scores in the exponent: scaling * log2(e), with a soft-cap softcap * log2(e)
    inner,  # scaling / softcap: scores become tanh(inner * scores); None = no soft-cap
    window,  # a query sees levels above its own - window; None = all
    query_slot,  # elements from a slot of query to the next
    query_node,
    query_head,
    table_slot,
    words,
    slots,  # B
    # strides of a pool never change
    key_page: tl.constexpr,
    key_row: tl.constexpr,
    key_head: tl.constexpr,
    value_page: tl.constexpr,
    value_row: tl.constexpr,
    value_head: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
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
    """Program (slot, KV head, split, query tile): online softmax of BLOCK_M query rows over the split's key blocks."""
    # neighbouring programs share their keys; long causal tiles first, so that no long one runs last and alone
    tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    split = program // tiles % splits
    head = program // (tiles * splits) % KV_HEADS
    slot = (program // (tiles * splits * KV_HEADS)).to(tl.int64)

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    real = node < nodes
    node = tl.minimum(node, nodes - 1)
    query_heads = head * GROUP + row % GROUP
    last_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, nodes - 1)
    # each query is also a fresh row
    before = fresh - nodes

    query_rows = query + slot * query_slot + node.to(tl.int64) * query_node
    query_rows += query_heads.to(tl.int64) * query_head
    query_main = load_columns(query_rows, 0, D, BLOCK_D)
    query_rest = query_main
    if REST_D > 0:
        query_rest = load_columns(query_rows, BLOCK_D, D, REST_D)

    length = tl.load(lens + slot)
    if mask is not None:
        mask += slot * nodes * words
    pages = table + slot * table_slot
    keys += head * key_head
    values += head * value_head

    # blocks that this tile may see: committed ones, then fresh ones, numbered through
    fresh_end = fresh
    if mask is None:
        fresh_end = before + last_node + 1
    old_first = 0
    fresh_first = 0
    oldest = -1
    if window is not None:
        levels += slot * fresh
        level = tl.load(levels + before + node)
        lowest = tl.min(level) - window + 1
        oldest = tl.maximum(level + length - window, -1)[:, None]
        old_first = tl.minimum(tl.maximum(length + lowest, 0), length)
        if mask is None:
            fresh_first = tl.maximum(lowest, 0)
    old_blocks = tl.cdiv(length - old_first, BLOCK_N)
    # where the first block would start if all were fresh
    fresh_first += length - old_blocks * BLOCK_N
    end = length + fresh_end
    blocks = tl.cdiv(end - fresh_first, BLOCK_N)
    share = tl.cdiv(blocks, splits)
    start = split * share
    stop = tl.minimum(start + share, blocks)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:
        # a key of value zero, seen by the first split
        sink = tl.load(sinks + query_heads).to(tl.float32) * (1.4426950408889634 / scale)
        maximum = tl.where(split == 0, sink, maximum)
        total += tl.where(split == 0, 1.0, 0.0)
    output = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    output_rest = total
    if REST_DV > 0:
        output_rest = tl.zeros([BLOCK_M, REST_DV], tl.float32)
    own = length + before + node
    step = tl.arange(0, BLOCK_N)

    first = tl.where(start < old_blocks, old_first, fresh_first) + start * BLOCK_N
    at = tl.minimum(first + step, tl.where(start < old_blocks, length, end) - 1)
    page = tl.load(pages + at // PAGE_SIZE)
    for block in range(start, stop):
        # a page is looked up one block ahead: two loads in a chain would not be pipelined
        next_old = block + 1 < old_blocks
        next_first = tl.where(next_old, old_first, fresh_first) + (block + 1) * BLOCK_N
        next_at = tl.minimum(next_first + step, tl.where(next_old, length, end) - 1)
        next_page = tl.load(pages + next_at // PAGE_SIZE)
        offset = (at % PAGE_SIZE).to(tl.int64)
        key_rows = keys + page.to(tl.int64) * key_page + offset * key_row
        value_rows = values + page.to(tl.int64) * value_page + offset * value_row

        key = load_columns(key_rows, 0, D, BLOCK_D)
        scores = tl.dot(query_main, tl.trans(key), input_precision="ieee")
        if REST_D > 0:
            key = load_columns(key_rows, BLOCK_D, D, REST_D)
            scores = tl.dot(query_rest, tl.trans(key), scores, input_precision="ieee")
        if inner is not None:
            scores = _tanh(inner * scores)
        if block < old_blocks:
            # rows beyond the end count as -1, which nobody sees
            position = tl.where(first + step < length, at, -1)
            scores = tl.where(position[None, :] > oldest, scores, float("-inf"))
        else:
            if mask is None:
                scores = tl.where((first + step)[None, :] <= own[:, None], scores, float("-inf"))
            else:
                seen = _bits(mask + node * words, first - length, end - length, words, BLOCK_N)
                scores = tl.where(seen != 0, scores, float("-inf"))
            if window is not None:
                key_level = tl.load(levels + at - length)
                scores = tl.where(key_level[None, :] > (level - window)[:, None], scores, float("-inf"))

        higher = tl.maximum(maximum, tl.max(scores, 1))
        # a row that has seen nothing yet
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # scaled after the difference: rounding then is relative to it, not to the scores
        weights = tl.exp2((scores - base[:, None]) * scale)
        decay = tl.exp2((maximum - base) * scale)
        maximum = higher
        total = total * decay + tl.sum(weights, 1)
        value = load_columns(value_rows, 0, DV, BLOCK_DV)
        weights = weights.to(value.dtype)
        output = tl.dot(weights, value, output * decay[:, None], input_precision="ieee")
        if REST_DV > 0:
            value = load_columns(value_rows, BLOCK_DV, DV, REST_DV)
            output_rest = tl.dot(weights, value, output_rest * decay[:, None], input_precision="ieee")
        first = next_first
        at = next_at
        page = next_page

    target = (slot * nodes + node) * (KV_HEADS * GROUP) + query_heads
    written = real
    # a row that sees nothing gives zeros
    divisor = tl.where(total == 0, 1.0, total)
    if sums is not None:
        target += split * slots.to(tl.int64) * nodes * (KV_HEADS * GROUP)
        tl.store(sums + target, tl.where(total == 0, float("-inf"), maximum * scale + tl.log2(divisor)), mask=real)
        written = real & (total != 0)
    store_columns(out + target * DV, written, 0, output / divisor[:, None], DV, BLOCK_DV)
    if REST_DV > 0:
        store_columns(out + target * DV, written, BLOCK_DV, output_rest / divisor[:, None], DV, REST_DV)


@triton.jit(do_not_specialize=["rows", "splits"])
def join_kernel(
    parts,  # fp32 [splits, rows, DV], read where sums is above -inf
    sums,  # fp32 [splits, rows]
    out,  # [rows, DV]
    rows,  # B * N * Hq
    splits,  # at most SPLITS
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program row: out = sum_s 2^(sums_s - max) parts_s / sum_s 2^(sums_s - max)."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, SPLITS)
    logs = tl.load(sums + every.to(tl.int64) * rows + row, mask=every < splits, other=float("-inf"))
    highest = tl.max(logs, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(logs - highest), 0)
    total = tl.where(total == 0, 1.0, total)
    column = tl.arange(0, BLOCK_DV)
    output = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(0, splits, STEP):
        part = first + tl.arange(0, STEP)
        at = part.to(tl.int64) * rows + row
        log = tl.load(sums + at, mask=part < splits, other=float("-inf"))
        seen = (log != float("-inf"))[:, None] & (column < DV)[None, :]
        value = tl.load(parts + at[:, None] * DV + column[None, :], mask=seen, other=0.0)
        output += tl.sum(value * tl.exp2(log - highest)[:, None], 0)
    tl.store(out + row * DV + column, (output / total).to(out.dtype.element_ty), mask=column < DV)


class Blocks(NamedTuple):
    """How a launch is cut: rows of a query tile, rows of a key block, and what the compiler is told."""

    tile: int
    keys: int
    warps: int
    stages: int


def choose_blocks(rows: int, dim: int, value_dim: int, dtype: torch.dtype, rocm: bool) -> Blocks:
    """Blocks for `rows` query rows (nodes x group) per KV head: of those that fit shared memory and spill nothing.

    Found by compiling (COMPILE_CASES); none of it has been timed on a GPU. Float32 has no tensor cores on CUDA, and
    ROCm's 64 KB of shared memory and its scalar registers allow less.
    """
    tile, widest = max(16, power_of_two(rows)), max(dim, value_dim)
    if dtype.itemsize > 2:
        return Blocks(16, 16, 8, 2 if rocm else 3)
    if widest > 256:
        return Blocks(16, 16, 4, 2)
    if dim + value_dim > 320:
        return Blocks(16, 32, 8, 2) if rocm else Blocks(min(tile, 64), 32, 8, 3)
    if not rocm:
        narrow = dim + value_dim <= 256 and widths(dim)[1] == widths(value_dim)[1] == 0
        return Blocks(min(tile, MOST_TILE_ROWS), 64 if narrow else 32, 8 if tile > 32 else 4, 3)
    if tile == 16:
        return Blocks(16, 64, 4, 2)
    return Blocks(MOST_TILE_ROWS if tile > 64 and 128 < dim + value_dim <= 256 else 64, 64, 8, 1 if widest <= 64 else 2)


def choose_splits(programs: int, rows: int, keys: int, processors: int) -> int:
    """Splits of a slot's rows that fill the device.

    Args:
        programs: those of one split.
        rows: query rows of a program.
        keys: rows that a slot may have, known without asking the device.
    """
    # what a split writes and the second pass reads, 8 * rows * dv bytes, stays a fraction of the keys and values read
    least = max(128, 8 * rows)
    return max(1, min(2 * processors // programs, keys // least, MOST_SPLITS))


@lru_cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: TreeView,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """out[b, n, h] = softmax over the keys j that node n sees of cap(scaling * q[b, n, h] . k[j]) . v[j].

    query [B, N, Hq, d], pools keys [pages, page_size, Hkv, d] and values [.., dv] -> [B, N, Hq, dv] contiguous; see the
    reference. Reads the queries and, per KV head and query tile, the pages that the tile sees; writes the output, and
    where rows are split also fp32 [splits, B, N, Hq, dv] that a second launch reads.
    """
    slots, nodes, heads, dim = query.shape
    page_size, kv_heads, value_dim = values.shape[1:]
    assert keys.stride(-1) == values.stride(-1) == 1, "a row of a pool is contiguous"
    query = query if query.stride(-1) == 1 else query.contiguous()
    out = query.new_empty(slots, nodes, heads, value_dim)
    rows = nodes * heads // kv_heads
    blocks = choose_blocks(rows, dim, value_dim, keys.dtype, torch.version.hip is not None)
    programs = slots * kv_heads * -(-rows // blocks.tile)
    reach = view.page_table.shape[1] * page_size
    splits = choose_splits(programs, min(rows, blocks.tile), reach, processors(query.device))
    parts, sums = out, None
    if splits > 1:
        parts = query.new_empty(splits, *out.shape, dtype=torch.float32)
        sums = query.new_empty(splits, slots, nodes, heads, dtype=torch.float32)
    table = view.page_table if view.page_table.stride(1) == 1 else view.page_table.contiguous()
    mask = None if view.mask is None else view.mask.contiguous()
    with torch.cuda.device_of(query):
        attend_kernel[(programs * splits,)](
            query,
            keys,
            values,
            table,
            view.lens,
            None if window is None else view.levels,
            mask,
            sinks,
            parts,
            sums,
            nodes,
            view.fresh,
            splits,
            LOG2_E * (scaling if softcap is None else softcap),
            None if softcap is None else scaling / softcap,
            window,
            *query.stride()[:3],
            table.stride(0),
            0 if mask is None else mask.shape[-1],
            slots,
            *keys.stride()[:3],
            *values.stride()[:3],
            kv_heads,
            heads // kv_heads,
            page_size,
            dim,
            value_dim,
            blocks.tile,
            blocks.keys,
            *widths(dim),
            *widths(value_dim),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
        if sums is not None:
            width = power_of_two(value_dim)
            join_kernel[(slots * nodes * heads,)](
                parts, sums, out, slots * nodes * heads, splits, value_dim, width, MOST_SPLITS, JOINED, num_warps=4
            )
    return out


def _launches(
    name: str,
    rows: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    group: int = 4,
    kv_heads: int = 8,
    page_size: int = 64,
    tree: bool = True,
    window: bool = False,
    softcap: bool = False,
    sinks: bool = False,
    full: bool = False,
) -> list[Case]:
    """What a call with `rows` query rows per KV head launches on CUDA and on ROCm; trees are split, prompts are not."""
    pointer = f"*{TRITON_TYPES[dtype]}"
    optional = {
        "levels": "*i32" if window else None,
        "mask": "*i32" if tree else None,
        "sinks": pointer if sinks else None,
        "sums": "*fp32" if tree else None,
        "inner": "fp32" if softcap else None,
        "window": "i32" if window else None,
    }
    strides = ("query_slot", "query_node", "query_head")
    signature = dict.fromkeys(("query", "keys", "values"), pointer)
    signature |= {"table": "*i32", "lens": "*i32", "out": "*fp32" if tree else pointer, "scale": "fp32"}
    signature |= dict.fromkeys(("nodes", "fresh", "splits", "table_slot", "words", "slots", *strides), "i32")
    signature |= {argument: kind for argument, kind in optional.items() if kind is not None}
    cases = []
    for rocm, architectures in ((False, ("sm_80", "sm_90")), (True, ("gfx942",))):
        blocks = choose_blocks(rows, dim, value_dim, dtype, rocm)
        constants = {argument: None for argument, kind in optional.items() if kind is None}
        for which, width in (("key", dim), ("value", value_dim)):
            row = kv_heads * width
            constants |= {f"{which}_page": page_size * row, f"{which}_row": row, f"{which}_head": width}
        constants |= {"KV_HEADS": kv_heads, "GROUP": group, "PAGE_SIZE": page_size, "D": dim, "DV": value_dim}
        constants |= {"BLOCK_M": blocks.tile, "BLOCK_N": blocks.keys}
        sizes = (*widths(dim), *widths(value_dim))
        constants |= dict(zip(("BLOCK_D", "REST_D", "BLOCK_DV", "REST_DV"), sizes, strict=True))
        cases.append(
            Case(
                f"{name} {TRITON_TYPES[dtype]} d{dim} {blocks.tile}x{blocks.keys}",
                attend_kernel,
                signature,
                constants,
                blocks.warps,
                blocks.stages,
                strides,
                architectures,
                full,
            )
        )
    return cases


def _join_case(value_dim: int, dtype: torch.dtype) -> Case:
    kind = TRITON_TYPES[dtype]
    return Case(
        f"join {kind} d{value_dim}",
        join_kernel,
        {"parts": "*fp32", "sums": "*fp32", "out": f"*{kind}", "rows": "i32", "splits": "i32"},
        {"DV": value_dim, "BLOCK_DV": power_of_two(value_dim), "SPLITS": MOST_SPLITS, "STEP": JOINED},
    )


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
COMPILE_CASES = [
    # Llama-3.1-8B: trees of 8 and of 60 nodes, plain decoding, a prompt
    *(case for dtype in (_BF16, _FP16, _FP32) for case in _launches("tree", 36, 128, 128, dtype)),
    *_launches("tree", 244, 128, 128, _BF16),
    *_launches("row", 4, 128, 128, _BF16),
    *_launches("prompt", 4096, 128, 128, _BF16, tree=False),
    # gpt-oss, Gemma 2, DeepSeek
    *_launches("window sinks tree", 72, 64, 64, _BF16, group=8, window=True, sinks=True),
    *_launches("window cap tree", 18, 256, 256, _BF16, group=2, kv_heads=4, window=True, softcap=True),
    *_launches("tree", 9, 192, 128, _BF16, group=1, kv_heads=128),
    *_launches("prompt", 512, 192, 128, _BF16, group=1, kv_heads=128, tree=False),
    *(_join_case(128, dtype) for dtype in (_BF16, _FP16, _FP32)),
    # the grid of oracle 6, and other widths
    *(
        case
        for dim in (32, 64, 80, 96, 128)
        for dtype in (_BF16, _FP32)
        for rows in ((16, 32, 64, 128) if dtype == _BF16 else (16,))
        for tree in (True, False)
        for case in _launches("tree" if tree else "prompt", rows, dim, dim, dtype, tree=tree, full=True)
    ),
    *_launches("absorbed tree", 128, 576, 512, _BF16, group=128, kv_heads=1, full=True),
]
