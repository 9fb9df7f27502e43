"""Simulated tau: the walk by hand, the tally's figures, and its sum over ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_train.evaluate import Counts, Tally, walk


def table(*rows):
    """Rows of a hit table as text: one string per reply token, a letter per step (x = hit)."""
    return torch.tensor([[c == "x" for c in row] for row in rows], dtype=torch.bool).T


@pytest.mark.parametrize(
    "rows, runs",
    [
        (["..", "..", ".."], [1, 1, 1]),
        (["xx", "xx", "xx"], [3]),
        (["x.", "xx", "x.", ".."], [2, 2]),
        # a hit after a miss was never reached
        ([".x", ".x", ".x"], [1, 1, 1]),
        # the next root follows the round's last token, wherever hits stand between
        (["x.", "xx", "..", "xx", "xx", "xx"], [2, 1, 3]),
        # cut at the reply's end
        (["xx", "xx"], [2]),
        (["..", "xx"], [1, 1]),
        # the last round has one token left and its draft for it was wrong
        (["xx", "..", "..", ".."], [3, 1]),
    ],
)
def test_walk_by_hand(rows, runs):
    """A round that emits its drafts only, or starts again at the wrong root."""
    assert walk(table(*rows)) == runs


def test_walk_of_no_row():
    """A reply of one token has no round."""
    assert walk(torch.zeros(3, 0, dtype=torch.bool)) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 2**31))
def test_walk_emits_every_token_once(steps, rows, seed):
    """Whatever the hits: runs of 1 to steps + 1 tokens that sum to the reply."""
    draw = torch.Generator().manual_seed(seed)
    runs = walk(torch.rand(steps, rows, generator=draw) < 0.6)
    assert sum(runs) == rows
    assert all(1 <= run <= steps + 1 for run in runs)


def simulated(tokens, prediction, counted, spans, argmax=None) -> tuple[Any, Any]:
    """Rollout inputs and output as far as the tally reads them; lists are by step."""
    tokens, prediction, counted = (torch.tensor(x) for x in (tokens, prediction, counted))
    rows = torch.arange(tokens.shape[1])
    argmax = torch.tensor(argmax) if argmax is not None else tokens[0]
    in_vocab = argmax < 100
    inputs = SimpleNamespace(
        supervision=SimpleNamespace(tokens=tokens, counted=counted, rows=rows),
        batch=SimpleNamespace(span_ids=torch.tensor([0, *spans])),
        teacher=SimpleNamespace(argmax=argmax, in_vocab=in_vocab),
    )
    steps = len(tokens)
    output = SimpleNamespace(
        prediction=prediction,
        step_loss=torch.full((steps,), 6.0),
        step_alpha=torch.full((steps,), 2.0),
    )
    return inputs, output


def example():
    # two replies of 4 and 3 tokens: rows 0..2 and 3..4; the second's first draft is outside the vocabulary
    tokens = [[11, 12, 13, 200, 22], [12, 13, 0, 22, 0]]
    prediction = [[11, 12, 99, -1, 22], [12, 5, -1, -1, -1]]
    counted = [[True] * 5, [True, True, False, False, False]]
    return simulated(tokens, prediction, counted, [1, 1, 1, 2, 2])


def counted(*examples):
    """The counts of some batches."""
    tally = Tally(2)
    for inputs, output in examples:
        tally.add(inputs, output)
    return tally.counts()


def test_tally_by_hand():
    """Rounds that run across replies; a draft outside the vocabulary or beyond the span counted as a hit."""
    counts = counted(example())
    # reply 1: 3 tokens by one round (two hits and the bonus); reply 2: a miss, then its last token
    assert (counts.rounds, counts.emitted) == (3, 5)
    assert counts.tau == pytest.approx(5 / 3)
    assert counts.accepted == [1, 1]


def test_rates_by_hand():
    """Accuracy over the rows that have a loss instead of all supervised ones."""
    counts = counted(example())
    assert counts.counted == [5, 2]
    assert counts.right == [3, 1]
    rates = counts.rates()
    assert rates["accept"] == [3 / 5, 1 / 2]
    assert rates["alpha"] == [2 / 5, 2 / 2]
    assert rates["loss"] == pytest.approx(6 / 5 + 6 / 2)
    assert rates["coverage"] == pytest.approx(4 / 5)


def test_accuracy_is_against_the_teacher_tau_against_the_reply():
    """On replies that are not greedy the two differ."""
    inputs, output = simulated([[11, 12]], [[11, 12]], [[True, True]], [1, 1], argmax=[11, 50])
    tally = Tally(1)
    tally.add(inputs, output)
    assert tally.counts().right == [1]
    assert tally.counts().tau == 2.0


def by_hand(hits):
    """Run lengths of one reply, root by root."""
    runs, root = [], 0
    while root < hits.shape[1]:
        leading = hits[:, root].int().cumprod(0).sum().item()
        runs.append(min(leading + 1, hits.shape[1] - root))
        root += runs[-1]
    return runs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.floats(0, 1), st.integers(0, 2**31))
def test_rounds_of_packed_replies(lengths, steps, rate, seed):
    """Several replies in one batch, walked at once: as each by itself, one root after the other."""
    draw = torch.Generator().manual_seed(seed)
    replies = [torch.rand(steps, n, generator=draw) < rate for n in lengths]
    hits = torch.cat(replies, dim=1)
    spans = [1 + i % 2 for i, n in enumerate(lengths) for _ in range(n)]
    inputs, output = simulated(
        torch.ones_like(hits, dtype=torch.int64).tolist(), hits.long().tolist(), hits.tolist(), spans
    )
    tally = Tally(steps)
    tally.add(inputs, output)
    runs = [run for reply in replies for run in by_hand(reply)]
    assert [walk(reply) for reply in replies] == [by_hand(reply) for reply in replies]
    counts = tally.counts()
    assert (counts.rounds, counts.emitted) == (len(runs), sum(runs))
    assert counts.accepted == [sum(run > k + 1 for run in runs) for k in range(steps)]


def test_tau_is_one_plus_the_chained_acceptance():
    """The figures of one table must not contradict each other."""
    rates = counted(example()).rates()
    assert rates["tau"] == pytest.approx(1 + sum(rates["accept_chain"]))


def test_nothing_tallied():
    """No round: tau is unknown, not 0 or 1; nothing divides by zero."""
    rates = counted().rates()
    assert math.isnan(rates["tau"])
    assert rates["loss"] == 0.0
    assert rates["accept"] == rates["accept_chain"] == [0.0, 0.0]


def test_merging_sums_everything():
    """A field that batches, or ranks, do not share."""
    one, both = counted(example()), counted(example(), example())
    assert both.rounds == 2 * one.rounds > 0
    assert all(vars(both).values()), "a field of the example that is 0 tests nothing"
    assert Counts.merged([one, one]) == both
    assert one.rounds == 3, "merging must not change the others"
