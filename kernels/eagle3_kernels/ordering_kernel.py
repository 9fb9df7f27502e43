"""stable_topk in Triton, and the functions by which kernels order floats as the reference does.

Each element becomes its rank, one int64: the value as an ordered int32 (NaN first, -0.0 equal to 0.0), then
2^31 - 1 - index. Ranks of a row are distinct, so its maximum and minimum leave no tie to decide.
"""

# pyright reads a launch as a plain call: constexpr parameters get plain values
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.testing import Case

# below every rank
ABSENT = tl.constexpr(-(2**63))
ABOVE_ALL = tl.constexpr(2**63 - 1)
TILE = 1024
# a chunk is long enough for its k best to be few, and there are enough programs to fill a GPU
LEAST_CHUNK, PROGRAMS = 2048, 1024
ONE_WARP = 256
# each of the k best costs a turn through its tile
MOST_K = 64


@triton.jit
def rank_of(value, index):
    """Ranks of fp32 values (or narrower) at int32 indices."""
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -size, size)
    key = tl.where(size > 0x7F800000, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def index_of(rank):
    return (0x7FFFFFFF - (rank & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def none_kept(K: tl.constexpr, SLOTS: tl.constexpr):
    """Room for K ranks [SLOTS], still empty; the slots from K on are out of use."""
    slot = tl.arange(0, SLOTS)
    return tl.where(slot < K, ABSENT + slot.to(tl.int64), ABOVE_ALL)


@triton.jit
def keep_best(kept, ranks):
    """`kept` [SLOTS] with the best of `ranks` [TILE] in the place of its worst.

    One turn each, and a last look: at most K turns, since a tile's later ranks fall behind K earlier ones; about
    K / t turns for the t-th tile of a row in random order.
    """
    best, worst = tl.max(ranks, 0), tl.min(kept, 0)
    while best > worst:
        kept = tl.where(kept == worst, best, kept)
        ranks = tl.where(ranks == best, ABSENT, ranks)
        best, worst = tl.max(ranks, 0), tl.min(kept, 0)
    return kept


@triton.jit
def places(kept, K: tl.constexpr, SLOTS: tl.constexpr):
    """Where each kept rank stands among the K, best first [SLOTS]."""
    used = tl.arange(0, SLOTS) < K
    better = (kept[None, :] > kept[:, None]) & used[None, :]
    return tl.sum(better.to(tl.int32), 1)


@triton.jit
def store_best(kept, x_ptr, best_ptr, index_ptr, row, row_stride, K: tl.constexpr, SLOTS: tl.constexpr):
    """Values and indices of a row's K best, in order."""
    used = tl.arange(0, SLOTS) < K
    index, place = index_of(kept), places(kept, K, SLOTS)
    value = tl.load(x_ptr + row * row_stride + index, mask=used)
    tl.store(best_ptr + row * K + place, value, mask=used)
    tl.store(index_ptr + row * K + place, index.to(tl.int64), mask=used)


@triton.jit
def best_of_chunk_kernel(
    x_ptr,  # [R, size] any float dtype up to fp32, rows contiguous
    ranks_ptr,  # out, int64 [R, parts, K]: a chunk's best in no order; None = one chunk
    best_ptr,  # out, if there is one chunk: [R, K] in x's dtype
    index_ptr,  # out, if there is one chunk: int64 [R, K]
    size,
    row_stride,
    chunk,  # elements per program, a multiple of TILE
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K rounded up to a power of two
    TILE: tl.constexpr,
):
    """Program (row, part) keeps the K best of one chunk."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((part + 1) * chunk, size)
    kept = none_kept(K, SLOTS)
    for start in range(part * chunk, end, TILE):
        index = start + tl.arange(0, TILE)
        inside = index < end
        value = tl.load(x_ptr + row * row_stride + index, mask=inside, other=0.0)
        kept = keep_best(kept, tl.where(inside, rank_of(value, index), ABSENT))
    if ranks_ptr is None:
        store_best(kept, x_ptr, best_ptr, index_ptr, row, row_stride, K, SLOTS)
    else:
        slot = tl.arange(0, SLOTS)
        # a last chunk of fewer than K leaves places empty; those of the first chunk are all taken, and come first
        tl.store(ranks_ptr + (row * tl.num_programs(1) + part) * K + slot, kept, mask=slot < K)


@triton.jit(do_not_specialize=["candidates"])
def merge_chunks_kernel(
    x_ptr,  # as above
    ranks_ptr,  # int64 [R, candidates]
    best_ptr,  # out [R, K]: bits as in x, so NaN and -0.0 stay what they are
    index_ptr,  # out, int64 [R, K]
    candidates,  # parts * K
    row_stride,  # of x
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program row: the K best of its chunks' best, in order."""
    row = tl.program_id(0).to(tl.int64)
    kept = none_kept(K, SLOTS)
    for start in range(0, candidates, TILE):
        at = start + tl.arange(0, TILE)
        kept = keep_best(kept, tl.load(ranks_ptr + row * candidates + at, mask=at < candidates, other=ABSENT))
    store_best(kept, x_ptr, best_ptr, index_ptr, row, row_stride, K, SLOTS)


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dim of `x` [..., V], with int64 indices; 1 <= k <= MOST_K, V < 2^31.

    (value, index) before (value', index') iff value > value' or value = value' and index < index'; a NaN is above all.
    Reads x once; where a row is cut in chunks, each passes k int64 to a second launch. No host sync.
    """
    assert 1 <= k <= min(MOST_K, x.shape[-1]) and x.dtype.itemsize <= 4, (k, x.shape, x.dtype)
    shape, size = x.shape[:-1], x.shape[-1]
    x = x.reshape(-1, size)
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, stride = x.shape[0], x.stride(0)
    chunk, parts = chunks(rows, size)
    best, index = x.new_empty(rows, k), torch.empty(rows, k, dtype=torch.int64, device=x.device)
    ranks = None if parts == 1 else torch.empty(rows, parts * k, dtype=torch.int64, device=x.device)
    if rows:
        best_of_chunk_kernel[rows, parts](x, ranks, best, index, size, stride, chunk, **room(size, k))
    if rows and ranks is not None:
        merge_chunks_kernel[rows,](x, ranks, best, index, parts * k, stride, **room(parts * k, k))
    return best.view(*shape, k), index.view(*shape, k)


def chunks(rows: int, size: int) -> tuple[int, int]:
    """(elements of a chunk, chunks of a row): short chunks where rows are few."""
    parts = min(_ceil(PROGRAMS, max(rows, 1)), _ceil(size, LEAST_CHUNK))
    chunk = _ceil(size, parts * TILE) * TILE
    return chunk, _ceil(size, chunk)


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def room(size: int, k: int) -> dict[str, int]:
    """Constants of a program that keeps the k best of a row of `size`; short work has one warp, and no barriers."""
    tile, slots = min(TILE, max(128, 1 << (size - 1).bit_length())), 1 << (k - 1).bit_length()
    return {"K": k, "SLOTS": slots, "TILE": tile, "num_warps": 1 if max(tile, slots * slots) <= ONE_WARP else 4}


def room_case(name: str, kernel, signature: dict[str, str], size: int, k: int, **options) -> Case:
    """A compile case with the constants of `room`."""
    constants = room(size, k) | options.pop("absent", {})
    warps = constants.pop("num_warps")
    return Case(f"{name} k{k}", kernel, signature, constants, num_warps=warps, **options)


def _cases(k: int, dtype: str, full: bool = False) -> list[Case]:
    x, ranks, outputs = {"x_ptr": f"*{dtype}"}, {"ranks_ptr": "*i64"}, {"best_ptr": f"*{dtype}", "index_ptr": "*i64"}
    sizes = {"size": "i32", "row_stride": "i32", "chunk": "i32"}
    merge = x | ranks | outputs | {"candidates": "i32", "row_stride": "i32"}
    chunk, whole = x | ranks | outputs | sizes, x | outputs | sizes
    parts, none = chunks(10, VOCAB)[1], {"ranks_ptr": None}
    return [
        room_case(f"best of chunk {dtype}", best_of_chunk_kernel, chunk, VOCAB, k, divisible=list(sizes), full=full),
        room_case(f"best of row {dtype}", best_of_chunk_kernel, whole, VOCAB, k, absent=none, full=True),
        room_case(f"merge {dtype}", merge_chunks_kernel, merge, parts * k, k, divisible=("row_stride",), full=full),
    ]


# the draft vocabulary that the cases are compiled for
VOCAB = 32000
COMPILE_CASES = [
    *(case for k in (10, MOST_K) for case in _cases(k, "fp32")),
    *_cases(1, "fp32", full=True),
    *(case for dtype in ("bf16", "fp16") for case in _cases(10, dtype, full=True)),
]
