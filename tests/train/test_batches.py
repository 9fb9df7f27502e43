"""What is supervised, as a set at both edges; packing, shifting, and the order of batches."""

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train.batches import Batches, pack, sequential_batches, shift_ids, supervised


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


def test_shift_stays_inside_documents():
    batch = pack([row((3, 1)), row((2, 1))])
    for k, (ids, valid) in {
        0: ([1, 2, 3, 1, 2], [1, 1, 1, 1, 1]),
        1: ([2, 3, 0, 2, 0], [1, 1, 0, 1, 0]),
        2: ([3, 0, 0, 0, 0], [1, 0, 0, 0, 0]),
        9: ([0] * 5, [0] * 5),
    }.items():
        shifted, mask = shift_ids(batch, k)
        assert shifted.tolist() == ids
        assert mask.tolist() == [bool(v) for v in valid]


def rows(count):
    return [{"input_ids": [i, i], "span_ids": [0, 1]} for i in range(count)]


@pytest.mark.parametrize("count, size, world", [(10, 4, 1), (10, 3, 2), (7, 2, 3), (1, 4, 2), (8, 4, 2), (2, 2, 3)])
def test_each_epoch_gives_every_row_and_equal_shares(count, size, world):
    ranks = [Batches(rows(count), size, seed=3, rank=r, world=world) for r in range(world)]
    for epoch in range(2):
        steps = range(epoch * len(ranks[0]), (epoch + 1) * len(ranks[0]))
        shares = [[b.indexes(s) for s in steps] for b in ranks]
        assert len({tuple(map(len, share)) for share in shares}) == 1
        assert all(0 < len(indexes) <= size for share in shares for indexes in share)
        seen = sorted(i for share in shares for indexes in share for i in indexes)
        assert set(seen) == set(range(count))
        assert len(seen) < count + world


def test_batches_depend_on_seed_epoch_and_step_alone():
    first, again = Batches(rows(20), 4, seed=1), Batches(rows(20), 4, seed=1)
    for step in (0, 1, 4, 5, 9):
        assert first.indexes(step) == again.indexes(step)
    # a resumed run asks for step 7 at once
    assert torch.equal(Batches(rows(20), 4, seed=1).batch(7).ids, first.batch(7).ids)
    order = [first.indexes(s) for s in range(5)]
    assert order != [first.indexes(s) for s in range(5, 10)]
    assert order != [Batches(rows(20), 4, seed=2).indexes(s) for s in range(5)]
    assert (first.epoch(4), first.epoch(5)) == (0, 1)


def test_sequential_batches_give_each_row_once():
    seen = [b.ids[::2].tolist() for rank in range(3) for b in sequential_batches(rows(11), 2, rank, 3)]
    assert sorted(i for ids in seen for i in ids) == list(range(11))
    assert [b.lengths for b in sequential_batches(rows(3), 2)] == [[2, 2], [2]]


def test_impossible_batches_are_config_errors():
    for options in ({"rows_per_batch": 0}, {"rows_per_batch": 1, "rank": 1}):
        with pytest.raises(ConfigError, match="rows_per_batch >= 1"):
            Batches(rows(3), **options)
    with pytest.raises(ConfigError, match="no rows"):
        Batches([], 4)
