"""What the rollout is given: features, teacher and what is kept of them."""

from typing import Any

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train import features as features_module
from eagle3_train.batches import pack, supervise
from eagle3_train.features import Features, check_memory
from oracles.overfit import mapped_head
from oracles.tiny import tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def target():
    # gemma-2 soft-caps its logits and scales its embeddings
    return tiny_target("gemma2")


def rows(lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(0, 300, (n,), generator=draw).tolist(), "span_ids": [0] * 3 + [1] * (n - 3)}
        for n in lengths
    ]


def prepared(features, documents, steps=1):
    batch = pack(documents)
    return features.prepare(batch, supervise(batch, features.head.t2d, steps))


def make(target, documents, keep=False, max_rows=None):
    batch = pack(documents)
    return Features(target, mapped_head(target, batch, 40), max_rows or len(batch.ids), keep), batch


@torch.no_grad()
def test_features_and_teacher_are_transformers_own(target):
    """The wrong layer, a normed state, a teacher of the row itself instead of the next, an embedding unscaled."""
    features, batch = make(target, rows([12, 9]))
    inputs = features.prepare(batch, supervise(batch, features.head.t2d, 2))
    start = 0
    for length in batch.lengths:
        at = slice(start, start + length)
        with target.stock() as stock:
            model: Any = stock
            out = model(input_ids=batch.ids[at][None], output_hidden_states=True, use_cache=False)
        # hidden_states[i + 1] is the output of layer i
        wanted = torch.cat([out.hidden_states[i + 1][0] for i in (1, 3, 4)], -1)
        torch.testing.assert_close(inputs.features[at], wanted, rtol=1e-5, atol=1e-5)
        mine = (inputs.supervision.rows >= at.start) & (inputs.supervision.rows < at.stop)
        spoken = out.logits[0][inputs.supervision.rows[mine] - start + 1]
        torch.testing.assert_close(inputs.teacher.logits[mine], spoken[:, features.draft_ids], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(inputs.teacher.lse[mine], spoken.logsumexp(-1), rtol=1e-5, atol=1e-4)
        assert torch.equal(inputs.teacher.argmax[mine], spoken.argmax(-1))
        start = at.stop
    assert torch.equal(inputs.teacher.in_vocab, torch.isin(inputs.teacher.argmax, features.draft_ids))
    torch.testing.assert_close(inputs.embeds, target.model.get_input_embeddings()(batch.ids))


def test_teacher_in_chunks(target, monkeypatch):
    """A chunk's edge that loses rows; full-vocabulary logits of the whole batch at once."""
    features, batch = make(target, rows([12, 9]))
    whole = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    monkeypatch.setattr(features_module, "TEACHER_CHUNK", 4)
    sizes, logits = [], target.logits
    monkeypatch.setattr(target, "logits", lambda h, ids=None: sizes.append((len(h), ids)) or logits(h, ids))
    chunked = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    assert [n for n, ids in sizes if ids is None] == [4, 4, 4, 1]
    torch.testing.assert_close(chunked.teacher.lse, whole.teacher.lse)
    assert torch.equal(chunked.teacher.argmax, whole.teacher.argmax)


def test_features_are_copies(target):
    """The next batch's forward overwrites what this one's backward still needs."""
    documents = rows([12, 9])
    features, batch = make(target, documents)
    first = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    kept = first.features.clone()
    prepared(features, rows([12, 9], seed=5), 1)
    assert torch.equal(first.features, kept)


def test_kept_features_are_those_of_their_document(target, monkeypatch):
    """A document known by its place or its length; the target run again, or features that depend on neighbours."""
    documents = rows([12, 9, 12, 7])
    features, batch = make(target, documents, keep=True, max_rows=64)
    hidden, sizes = target.hidden, []
    monkeypatch.setattr(target, "hidden", lambda ids, *rest: sizes.append(len(ids)) or hidden(ids, *rest))
    features.prepare(batch, supervise(batch, features.head.t2d, 2))
    assert sizes == [12, 9, 12, 7]
    alone = [prepared(features, [document], 2) for document in documents]
    monkeypatch.setattr(target, "hidden", lambda *_: pytest.fail("the target ran again"))
    mixed = prepared(features, [documents[3], documents[0], documents[2]], 2)
    for name in ("features", "embeds"):
        assert torch.equal(getattr(mixed, name), torch.cat([getattr(alone[i], name) for i in (3, 0, 2)]))
    for name in ("lse", "argmax", "in_vocab"):
        assert torch.equal(
            getattr(mixed.teacher, name), torch.cat([getattr(alone[i].teacher, name) for i in (3, 0, 2)])
        )


def test_kept_features_know_what_is_supervised(target):
    """The same tokens with another mask have other teacher rows."""
    document = rows([12])[0]
    other = {**document, "span_ids": [0] * 6 + [1] * 6}
    features, batch = make(target, [document], keep=True)
    assert len(features.prepare(batch, supervise(batch, features.head.t2d, 1)).teacher.lse) == 8
    assert len(prepared(features, [other], 1).teacher.lse) == 5


def test_map_loaded_after_the_features_were_made(target):
    """A resumed run loads its checkpoint's map later: the teacher must follow."""
    documents = rows([12, 9])
    features, batch = make(target, documents)
    head = features.head
    with torch.no_grad():
        shifted = (torch.arange(40) + head.d2t + 1) % 300
        head.d2t.copy_(shifted - torch.arange(40))
    inputs = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    torch.testing.assert_close(
        inputs.teacher.logits.gather(1, inputs.teacher.logits.argmax(-1, keepdim=True)).flatten(),
        full_logits(target, batch, inputs)[:, shifted].max(-1).values,
    )


@torch.no_grad()
def full_logits(target, batch, inputs):
    from eagle3.attention import DenseCausal

    return target.logits(target.hidden(batch.ids, batch.positions, DenseCausal(batch.lengths)))[
        inputs.supervision.rows + 1
    ]


def test_memory_is_checked_before_it_is_taken(target):
    """fp32, 64 wide: 3 layers of every token and the last state of supervised ones."""
    assert check_memory(100, 40, target, 3) == 4 * 64 * (300 + 40)
    with pytest.raises(ConfigError, match=r"keep_features needs .* GiB"):
        check_memory(10**12, 10**12, target, 3)
