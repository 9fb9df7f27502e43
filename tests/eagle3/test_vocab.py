"""Vocabulary maps: who is chosen, and which broken maps are caught on loading."""

import pytest
import torch

from eagle3.errors import ConfigError, VocabMapError
from eagle3.vocab import VocabMap, build_vocab_map, check_vocab_map, identity_map


def counts_of(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_most_frequent_are_chosen_in_id_order():
    """Catches: offsets confused with ids, draft ids that are not ascending, membership that disagrees."""
    vocab_map = build_vocab_map(counts_of(1, 9, 0, 7, 8, 2), 3, [], 6)
    assert vocab_map.target_ids.tolist() == [1, 3, 4]
    assert vocab_map.d2t.tolist() == [1, 2, 2]
    assert vocab_map.t2d.tolist() == [False, True, False, True, True, False]
    assert (vocab_map.d2t.dtype, vocab_map.t2d.dtype) == (torch.int64, torch.bool)


def test_ties_take_the_lowest_id():
    """Catches: maps that differ between machines."""
    counts = torch.ones(5000, dtype=torch.int64)
    counts[4000] = 2
    assert build_vocab_map(counts, 1000, [], 5000).target_ids.tolist() == [*range(999), 4000]


def test_fill_up_warns_and_is_deterministic():
    """Catches: a too large draft vocabulary filled at random, or in silence."""
    with pytest.warns(UserWarning, match="only 2 distinct tokens.*draft vocabulary of 4"):
        vocab_map = build_vocab_map(counts_of(0, 0, 0, 3, 0, 8), 4, [], 6)
    assert vocab_map.target_ids.tolist() == [0, 1, 3, 5]


def test_no_warning_without_fill_up(recwarn):
    """Catches: a warning that users learn to ignore."""
    build_vocab_map(counts_of(1, 2, 3, 4), 2, [0], 4)
    assert not recwarn.list


def test_every_eos_is_in():
    """Catches: a head that can never propose the end of a turn."""
    vocab_map = build_vocab_map(counts_of(9, 9, 9, 0, 9, 0), 3, [5, 3, 5], 6)
    assert vocab_map.target_ids.tolist() == [0, 3, 5]


def test_padded_ids_are_never_chosen():
    """Catches: rows of lm_head past the tokenizer, whatever their count or if they are called EOS."""
    vocab_map = build_vocab_map(counts_of(1, 2, 3, 99, 99), 3, [4], 3)
    assert vocab_map.target_ids.tolist() == [0, 1, 2]
    assert vocab_map.t2d.shape == (5,)


@pytest.mark.parametrize("size, always", [(0, []), (4, []), (1, [0, 1])])
def test_impossible_sizes_raise(size, always):
    """Catches: more draft tokens than usable ones (but fewer than lm_head rows), fewer than the EOS ids."""
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        build_vocab_map(counts_of(1, 2, 3, 4, 5), size, always, 3)


def test_equal_sizes_give_the_identity():
    """Catches: a permuted map where none is needed."""
    vocab_map = build_vocab_map(counts_of(1, 5, 3), 3, [], 2)
    assert vocab_map.target_ids.tolist() == [0, 1, 2]
    assert not vocab_map.d2t.any()
    assert vocab_map.t2d.all()


def test_counts_are_not_changed():
    """Catches: the caller's counts overwritten, which spoils the coverage."""
    counts = counts_of(4, 0, 6)
    build_vocab_map(counts, 2, [1], 3)
    assert counts.tolist() == [4, 0, 6]


def test_coverage():
    """Catches: coverage counted by type, not by token; division by nothing."""
    vocab_map = build_vocab_map(counts_of(1, 6, 0, 3), 2, [], 4)
    assert vocab_map.coverage(counts_of(1, 6, 0, 3)) == pytest.approx(0.9)
    assert vocab_map.coverage(torch.zeros(4, dtype=torch.int64)) == 0.0


def test_round_trip():
    """Catches: a check that refuses what build makes, with or without t2d."""
    counts = torch.randint(1, 50, (40,), generator=torch.Generator().manual_seed(0))
    for made in (build_vocab_map(counts, 13, [39], 40), identity_map(40)):
        loaded = check_vocab_map(made.d2t, made.t2d, 40)
        assert torch.equal(loaded.d2t, made.d2t)
        assert torch.equal(loaded.t2d, made.t2d)
        assert torch.equal(check_vocab_map(made.d2t, None, 40).t2d, made.t2d)


def test_unsorted_maps_are_legal():
    """Catches: maps in order of frequency (Model-Optimizer's), whose offsets may be negative."""
    ids = torch.tensor([7, 2, 9, 0])
    loaded = check_vocab_map(ids - torch.arange(4), None, 10)
    assert loaded.target_ids.tolist() == [7, 2, 9, 0]
    assert loaded.t2d.nonzero().flatten().tolist() == [0, 2, 7, 9]


def with_ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


@pytest.mark.parametrize(
    "d2t, t2d, words",
    [
        (with_ids(0, 3, 10), None, r"d2t\[2\] maps draft token 2 to target id 10, outside \[0, 10\)"),
        (with_ids(0, -1), None, r"d2t\[1\].*-1"),
        (with_ids(4, 4), None, "reached twice"),
        (torch.zeros(4, dtype=torch.int64), None, "all zeros"),
        (torch.zeros(4, dtype=torch.int64), with_ids(1, 2, 3), "t2d is"),
        (with_ids(1, 3), torch.zeros(10, dtype=torch.bool), "disagree on 2 target ids"),
        (with_ids(1, 3).float(), None, "must be int64"),
        (with_ids(1, 3)[None], None, "must be int64"),
        (with_ids(1, 3), torch.ones(9, dtype=torch.bool), r"t2d is \[9\]; it must be \[10\]"),
    ],
    ids=["too high", "negative", "twice", "zeros", "short t2d", "t2d differs", "float", "2-d", "t2d size"],
)
def test_broken_maps_raise(d2t, t2d, words):
    """Catches: drafts that name the wrong target tokens: nothing crashes, tau is 1.0."""
    with pytest.raises(VocabMapError, match=words):
        check_vocab_map(d2t, t2d, 10)


@pytest.mark.parametrize("ids", [[0, 1, 2, 5], [1, 2, 3, 4], [2, 5, 8, 9]])
@pytest.mark.parametrize("confirmed", [True, False])
def test_absolute_ids_stored_as_offsets_raise(ids, confirmed):
    """Catches: the most common way to break a map; these ids pass as offsets in range and unique."""
    t2d = torch.zeros(20, dtype=torch.bool)
    t2d[ids] = True
    with pytest.raises(VocabMapError, match=r"offsets|disagree"):
        check_vocab_map(torch.tensor(ids), t2d if confirmed else None, 20)


def test_lowest_ids_are_a_legal_map_if_t2d_says_so():
    """Catches: the all-zero check refusing a map of the first ids that was saved in full."""
    t2d = torch.arange(10) < 4
    assert check_vocab_map(torch.zeros(4, dtype=torch.int64), t2d, 10).target_ids.tolist() == [0, 1, 2, 3]


def test_sparse_offsets_are_legal_if_t2d_says_so():
    """Catches: the absolute-id check refusing offsets that happen to rise at every step."""
    made = VocabMap(with_ids(0, 3, 7, 12), torch.zeros(20, dtype=torch.bool))
    made.t2d[[0, 3, 7, 12]] = True
    assert check_vocab_map(made.d2t, made.t2d, 20).target_ids.tolist() == [0, 3, 7, 12]
