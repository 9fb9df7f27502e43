"""What is supervised, as a set at both edges; packing, and the order of batches."""

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train.batches import Batches, ShuffledRows, batches_of, pack, share_out, supervise, supervised


def row(*parts):
    """Parts are (number of tokens, span id); ids count up from 1."""
    spans = [span for count, span in parts for _ in range(count)]
    return {"input_ids": list(range(1, len(spans) + 1)), "span_ids": spans}


def counted(batch, step):
    return set(supervised(batch.span_ids, step).nonzero().flatten().tolist())


def test_supervised_set_of_one_span():
    """Reply at 4..8: the first root is token 4 (row 3); the last prediction is token 8, the end-of-turn."""
    batch = pack([row((4, 0), (5, 1), (2, 0))])
    assert counted(batch, 0) == {3, 4, 5, 6}
    assert counted(batch, 1) == {3, 4, 5}
    assert counted(batch, 3) == {3}
    assert counted(batch, 4) == set()
    assert counted(batch, 100) == set()


def test_supervised_set_of_two_spans_in_a_batch():
    """Never across two spans of a row, nor across rows, even where spans touch."""
    batch = pack([row((2, 0), (3, 1), (1, 0), (2, 2)), row((1, 0), (3, 1)), row((3, 1), (1, 0))])
    # offsets 0, 8, 12: spans at 2..4, 6..7, 9..11, 12..14; a span at a document's start has no row before it
    assert counted(batch, 0) == {1, 2, 5, 8, 9, 12}
    assert counted(batch, 1) == {1, 8}


@pytest.mark.parametrize("step", range(5))
def test_supervised_is_the_same_packed_and_alone(step):
    rows = [row((n % 3, 0), (2 + n % 4, 1), (n % 2, 0), (n, 2)) for n in range(8)]
    packed, start, alone = pack(rows), 0, set()
    for r in rows:
        alone |= {start + t for t in counted(pack([r]), step)}
        start += len(r["input_ids"])
    assert counted(packed, step) == alone


@pytest.mark.parametrize("step", range(4))
def test_supervised_equals_its_definition(step):
    batch = pack([row((3, 0), (4, 1), (2, 0), (3, 2), (1, 0)), row((2, 0), (6, 1))])
    spans = batch.span_ids.tolist()
    expected = set()
    for t in range(len(spans)):
        if t + 2 + step < len(spans) and spans[t + 1] and spans[t + 1] == spans[t + 2 + step]:
            expected.add(t)
    assert counted(batch, step) == expected


def test_pack_lays_documents_end_to_end():
    batch = pack([row((2, 0), (2, 1)), row((1, 0), (2, 1))])
    assert batch.ids.tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.documents.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.span_ids.tolist() == [0, 0, 1, 1, 0, 2, 2]
    assert batch.lengths == [4, 3]
    assert batch.to("cpu").lengths == [4, 3]


def test_predicted_tokens_stay_inside_documents():
    """Where a row counts, its token is its own document's x[t+2+k]; past the pack's end nothing is read."""
    documents = [row((1, 0), (4, 1)), row((2, 0), (3, 1))]
    batch = pack(documents)
    supervision = supervise(batch, torch.ones(9, dtype=torch.bool), 9)
    # rows 0..2 of the first document, 1 and 2 of the second, which starts at 5
    assert supervision.rows.tolist() == [0, 1, 2, 6, 7]
    tokens = [t[c].tolist() for t, c in zip(supervision.tokens, supervision.counted, strict=True)]
    assert tokens == [[3, 4, 5, 4, 5], [4, 5, 5], [5], *[[]] * 6]
    assert supervision.tokens.shape == supervision.counted.shape == (9, 5)


def test_supervision_of_nothing():
    """A batch of prompts alone."""
    supervision = supervise(pack([row((3, 0)), row((1, 1))]), torch.ones(9, dtype=torch.bool), 3)
    assert supervision.rows.shape == (0,)
    assert supervision.counted.shape == supervision.tokens.shape == (3, 0)


def rows(count, length=2):
    """Row i holds the id i; even rows are twice as long."""
    long = [length * (2 - i % 2) for i in range(count)]
    return [{"input_ids": [i] * n, "span_ids": [0] + [1] * (n - 1)} for i, n in enumerate(long)]


def seen(batches):
    """The ids of the documents in a list of batches, those of stand-ins apart."""
    return [int(ids[0]) for b in batches if not b.idle for ids in b.ids.split(b.lengths)]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("tokens", [4, 7, 1000])
def test_ranks_and_micro_batches_share_out_the_same_rows(world, tokens):
    """17 rows in steps of 6: neither world size nor the size of a forward changes what a step learns from, not even
    where an epoch ends in a step; and every rank makes as many forwards."""
    ranks = [Batches(ShuffledRows(rows(17), 3), 6, tokens, rank, world) for rank in range(world)]
    stream = ShuffledRows(rows(17), 3)
    for step in range(12):
        shares = [b.step(step) for b in ranks]
        assert sorted(i for share in shares for i in seen(share)) == sorted(
            row["input_ids"][0] for row in stream.take(6 * step, 6)
        )
        assert len({len(share) for share in shares}) == 1
        assert all(len(batch.ids) <= tokens for share in shares for batch in share)
        assert sum(batch.tokens for share in shares for batch in share) == sum(
            len(row["input_ids"]) for row in stream.take(6 * step, 6)
        )


def test_shares_are_even():
    """In each turn, and over a step: one rank with all the long rows keeps the others waiting."""
    lengths = [500, 20, 30, 400, 380, 60, 55, 300, 310, 250, 90, 40]
    ranks = share_out(lengths, 700, 2)
    assert [len(r) for r in ranks] == [2, 2]
    turns = [[sum(lengths[i] for i in micro) for micro in rank] for rank in ranks]
    assert all(abs(a - b) < 60 for a, b in zip(*turns, strict=True))
    assert abs(sum(turns[0]) - sum(turns[1])) < 60
    # one forward where all fits
    assert share_out(lengths, 5000, 1) == [[sorted(range(12), key=lambda i: -lengths[i])]]


def test_as_few_micro_batches_as_the_packing_finds():
    assert [len(m) for m in share_out([4, 4, 4, 4], 8)[0]] == [2, 2]
    # 3 + 3 and 3 do not fit five tokens each
    assert [len(m) for m in share_out([3, 3, 3], 5)[0]] == [1, 1, 1]
    assert share_out([], 5, 2) == [[[]], [[]]]


def test_a_rank_without_rows_has_a_stand_in():
    """It must take part in every forward: two rows on four ranks."""
    shares = [Batches(ShuffledRows(rows(5)), 2, 100, rank, 4).step(0) for rank in range(4)]
    assert [[b.idle for b in share] for share in shares] == [[False], [False], [True], [True]]
    stand_in = shares[3][0]
    assert stand_in.tokens == 0
    assert supervise(stand_in, torch.ones(9, dtype=torch.bool), 3).rows.shape == (0,)


def test_every_epoch_is_a_permutation_of_the_rows():
    stream = [row["input_ids"][0] for row in ShuffledRows(rows(17), 3).take(0, 68)]
    epochs = [stream[start : start + 17] for start in range(0, 68, 17)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_depend_on_seed_and_step_alone():
    def order(seed, steps):
        batches = Batches(ShuffledRows(rows(20), seed), 4, 100)
        return [seen(batches.step(s)) for s in steps]

    first = order(1, range(10))
    # a resumed run asks for step 7 at once
    assert order(1, [7]) == [first[7]]
    assert order(1, range(10)) == first
    assert order(2, range(10)) != first


def test_every_row_once_for_evaluation():
    shares = [list(batches_of(rows(11), 5, rank, 3)) for rank in range(3)]
    assert sorted(i for share in shares for i in seen(share)) == list(range(11))
    assert len({len(share) for share in shares}) == 1
    assert all(len(b.ids) <= 5 for share in shares for b in share)


def test_impossible_batches_are_config_errors():
    stream = ShuffledRows(rows(3))
    for options in ({"rows_per_step": 0}, {"rank": 1}, {"tokens_per_batch": 0}):
        with pytest.raises(ConfigError, match="rows_per_step >= 1"):
            Batches(stream, **{"rows_per_step": 1, "tokens_per_batch": 9, **options})
    with pytest.raises(ConfigError, match="no rows"):
        ShuffledRows([])
    with pytest.raises(ConfigError, match="a row of 4 tokens exceeds tokens_per_batch, 3"):
        Batches(stream, 3, 3).step(0)
