"""What is supervised, as a set at both edges; packing, and the order of batches."""

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train.batches import Batches, pack, sequential_batches, supervise, supervised


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


def rows(count):
    return [{"input_ids": [i, i], "span_ids": [0, 1]} for i in range(count)]


@pytest.mark.parametrize(
    "size, world, accumulation", [(4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (1, 4, 1), (2, 1, 2)]
)
def test_ranks_and_accumulation_share_out_the_same_steps(size, world, accumulation):
    """17 rows in steps of 4: world size and accumulation change nothing, not even where an epoch ends in a step."""
    ranks = [Batches(rows(17), size, 3, rank, world, accumulation) for rank in range(world)]
    alone = Batches(rows(17), 4, seed=3)
    for step in range(12):
        shares = [indexes for b in ranks for indexes in b.indexes(step)]
        assert all(len(indexes) == size for indexes in shares)
        assert sorted(i for indexes in shares for i in indexes) == sorted(alone.indexes(step)[0])


def test_every_epoch_is_a_permutation_of_the_rows():
    batches = Batches(rows(17), 4, seed=3)
    stream = [i for step in range(17) for i in batches.indexes(step)[0]]
    epochs = [stream[start : start + 17] for start in range(0, 68, 17)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_batches_depend_on_seed_and_step_alone():
    first = Batches(rows(20), 4, seed=1)
    order = [first.indexes(s) for s in range(10)]
    # a resumed run asks for step 7 at once
    assert torch.equal(Batches(rows(20), 4, seed=1).step(7)[0].ids, first.step(7)[0].ids)
    assert [Batches(rows(20), 4, seed=1).indexes(s) for s in range(10)] == order
    assert [Batches(rows(20), 4, seed=2).indexes(s) for s in range(10)] != order


def test_sequential_batches_give_each_row_once():
    seen = [b.ids[::2].tolist() for rank in range(3) for b in sequential_batches(rows(11), 2, rank, 3)]
    assert sorted(i for ids in seen for i in ids) == list(range(11))
    assert [b.lengths for b in sequential_batches(rows(3), 2)] == [[2, 2], [2]]


def test_impossible_batches_are_config_errors():
    for options in ({"rows_per_batch": 0}, {"rows_per_batch": 1, "rank": 1}, {"rows_per_batch": 1, "accumulation": 0}):
        with pytest.raises(ConfigError, match="rows_per_batch >= 1"):
            Batches(rows(3), **options)
    with pytest.raises(ConfigError, match="no rows"):
        Batches([], 4)
