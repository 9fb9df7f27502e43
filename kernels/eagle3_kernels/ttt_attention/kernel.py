"""ttt_attention in Triton, differentiable: a launch forwards, three backwards, memory linear in T.

A document's start and a window leave each query one interval of step-0 keys, `low .. last`; both bounds ascend over the
packed rows. So a tile of queries walks the keys from its lowest bound on, and a block of keys one run of queries.
"""

# pyright reads a launch as a plain call: constexpr parameters get plain values, num_warps is no parameter
# pyright: reportArgumentType=false, reportCallIssue=false

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from eagle3_kernels.columns_kernel import widths
from eagle3_kernels.testing import TRITON_TYPES, Case
from eagle3_kernels.ttt_attention.backward_kernel import (
    backward_key_kernel,
    backward_own_kernel,
    backward_query_kernel,
)
from eagle3_kernels.ttt_attention.forward_kernel import forward_kernel

LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """How a launch is cut: queries of a tile, keys of a block, and what the compiler is told."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The blocks of each launch."""

    forward: Blocks
    d_query: Blocks
    d_key: Blocks
    d_own: Blocks


def choose_plan(dim: int, value_dim: int, dtype: torch.dtype, rocm: bool) -> Plan:
    """Blocks that fit shared memory and spill nothing, found by compiling (COMPILE_CASES); never timed on a GPU.

    Float32 has no tensor cores on CUDA, and ROCm has 64 KB of shared memory.
    """
    if dtype.itemsize > 2:
        few, many = Blocks(16, 16, 4, 2), Blocks(16, 16, 8, 2)
        own = Blocks(8, 0, 4, 1)
        return Plan(few, few, few, own) if rocm else Plan(many._replace(stages=3), few, many, own)
    own, narrow = Blocks(16, 0, 4, 1), dim + value_dim <= 256
    if rocm:
        if narrow:
            return Plan(Blocks(128, 64, 8, 1), Blocks(64, 32, 4, 1), Blocks(32, 64, 4, 1), own)
        return Plan(Blocks(64, 64, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), own)
    if narrow:
        return Plan(Blocks(128, 64, 8, 3), Blocks(64, 32, 8, 2), Blocks(32, 64, 8, 2), own)
    return Plan(Blocks(64, 64, 8, 2), Blocks(32, 32, 8, 2), Blocks(32, 32, 8, 2), own)


class _Shapes(NamedTuple):
    """What every launch is told of the shapes."""

    heads: int
    group: int
    dim: int
    value_dim: int

    def widths(self) -> tuple[int, ...]:
        return *widths(self.dim), *widths(self.value_dim)


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    rows: Tensor,
    lengths: list[int],
    scaling: float,
    window: int | None = None,
) -> Tensor:
    """See `ttt_attention_reference`: same arguments, same result, differentiable in the five tensors.

    Keeps its inputs, the output and fp32 [Hq, R]. Reads keys and values once per query tile that sees them, from the
    first visible one on; backwards also the queries of a key block once per block. The host never waits for the device.
    """
    assert len({x.dtype for x in (query, key, value, own_key, own_value)}) == 1, "one dtype for all five tensors"
    tensors = (_laid_out(x) for x in (query, key, value))
    own = own_key.contiguous(), own_value.contiguous()
    low = first_keys(rows, tuple(lengths), own_key.shape[0], window)
    return _TTTAttention.apply(*tensors, *own, rows.int(), low, scaling, window)


def first_keys(rows: Tensor, lengths: tuple[int, ...], steps: int, window: int | None) -> Tensor:
    """The first step-0 key that each row sees [R] int32: its document's first, or the window's. Ascending."""
    ends = _ends(lengths, rows.device)
    document = torch.searchsorted(ends, rows, right=True)
    low = torch.where(document > 0, ends[document - 1], 0)
    if window is not None:
        low = low.maximum(rows + (steps - window + 1))
    return low.int()


@lru_cache(maxsize=4)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, as the copy to the device makes the host wait: layers and steps of one batch share it."""
    return torch.tensor(lengths).cumsum(0).to(device)


def _laid_out(x: Tensor) -> Tensor:
    """x with rows contiguous and nothing between them, so that a gradient made by empty_like has x's strides."""
    dense = x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride() == x.stride()
    return x if dense else x.contiguous()


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, last, low, scaling, window):
        heads, count, dim = query.shape
        shapes = _Shapes(heads, heads // key.shape[0], dim, value.shape[-1])
        plan = choose_plan(dim, shapes.value_dim, query.dtype, torch.version.hip is not None)
        out = query.new_empty(count, heads, shapes.value_dim)
        sums = query.new_empty(heads, count, dtype=torch.float32)
        steps = own_key.shape[0]
        ctx.shapes, ctx.plan, ctx.scaling = shapes, plan, scaling
        ctx.own_first = 0 if window is None else max(0, steps - window)
        ctx.save_for_backward(query, key, value, own_key, own_value, last, low, out, sums)
        if count:
            with torch.cuda.device_of(query):
                forward_kernel[(triton.cdiv(count, plan.forward.queries) * heads,)](
                    *(query, key, value, own_key, own_value, last, low, out, sums),
                    *(count, steps, ctx.own_first, scaling * LOG2_E),
                    *(stride for x in (query, key, value) for stride in x.stride()[:2]),
                    *shapes,
                    *plan.forward[:2],
                    *shapes.widths(),
                    num_warps=plan.forward.warps,
                    num_stages=plan.forward.stages,
                )
        return out

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in tensors[:5]]
        if len(grad):
            with torch.cuda.device_of(grad):
                _launch_backward(ctx, tensors, grad.contiguous(), grads)
        else:
            grads = [x.zero_() for x in grads]
        return *grads, None, None, None, None


def _launch_backward(ctx, tensors: tuple[Tensor, ...], grad: Tensor, grads: list[Tensor]) -> None:
    """Queries' gradients first: that launch writes `delta`, which the others read."""
    query, key, value, own_key, own_value, last, low, out, sums = tensors
    shapes, plan, scale = ctx.shapes, ctx.plan, ctx.scaling * LOG2_E
    (heads, count), tokens, steps = query.shape[:2], key.shape[1], own_key.shape[0]
    strides = [stride for x in (query, key, value) for stride in x.stride()[:2]]
    delta = torch.empty_like(sums)
    backward_query_kernel[(triton.cdiv(count, plan.d_query.queries) * heads,)](
        *(query, key, value, own_key, own_value, last, low, out, sums, grad, delta, grads[0]),
        *(count, steps, ctx.own_first, scale, ctx.scaling),
        *strides,
        *shapes,
        *plan.d_query[:2],
        *shapes.widths(),
        num_warps=plan.d_query.warps,
        num_stages=plan.d_query.stages,
    )
    blocks = triton.cdiv(tokens, plan.d_key.keys)
    first = torch.arange(blocks, dtype=torch.int32, device=grad.device) * plan.d_key.keys
    starts = torch.searchsorted(last, first, out_int32=True)
    stops = torch.searchsorted(low, first + plan.d_key.keys, out_int32=True)
    backward_key_kernel[(blocks * key.shape[0],)](
        *(query, key, value, last, low, starts, stops, sums, grad, delta, grads[1], grads[2]),
        *(count, tokens, scale, ctx.scaling),
        *strides,
        *shapes,
        *plan.d_key[:2],
        *shapes.widths(),
        num_warps=plan.d_key.warps,
        num_stages=plan.d_key.stages,
    )
    if steps:
        backward_own_kernel[(triton.cdiv(count, plan.d_own.queries), key.shape[0], steps)](
            *(query, own_key, own_value, sums, grad, delta, grads[3], grads[4]),
            *(count, ctx.own_first, scale, ctx.scaling, *strides[:2]),
            *shapes,
            plan.d_own.queries,
            *shapes.widths(),
            num_warps=plan.d_own.warps,
            num_stages=plan.d_own.stages,
        )


_POINTERS = dict.fromkeys(("sums", "delta"), "*fp32") | dict.fromkeys(("last", "low", "starts", "stops"), "*i32")
_STRIDES = tuple(f"{x}_{of}" for x in ("query", "key", "value") for of in ("head", "row"))
_NUMBERS = dict.fromkeys(("count", "tokens", "steps", "own_first", *_STRIDES), "i32") | dict.fromkeys(
    ("scale", "scaling"), "fp32"
)


def _cases(dim: int, value_dim: int, dtype: torch.dtype, group: int = 4, full: bool = False) -> list[Case]:
    """The four launches at these shapes, on CUDA and on ROCm."""
    cases, shapes = [], _Shapes(8 * group, group, dim, value_dim)
    sizes = shapes._asdict() | dict(zip(("BLOCK_D", "REST_D", "BLOCK_DV", "REST_DV"), shapes.widths(), strict=True))
    kernels = (forward_kernel, backward_query_kernel, backward_key_kernel, backward_own_kernel)
    for rocm, architectures in ((False, ("sm_80", "sm_90")), (True, ("gfx942",))):
        for name, kernel, blocks in zip(Plan._fields, kernels, choose_plan(dim, value_dim, dtype, rocm), strict=True):
            constants = {n.upper() if n in ("heads", "group") else n: v for n, v in sizes.items()}
            constants = {{"dim": "D", "value_dim": "DV"}.get(n, n): v for n, v in constants.items()}
            constants |= {"BLOCK_M": blocks.queries, "BLOCK_N": blocks.keys}
            constants = {n: v for n, v in constants.items() if n in kernel.arg_names}
            signature = {
                n: _POINTERS.get(n) or _NUMBERS.get(n) or f"*{TRITON_TYPES[dtype]}"
                for n in kernel.arg_names
                if n not in constants
            }
            cases.append(
                Case(
                    f"{name} {TRITON_TYPES[dtype]} d{dim} {blocks.queries}x{blocks.keys}",
                    kernel,
                    signature,
                    constants,
                    blocks.warps,
                    blocks.stages,
                    tuple(n for n in _STRIDES if n in signature),
                    architectures,
                    full,
                )
            )
    return cases


COMPILE_CASES = [
    # Llama-3.1-8B
    *(case for dtype in (torch.bfloat16, torch.float16, torch.float32) for case in _cases(128, 128, dtype)),
    *_cases(64, 64, torch.bfloat16, group=3),
    *(
        case
        for dims in ((32, 32), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256))
        for dtype in (torch.bfloat16, torch.float32)
        for case in _cases(*dims, dtype, full=True)
    ),
]
