"""Blocked TTT attention against its definition: values, gradients, memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_kernels.ttt_attention import blocked, ttt_attention
from eagle3_kernels.ttt_attention.reference import ttt_attention_reference

NAMES = ("query", "key", "value", "own_key", "own_value")


def inputs(rows, lengths, steps, heads=(4, 2), dims=(8, 8), dtype=torch.float64, seed=0):
    """The five tensors for the packed rows `rows`, ready for gradients."""
    draw = torch.Generator().manual_seed(seed)
    (hq, hkv), (d, dv), tokens = heads, dims, sum(lengths)
    shapes = [(hq, len(rows), d), (hkv, tokens, d), (hkv, tokens, dv)]
    shapes += [(steps, hkv, len(rows), d), (steps, hkv, len(rows), dv)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(op, tensors, rows, lengths, window=None, scaling=0.3):
    """(output, gradients of the five) under a fixed random cotangent."""
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out = op(*tensors, torch.tensor(list(rows), dtype=torch.int64), lengths, scaling, window)
    draw = torch.Generator().manual_seed(1)
    cotangent = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, tensors, cotangent)


def check_equal(tensors, rows, lengths, window=None, tolerance=1e-6):
    out, grads = run(ttt_attention, tensors, rows, lengths, window)
    expected, expected_grads = run(ttt_attention_reference, tensors, rows, lengths, window)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for name, found, wanted in zip(NAMES, grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def everyone(lengths):
    return list(range(sum(lengths)))


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 6], [1, 1, 1], [9, 7]])
def test_lengths_and_own_steps(lengths, steps):
    """A row that sees another document, the future, or another row's own keys; a missing step."""
    check_equal(inputs(everyone(lengths), lengths, steps), everyone(lengths), lengths)


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (6, 1), (6, 2), (8, 4)])
def test_query_groups(heads):
    """Query heads read with the wrong KV head, or a group's gradients not summed."""
    rows, lengths = [0, 2, 3, 4, 7], [3, 5]
    check_equal(inputs(rows, lengths, 2, heads), rows, lengths)


@pytest.mark.parametrize("dims", [(8, 8), (16, 4), (4, 16), (6, 10)])
def test_key_and_value_dims_differ(dims):
    """Value width taken for key width (MLA has 192 and 128)."""
    lengths = [6, 4]
    check_equal(inputs(everyone(lengths), lengths, 2, dims=dims), everyone(lengths), lengths)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_block_size_changes_nothing(block, monkeypatch):
    """A block's edge that loses, repeats or mixes rows; gradients of keys shared by blocks not added up."""
    monkeypatch.setattr(blocked, "BLOCK", block)
    rows, lengths = [0, 1, 2, 5, 6, 7, 8, 11, 12, 14], [3, 8, 4]
    check_equal(inputs(rows, lengths, 2), rows, lengths)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_window_counts_positions(window, steps, monkeypatch):
    """A window measured from the row instead of the query's position t + k; own keys outside it left in."""
    monkeypatch.setattr(blocked, "BLOCK", 4)
    lengths = [7, 2, 5]
    check_equal(inputs(everyone(lengths), lengths, steps), everyone(lengths), lengths, window)


@pytest.mark.parametrize(
    "rows, lengths",
    [([1, 2], [4, 5]), ([5, 8], [4, 5]), ([3, 4], [4, 1, 3]), ([0, 13], [2, 5, 4, 3]), ([6], [2, 2, 2, 2])],
)
def test_documents_without_rows(rows, lengths):
    """A document nobody asks about shifts the blocks of the next, or gets a gradient."""
    tensors = inputs(rows, lengths, 2)
    check_equal(tensors, rows, lengths)
    _, grads = run(ttt_attention, tensors, rows, lengths)
    start = 0
    for length in lengths:
        if not any(start <= row < start + length for row in rows):
            assert not grads[1][:, start : start + length].any()
            assert not grads[2][:, start : start + length].any()
        start += length


@pytest.mark.parametrize("steps", [0, 2])
def test_no_rows_at_all(steps):
    """A micro-batch that supervises nothing: empty output, zero and finite gradients, no crash."""
    lengths = [3, 4]
    out, grads = run(ttt_attention, inputs([], lengths, steps), [], lengths)
    assert out.shape == (0, 4, 8)
    assert all(not grad.any() for grad in grads)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_definition(data):
    """Any mix of the above, drawn at random."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), label="lengths")
    rows = sorted(data.draw(st.sets(st.integers(0, sum(lengths) - 1)), label="rows"))
    steps = data.draw(st.integers(0, 4), label="steps")
    window = data.draw(st.none() | st.integers(1, 12), label="window")
    groups, hkv = data.draw(st.integers(1, 3), label="groups"), data.draw(st.integers(1, 2), label="kv heads")
    dims = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)), label="dims")
    block = data.draw(st.sampled_from([1, 3, 256]), label="block")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "BLOCK", block)
        check_equal(inputs(rows, lengths, steps, (groups * hkv, hkv), dims), rows, lengths, window)


def test_large_scores_stay_finite():
    """Scores in the thousands: exp overflows unless the row's maximum is taken off."""
    lengths = [6]
    tensors = [x.detach() * (100 if i in (0, 1, 3) else 1) for i, x in enumerate(inputs(everyone(lengths), lengths, 2))]
    check_equal(tensors, everyone(lengths), lengths, tolerance=1e-3)


@pytest.mark.parametrize("steps", [0, 3])
def test_bfloat16_error_is_at_most_twice_the_formulas(steps):
    """Precision lost by the blocked form (a sum or a softmax kept in bf16) beyond plain PyTorch's in bf16."""
    lengths = [40, 25]
    rows = everyone(lengths)
    tensors = inputs(rows, lengths, steps, dims=(16, 16), dtype=torch.bfloat16)
    exact, exact_grads = run(ttt_attention_reference, [x.double() for x in tensors], rows, lengths)
    plain, plain_grads = run(ttt_attention_reference, tensors, rows, lengths)
    found, found_grads = run(ttt_attention, tensors, rows, lengths)
    for name, e, p, f in zip(
        ("out", *NAMES), (exact, *exact_grads), (plain, *plain_grads), (found, *found_grads), strict=True
    ):
        if e.numel():
            assert (f - e).norm() <= 2 * (p - e).norm(), name


def saved_elements(op, tokens):
    """Elements that autograd keeps between forward and backward for one document, all rows asked."""
    tensors = inputs(range(tokens), [tokens], 2, heads=(4, 2), dims=(8, 8), dtype=torch.float32)
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        op(*tensors, torch.arange(tokens), [tokens], 0.3, None)
    return sum(kept.values())


def test_saved_memory_is_linear():
    """Keeping the scores for the backward: quadratic, as the definition does (which shows that we would see it)."""
    assert saved_elements(ttt_attention_reference, 512) > 3.5 * saved_elements(ttt_attention_reference, 256)
    assert saved_elements(ttt_attention, 512) < 2.1 * saved_elements(ttt_attention, 256)


def test_largest_intermediate_is_linear():
    """A whole [T, T] score or mask made on the way, though not kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    self.elements = max(self.elements, x.numel())
            return out

    def largest(tokens):
        tensors = inputs(range(tokens), [tokens], 1, heads=(2, 1), dims=(4, 4), dtype=torch.float32)
        with Largest() as mode:
            run(ttt_attention, tensors, range(tokens), [tokens])
        return mode.elements

    assert largest(1024) < 2.3 * largest(512)
