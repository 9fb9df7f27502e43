"""What the rollout is given: features, teacher and what is kept of them."""

from typing import Any

import pytest
import torch

from eagle3.errors import ConfigError, NotFiniteError
from eagle3_train import features as features_module
from eagle3_train.batches import idle_batch, pack, supervise
from eagle3_train.features import Features
from eagle3_train.shards import Codec
from eagle3_train.shelf import MemoryShelf, check_memory
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
    return prepared_batch(features, pack(documents), steps)


def prepared_batch(features, batch, steps=1):
    return features.prepare(batch, supervise(batch, features.head.t2d, steps))


def make(target, documents, keep=None, max_rows=None):
    """`keep`: a dtype to keep in memory, or None."""
    batch = pack(documents)
    shelf = None if keep is None else MemoryShelf(Codec(keep, 3))
    return Features(target, mapped_head(target, batch, 40), max_rows or len(batch.ids), shelf), batch


def kept_by(features):
    """The documents in memory."""
    assert isinstance(features.shelf, MemoryShelf)
    return features.shelf._kept


def target_ids(head):
    return torch.arange(head.draft_vocab_size) + head.d2t


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
        torch.testing.assert_close(
            inputs.teacher.logits[mine], spoken[:, target_ids(features.head)], rtol=1e-5, atol=1e-4
        )
        torch.testing.assert_close(inputs.teacher.lse[mine], spoken.logsumexp(-1), rtol=1e-5, atol=1e-4)
        assert torch.equal(inputs.teacher.argmax[mine], spoken.argmax(-1))
        start = at.stop
    assert torch.equal(inputs.teacher.in_vocab, torch.isin(inputs.teacher.argmax, target_ids(features.head)))
    torch.testing.assert_close(inputs.embeds, target.model.get_input_embeddings()(batch.ids))


def test_teacher_in_chunks(target, monkeypatch):
    """A chunk's edge that loses rows; full-vocabulary logits of the whole batch at once."""
    features, batch = make(target, rows([12, 9]))
    whole = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    monkeypatch.setattr(features_module, "TEACHER_CHUNK", 4)
    sizes, logits = [], target.logits
    monkeypatch.setattr(target, "logits", lambda h: sizes.append(len(h)) or logits(h))
    chunked = features.prepare(batch, supervise(batch, features.head.t2d, 1))
    assert sizes == [4, 4, 4, 1]
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
    features, batch = make(target, documents, keep="float32", max_rows=64)
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
    features, batch = make(target, [document], keep="float32")
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


def test_rows_of_lm_head_are_copied_once_per_map(target, monkeypatch):
    """A gather of thousands of rows of lm_head for every batch."""
    features, batch = make(target, rows([12, 9]))
    made, logits_of = [], target.logits_of
    monkeypatch.setattr(target, "logits_of", lambda ids: made.append(len(ids)) or logits_of(ids))
    for _ in range(3):
        features.prepare(batch, supervise(batch, features.head.t2d, 1))
    assert made == [40]


@pytest.mark.parametrize("where", ["hidden states", "logits"])
@pytest.mark.parametrize("keep", [None, "float32"])
def test_a_document_that_overflows_is_named(where, keep, monkeypatch):
    """NaN learned from, or kept; which of many chats it was."""
    target, documents = tiny_target(), rows([12, 9])
    features, batch = make(target, documents, keep)
    odd = documents[1]["input_ids"][4]
    assert odd not in documents[0]["input_ids"]
    logits = target.logits

    def overflowing(hidden):
        out = logits(hidden)
        # the second document's rows, alone or after the first's
        if len(hidden) in (5, 13):
            out[-1, 7] = torch.inf
        return out

    if where == "logits":
        monkeypatch.setattr(target, "logits", overflowing)
    else:
        target.model.get_input_embeddings().weight[odd] = torch.nan
    start = ", ".join(map(str, documents[1]["input_ids"][:3]))
    with pytest.raises(NotFiniteError, match=rf"{where} are not finite in torch.float32 .* 9 tokens .* ids \[{start}"):
        features.prepare(batch, supervise(batch, features.head.t2d, 1))
    if keep is not None:
        # the document before it, alone
        assert len(kept_by(features)) == 1


@pytest.mark.parametrize("keep", [None, "float32"])
def test_a_stand_in_teaches_nothing(target, keep):
    """A rank without rows: it is in no store, and must not be put into one."""
    features, _ = make(target, rows([12]), keep)
    inputs = prepared_batch(features, idle_batch())
    assert inputs.features.shape == (2, 3 * 64)
    assert inputs.features.isfinite().all()
    assert inputs.teacher.logits.shape == (0, 40)
    if keep is not None:
        assert not kept_by(features)


@pytest.mark.parametrize("dtype, error", [("float32", 0.0), ("bfloat16", 4e-3), ("float8", 0.04)])
def test_what_is_kept_is_close(target, dtype, error):
    """A scale per token alone: the largest layer would leave the others few bits. Of states, argmax, log-sum-exp."""
    documents = rows([12, 9])
    online, batch = make(target, documents)
    kept = Features(target, online.head, 64, MemoryShelf(Codec(dtype, 3)))
    wanted, found = (f.prepare(batch, supervise(batch, f.head.t2d, 2)) for f in (online, kept))
    for ours, theirs in zip(found.features.split(64, 1), wanted.features.split(64, 1), strict=True):
        off = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert off.max() <= error + 1e-6
        assert dtype == "float32" or off.max() > 0
    assert torch.equal(found.teacher.argmax, wanted.teacher.argmax)
    torch.testing.assert_close(found.teacher.lse, wanted.teacher.lse)
    # the first use and the next teach the same
    again = kept.prepare(batch, supervise(batch, kept.head.t2d, 2))
    assert torch.equal(again.features, found.features)
    assert torch.equal(again.teacher.logits, found.teacher.logits)


def test_memory_is_checked_before_it_is_taken():
    check_memory(1000)
    with pytest.raises(ConfigError, match=r"memory needs .* GiB, .* GiB are free"):
        check_memory(10**15)


def test_sizes_are_those_of_the_bytes(target):
    """The estimate that a disk is checked by."""
    for dtype in ("float32", "bfloat16", "float16", "float8"):
        features, batch = make(target, rows([12]), dtype)
        features.prepare(batch, supervise(batch, features.head.t2d, 1))
        (kept,) = kept_by(features).values()
        assert sum(x.nbytes for x in kept.values()) == Codec(dtype, 3).size(12, 8, 64)
