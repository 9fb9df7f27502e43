"""Streamed rows: row p is the same however it is reached, epochs are shuffled anew, held-out prompts stay out."""

import json

import pytest

from eagle3.errors import DataError
from eagle3_train import streams
from eagle3_train.config import DataConfig, TrainConfig
from eagle3_train.prepared import prepare_rows
from eagle3_train.render import ChatRenderer
from eagle3_train.sources import open_sources
from eagle3_train.streams import StreamedRows
from oracles.tiny import tiny_tokenizer

COUNT = 23


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def file(tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"reply {i}"}]}
        for i in range(COUNT)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(tmp_path / "chats.jsonl")


@pytest.fixture
def stream(file, tokenizer):
    def make(buffer=5, seed=0, left_out=frozenset()):
        renderer = ChatRenderer(tokenizer, (tokenizer.eos_token_id,))
        return StreamedRows(open_sources([file]), renderer, 512, buffer, left_out, seed)

    return make


def ids(rows):
    return [tuple(row["input_ids"]) for row in rows]


def test_each_epoch_is_a_permutation_of_its_own(stream):
    epochs = [ids(stream().take(COUNT * epoch, COUNT)) for epoch in range(3)]
    assert all(len(set(epoch)) == COUNT for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("buffer", [1, 5, COUNT, 1000])
@pytest.mark.parametrize("first", [0, 3, COUNT - 2, COUNT, COUNT + 1, 2 * COUNT - 1, 3 * COUNT + 7])
def test_a_row_is_the_same_however_it_is_reached(stream, buffer, first):
    """Catches: a resumed run that trains on other rows than the one that was not stopped."""
    whole = stream(buffer)
    rows = ids(row for start in range(0, 4 * COUNT, 4) for row in whole.take(start, 4))
    assert ids(stream(buffer).take(first, 5)) == rows[first : first + 5]
    # back, and forth again, on one that knows its length
    assert ids(whole.take(first, 5)) == rows[first : first + 5]
    assert ids(whole.take(first + 5, 2)) == rows[first + 5 : first + 7]


def test_seed_and_buffer_decide_the_order(stream):
    orders = [ids(stream(buffer, seed).take(0, COUNT)) for buffer, seed in ((5, 0), (5, 1), (6, 0), (5, -1))]
    assert len(set(map(tuple, orders))) == 4


def test_a_buffer_of_one_keeps_the_order(stream, tokenizer):
    texts = [tokenizer.decode(row["input_ids"]) for row in stream(1).take(0, COUNT)]
    assert [f"ask {n}<" in text for n, text in enumerate(texts)] == [True] * COUNT


def test_reading_on_reads_nothing_twice(stream, monkeypatch):
    """Catches: a stream that starts over for every step."""
    passes, read = [], streams.supervised_rows
    monkeypatch.setattr(streams, "supervised_rows", lambda *a, **k: passes.append(1) or read(*a, **k))
    rows = stream()
    for step in range(2 * COUNT // 3):
        rows.take(3 * step, 3)
    assert len(passes) == 2


@pytest.fixture
def prepared(file, tokenizer, tmp_path):
    def make(**settings):
        data = DataConfig((file,), **{"eval_rows": 4, "streaming": True, "shuffle_buffer": 10, **settings})
        return prepare_rows(TrainConfig(data=data), tokenizer, (tokenizer.eos_token_id,), tmp_path / "rows")

    return make


def test_held_out_rows_are_never_streamed(prepared):
    rows = prepared()
    held_out = set(ids(rows.held_out))
    streamed = ids(rows.stream(0).take(0, 2 * (COUNT - 4)))
    assert len(held_out) == rows.report.eval_rows == 4
    assert not held_out & set(streamed)
    assert len(set(streamed)) == COUNT - 4
    # chosen among the first ones only
    assert rows.report.chats_read == 10
    assert "counts are of its beginning" in str(rows.report)


def test_streams_of_two_seeds_share_nothing(prepared):
    rows = prepared()
    one, other = rows.stream(1), rows.stream(2)
    first = ids(one.take(0, 3))
    assert ids(other.take(0, 3)) != first
    assert ids(rows.stream(1).take(0, 3)) == first


def test_a_stream_of_held_out_rows_alone(stream, prepared):
    keys = frozenset(row["prompt_key"] for row in stream().take(0, COUNT))
    with pytest.raises(DataError, match="nothing to train on"):
        stream(left_out=keys).take(0, 1)
    with pytest.raises(DataError, match="eval_rows is 99"):
        prepared(eval_rows=99)
