"""The ttt_attention kernels against the definition in float64: the output and the gradients of all five tensors.

Catches: a row that sees another document, the future or another row's own keys; windows by row instead of by position;
a group's heads not summed; a tile's padding that counts; blocks of keys walked though nobody sees them; outputs that
nobody writes (they are NaN here).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3_kernels.testing import device, poisoned
from eagle3_kernels.ttt_attention import ttt_attention
from eagle3_kernels.ttt_attention.reference import ttt_attention_reference

kernel = pytest.importorskip("eagle3_kernels.ttt_attention.kernel", reason="needs triton", exc_type=ImportError)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS, GROUPS = (32, 64, 80, 96, 128), (1, 3, 6, 7, 8)
NAMES = ("out", "query", "key", "value", "own key", "own value")


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv("EAGLE3_KERNELS", "triton")


@dataclass(frozen=True)
class Case:
    """Shapes of one call; `rows`: which packed rows are asked for, None = all but every third."""

    dim: int
    group: int
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    steps: int = 2
    window: int | None = None
    kv_heads: int = 1
    value_dim: int | None = None
    dtype: torch.dtype = FP32
    seed: int = 0

    def asked(self) -> Tensor:
        everyone = torch.arange(sum(self.lengths), device=device())
        return everyone[everyone % 3 != 1] if self.rows is None else everyone[list(self.rows)]


def make(case: Case) -> list[Tensor]:
    """The five tensors as the head makes them: query, key and value with heads after rows, a view."""
    draw, asked, tokens = torch.Generator().manual_seed(case.seed), len(case.asked()), sum(case.lengths)
    wide = case.dim, case.value_dim or case.dim
    shapes = [(asked, case.group * case.kv_heads, case.dim), *((tokens, case.kv_heads, d) for d in wide)]
    tensors = [torch.randn(shape, generator=draw).transpose(0, 1) for shape in shapes]
    tensors += [torch.randn(case.steps, case.kv_heads, asked, d, generator=draw) for d in wide]
    return [x.to(device(), case.dtype) for x in tensors]


def attend(op: Callable[..., Tensor], tensors: list[Tensor], case: Case) -> Tensor:
    return op(*tensors, case.asked(), list(case.lengths), 1 / math.sqrt(case.dim), case.window)


def run(op: Callable[..., Tensor], tensors: list[Tensor], case: Case) -> list[Tensor]:
    """Output and the gradients of the five under a fixed random cotangent."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = attend(op, tensors, case)
    draw = torch.Generator().manual_seed(case.seed + 1)
    cotangent = torch.randn(out.shape, generator=draw).to(device(), case.dtype).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, cotangent)]


def check(case: Case, roundings: float = 1) -> None:
    """Per tensor at most twice plain PyTorch's error, but at least a rounding (or more) of the tensor or of 1."""
    tensors = make(case)
    with poisoned():
        ours = run(ttt_attention, tensors, case)
    exact = run(ttt_attention_reference, [x.double() for x in tensors], case)
    plain = run(ttt_attention_reference, tensors, case)
    assert ours[0].is_contiguous()
    for name, found, wanted, other in zip(NAMES, ours, exact, plain, strict=True):
        assert (found.shape, found.dtype) == (other.shape, other.dtype), name
        least = roundings * torch.finfo(case.dtype).eps * wanted.norm().clamp(min=1)
        off, budget = (found.double() - wanted).norm(), (2 * (other.double() - wanted).norm()).maximum(least)
        assert off <= budget, f"{name}: off by {off:.3g}, allowed {budget:.3g}"


PATTERNS = [
    {"lengths": (5, 1, 30), "steps": 3},
    {"lengths": (33,), "steps": 0},
    {"lengths": (3, 17, 9), "steps": 2, "window": 6},
    {"lengths": (2, 19, 4), "rows": (3, 4, 9, 18), "steps": 1},
    {"lengths": (18, 16), "steps": 3, "window": 2},
]


def grid_case(i: int, j: int, k: int) -> Case:
    """Dim i, group j and pattern k of the grid, with the other choices spread over it."""
    dtype = (FP32, BF16, FP16)[(i + 2 * j + k) % 3]
    # the interpreter is slow on the small tiles of float32
    return Case(DIMS[i], GROUPS[j], **PATTERNS[k], kv_heads=2 if j < 2 else 1, dtype=BF16 if j > 2 else dtype, seed=i)


@pytest.mark.parametrize("i, j", [(i, j) for i in range(5) for j in range(5)])
def test_pairs_of_the_grid(i, j):
    """Every pair of head dim, group and pattern, once."""
    check(grid_case(i, j, (i + j) % 5))


@pytest.mark.full
@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("j", range(5))
@pytest.mark.parametrize("i", range(5))
def test_the_grid(i, j, k):
    check(replace(grid_case(i, j, k), dtype=(FP32, BF16, FP16)[(i + j + k) % 3], seed=7))


ODD = Case(24, 3, (7, 11), value_dim=40)


@pytest.mark.parametrize(
    "case",
    [
        # one step-0 key of its own, two, fewer than there are own keys
        replace(ODD, window=3),
        replace(ODD, window=4),
        replace(ODD, steps=3, window=1),
        replace(ODD, steps=5, window=3),
        replace(ODD, lengths=(60,), steps=0, window=20, group=1),
        # documents of one token, a document longer than tile and block, a single row
        replace(ODD, lengths=(1, 1, 1, 1)),
        replace(ODD, lengths=(1,), rows=(0,), steps=0),
        replace(ODD, lengths=(75,), group=1),
        replace(ODD, lengths=(40, 9), rows=(38,)),
        # documents without rows
        replace(ODD, lengths=(20, 6, 20), rows=(22, 24, 25)),
        # several tiles and blocks of half precision
        replace(ODD, lengths=(90, 150), group=1, dtype=BF16),
        # other widths: latent attention, wide heads
        Case(192, 2, (9, 12), value_dim=128, dtype=BF16),
        Case(256, 1, (9, 40), dtype=FP16),
        Case(3, 2, (9, 4), value_dim=1),
    ],
    ids=str,
)
def test_windows_documents_and_widths(case):
    # a row with one key has gradients that are exactly zero in one form and what is left of a difference in the other:
    # of a single row that is all, of documents of one token step 0
    alone = len(case.asked()) == 1
    check(case, roundings=16 if alone else 4 if max(case.lengths) == 1 else 1)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data):
    """Property: whatever the shape, the kernels equal the definition but for rounding."""
    number = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    lengths = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    rows = data.draw(st.sets(st.integers(0, sum(lengths) - 1), min_size=1))
    case = Case(
        number(1, 40),
        number(1, 4),
        lengths,
        tuple(sorted(rows)),
        steps=number(0, 4),
        window=data.draw(st.none() | st.integers(1, 24)),
        kv_heads=number(1, 2),
        value_dim=number(1, 40),
        seed=number(0, 999),
    )
    # with a handful of values, twice the error of others is no bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_KERNELS", "triton")
        check(case, roundings=8)


def test_no_rows_at_all():
    """A micro-batch that supervises nothing: empty output, zero gradients."""
    case = replace(ODD, rows=())
    with poisoned():
        out, *grads = run(ttt_attention, make(case), case)
    assert out.shape == (0, 3, 40)
    assert not any(grad.any() for grad in grads)


def test_only_own_documents_are_walked():
    """Keys and values of the documents before and behind are NaN; these queries, and their keys, never load them."""
    tile = kernel.choose_plan(16, 16, FP32, False).forward.queries
    case = Case(16, 2, (2 * tile, 2 * tile, 2 * tile), rows=tuple(range(2 * tile, 4 * tile)))
    tensors = make(case)
    for x in tensors[1:3]:
        x[:, : 2 * tile] = x[:, 4 * tile :] = torch.nan
    out, d_query, d_key, d_value, *own = run(ttt_attention, tensors, case)
    assert all(x.isfinite().all() for x in (out, d_query, *own))
    for grad in (d_key, d_value):
        inside = grad[:, 2 * tile : 4 * tile]
        assert inside.isfinite().all()
        assert inside.abs().amax(-1).min() > 0
        assert not grad[:, : 2 * tile].any()
        assert not grad[:, 4 * tile :].any()


def test_a_window_ends_the_walk():
    """The same, for keys that a window has left behind."""
    case = Case(16, 1, (80,), rows=tuple(range(64, 80)), steps=1, window=16)
    tensors = make(case)
    for x in tensors[1:3]:
        x[:, :48] = torch.nan
    assert all(x.isfinite().all() for x in run(ttt_attention, tensors, case))


# what lies ahead of a query is thrown away after its exponential
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_large_scores_stay_finite():
    """Scores in the thousands: exp overflows unless the row's largest is taken off."""
    tensors = [x * (60 if i in (0, 1, 3) else 1) for i, x in enumerate(make(ODD))]
    found = run(ttt_attention, tensors, ODD)
    exact = run(ttt_attention_reference, [x.double() for x in tensors], ODD)
    for name, ours, wanted in zip(NAMES, found, exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_any_layout_gives_the_same_bits():
    """Strides read wrong: tensors of another layout, a gradient that is one number for all, two runs."""
    tensors = make(ODD)
    odd = [torch.stack((x, x), -1)[..., 0] for x in tensors]
    outs = []
    for each in (tensors, odd, tensors):
        each = [x.detach().requires_grad_() for x in each]
        out = attend(ttt_attention, each, ODD)
        outs.append((out, *torch.autograd.grad(out.sum(), each)))
    for first, second, third in zip(*outs, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize(
    "steps, window, expected",
    [
        (0, None, [0, 0, 3, 3, 3, 8]),
        (2, None, [0, 0, 3, 3, 3, 8]),
        (0, 3, [0, 0, 3, 4, 5, 8]),
        (2, 3, [0, 2, 3, 6, 7, 8]),
        # nothing but own keys: bounds past the row itself
        (2, 2, [1, 3, 4, 7, 8, 9]),
    ],
)
def test_first_keys_by_hand(steps, window, expected):
    """Documents 0-2, 3-7, 8: a bound is the document's or the window's, whichever is later."""
    rows = torch.tensor([0, 2, 3, 6, 7, 8], device=device())
    assert kernel.first_keys(rows, (3, 5, 1), steps, window).tolist() == expected


def test_kept_memory_is_linear():
    """Scores kept for the backward: more than the inputs, the output, two int32 and a float per row and head."""
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x
        return x

    case = replace(ODD, lengths=(40,))
    tensors = [x.requires_grad_() for x in make(case)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(ttt_attention, tensors, case)
    rows = len(case.asked())
    assert sum(x.numel() for x in kept.values()) <= sum(x.numel() for x in (*tensors, out)) + rows * (2 + case.group)
