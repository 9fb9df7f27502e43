"""sample_nodes in Triton: the best (perturbed) logit of each chunk of a row, then of the row. Nothing waits for the
device: a row that is not finite gives -1.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_kernels.sample_nodes.filters import Filters
from eagle3_kernels.sample_nodes.noise_kernel import TARGET, gumbel, noise_key
from eagle3_kernels.sample_nodes.reference import sample_node
from eagle3_kernels.testing import Case

# logits that one program looks at in a step, and programs that fill a device
BLOCK, PROGRAMS = 2048, 1024
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _best_of_chunk(
    logits,
    temperature,
    min_p,
    seeds,
    positions,
    largest,
    values,
    tokens,
    V,
    stride,
    chunk,
    NOISE: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest score of one chunk of one row; program (row, part).

    Pointers: logits [R, V], rows `stride` apart; temperature, min_p fp32 [R], seeds, positions int64 [R], read with
    NOISE; largest fp32 [R], each row's largest logit, read with CUT; written: values fp32, tokens int32 [R, parts].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * stride
    heat = tl.load(temperature + row) if NOISE else 0.0
    key = noise_key(tl.load(seeds + row), TARGET, tl.load(positions + row)) if NOISE else 0
    share = tl.load(min_p + row) if CUT else 0.0
    top = tl.div_rn(tl.load(largest + row), tl.where(heat > 0, heat, 1.0)) if CUT else 0.0
    lanes = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = tl.full((BLOCK,), _NO_ID, tl.int32)
    for start in range(part * chunk, tl.minimum((part + 1) * chunk, V), BLOCK):
        ids = start + lanes
        score = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        if NOISE:
            # temperature 0 is the plain argmax
            warm = heat > 0
            if warm:
                score = tl.div_rn(score, heat)
                if CUT:
                    score = tl.where(tl.exp(score - top) >= share, score, float("-inf"))
                score += gumbel(key, ids)
        # NaN would lose every comparison; as +inf it wins and is seen
        score = tl.where(score == score, score, float("inf"))
        # lanes ascend in id, so a later equal never replaces
        best_id = tl.where(score > best, ids, best_id)
        best = tl.maximum(best, score)
    value = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(values + at, value)
    tl.store(tokens + at, tl.min(tl.where(best == value, best_id, _NO_ID), 0))


@triton.jit
def _best_of_row(values, tokens, parts, largest, token, PARTS: tl.constexpr):
    """The best of a row's chunks; program (row).

    Pointers: values fp32, tokens int32 [R, parts]; written: largest fp32 [R], token int64 [R], -1 where the largest is
    not finite.
    """
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    at = row * parts + part
    value = tl.load(values + at, mask=part < parts, other=float("-inf"))
    best = tl.max(value, 0)
    ids = tl.load(tokens + at, mask=part < parts, other=_NO_ID)
    found = tl.min(tl.where(value == best, ids, _NO_ID), 0)
    finite = (best > float("-inf")) & (best < float("inf"))
    tl.store(largest + row, best)
    tl.store(token + row, tl.where(finite, found, -1).to(tl.int64))


class _Noise(NamedTuple):
    """Per row [R]: temperature, min_p fp32, seeds, positions int64, the row's largest logit fp32."""

    temperature: Tensor
    min_p: Tensor | None
    seeds: Tensor
    positions: Tensor
    largest: Tensor | None


def greedy_nodes(logits: Tensor) -> Tensor:
    """argmax_v logits[r, v], lowest id at ties, int64 [R]; -1 where the largest is not finite.

    Reads logits [R, V] once; writes two numbers per row and chunk.
    """
    return _best(logits)[1]


def sample_rows(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """argmax_v (logits[r, v] / T + G(seed, position, v)) over what min-p keeps, int64 [R]; see the reference.

    Reads logits [R, V] once, twice with min_p (the row's largest decides what is kept); noise never touches memory.
    """
    share = None if min_p is None else min_p.float().contiguous()
    largest = None if share is None else _best(logits)[0]
    keys = (x.long().contiguous() for x in (seeds, positions))
    return _best(logits, _Noise(temperature.float().contiguous(), share, *keys, largest))[1]


def sample_nodes(logits: Tensor, filters: Sequence[Filters], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The reference's sample_nodes, -1 for a row that is not finite and is fused.

    Rows with top-k or top-p are the reference's, one by one: they need a row's order, not only its largest score.
    """
    fused = [r for r, each in enumerate(filters) if is_fused(each)]
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if fused:
        kept = [filters[r] for r in fused]
        rows = slice(None) if len(fused) == len(logits) else torch.tensor(fused, device=logits.device)
        numbers = ([x.temperature for x in kept], [seeds[r] for r in fused], [positions[r] for r in fused])
        temperature, *keys = (_on(logits, x) for x in numbers)
        min_p = _on(logits, [x.min_p for x in kept]) if any(x.min_p and x.temperature for x in kept) else None
        tokens[rows] = sample_rows(logits[rows], temperature, *keys, min_p)
    for r in sorted(set(range(len(logits))) - set(fused)):
        tokens[r] = sample_node(logits[r], filters[r], seeds[r], positions[r])
    return tokens


def is_fused(filters: Filters) -> bool:
    """Whether the kernel draws with these filters."""
    return filters.temperature == 0 or (not filters.top_k and filters.top_p >= 1)


def _on(logits: Tensor, numbers: list) -> Tensor:
    """On the logits' device; integers as the int64 of the same 64 bits."""
    wrapped = [x if isinstance(x, float) else (x + 2**63) % 2**64 - 2**63 for x in numbers]
    return torch.tensor(wrapped, device=logits.device)


def _best(logits: Tensor, noise: _Noise | None = None) -> tuple[Tensor, Tensor]:
    """Each row's largest score fp32 [R] and its token int64 [R]."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    blocks = triton.cdiv(vocab, BLOCK)
    chunk = triton.cdiv(blocks, max(1, min(blocks, PROGRAMS // max(rows, 1)))) * BLOCK
    parts = triton.cdiv(vocab, chunk)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        temperature, min_p, seeds, positions, top = noise or (None,) * 5
        _best_of_chunk[(rows, parts)](
            logits,
            temperature,
            min_p,
            seeds,
            positions,
            top,
            values,
            tokens,
            vocab,
            logits.stride(0),
            chunk,
            NOISE=noise is not None,
            CUT=top is not None,
            BLOCK=BLOCK,
        )
        _best_of_row[(rows,)](values, tokens, parts, largest, token, PARTS=triton.next_power_of_2(parts), num_warps=1)
    return largest, token


def _chunk_case(kind: str, dtype: str) -> Case:
    noise, cut = kind != "greedy", kind == "min-p"
    signature = {"logits": f"*{dtype}", "values": "*fp32", "tokens": "*i32"} | dict.fromkeys(
        ("V", "stride", "chunk"), "i32"
    )
    given = {"temperature": "*fp32", "seeds": "*i64", "positions": "*i64"} if noise else {}
    given |= {"min_p": "*fp32", "largest": "*fp32"} if cut else {}
    absent = {name: None for name in ("temperature", "min_p", "seeds", "positions", "largest") if name not in given}
    flags = {"NOISE": noise, "CUT": cut, "BLOCK": BLOCK}
    return Case(
        f"{kind} {dtype}", _best_of_chunk, signature | given, absent | flags, divisible=("V", "stride", "chunk")
    )


_ROW_TYPES = {"values": "*fp32", "tokens": "*i32", "parts": "i32", "largest": "*fp32", "token": "*i64"}
COMPILE_CASES = [
    *(_chunk_case(kind, dtype) for kind in ("greedy", "noise", "min-p") for dtype in ("fp32", "bf16", "fp16")),
    Case("best of row", _best_of_row, _ROW_TYPES, {"PARTS": 64}, num_warps=1),
]
