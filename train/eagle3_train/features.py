"""What the rollout learns from: the target's features and teacher, made online or taken from where they are kept."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from eagle3.attention import DenseCausal
from eagle3.capture import Capture
from eagle3.errors import NotFiniteError, StoreError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_train.batches import PackedBatch, Supervision
from eagle3_train.shards import DocumentFeatures
from eagle3_train.shelf import Shelf
from eagle3_train.store import document_keys
from eagle3_train.ttt import Teacher, TTTBatch

TEACHER_CHUNK = 256


class Documents(NamedTuple):
    """Documents of `lengths` end to end: ids int64 [T], supervised bool [T]."""

    ids: Tensor
    lengths: list[int]
    supervised: Tensor


class TargetRun:
    """One forward of the target over packed documents, for what a head learns from.

    Args:
        max_rows: tokens of the largest forward.
    """

    def __init__(self, target: Target, capture_layers: tuple[int, ...], max_rows: int):
        self.target = target
        self.capture = Capture(target, capture_layers, max_rows)

    @torch.no_grad()
    def __call__(self, ids: Tensor, lengths: list[int], supervised: Tensor) -> DocumentFeatures:
        """Features of all tokens; states, log-sum-exp and argmax of the teacher of the supervised rows.

        Args:
            ids: int64 [T], documents of `lengths` end to end. supervised: bool [T].
        Raises:
            NotFiniteError: naming the document.
        """
        with self.capture.rows(len(ids)):
            hidden = self._hidden(ids, lengths)
        # row t's teacher speaks at t + 1; a supervised row is never the last
        rows = supervised.nonzero().flatten()
        hidden = hidden[rows + 1]
        lse = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        argmax = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for start in range(0, len(hidden), TEACHER_CHUNK):
            at = slice(start, start + TEACHER_CHUNK)
            full = self.target.logits(hidden[at]).float()
            lse[at], argmax[at] = full.logsumexp(-1), full.argmax(-1)
        features = self.capture.features.clone()
        self._check_finite(ids, lengths, features.isfinite().all(-1), rows, lse.isfinite())
        return DocumentFeatures(features, hidden, lse, argmax)

    def each(self, forwards: Sequence[Documents]) -> Iterator[DocumentFeatures]:
        """What each of `forwards` gives, one after the other; to be read to its end."""
        for documents in forwards:
            yield self(*documents)

    def _hidden(self, ids: Tensor, lengths: list[int]) -> Tensor:
        positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
        return self.target.hidden(ids, positions, DenseCausal(lengths))

    def _check_finite(self, ids: Tensor, lengths: list[int], features: Tensor, rows: Tensor, teacher: Tensor) -> None:
        good = features.clone()
        good[rows] &= teacher
        if good.all():
            return
        what = "logits" if features.all() else "hidden states"
        documents = zip(ids.split(lengths), good.split(lengths), strict=True)
        broken = next(document for document, fine in documents if not fine.all())
        raise NotFiniteError(
            f"the target's {what} are not finite in {self.target.dtype} for the chat {_told(self.target, broken)}; "
            "nothing was updated from it: load the target in another dtype (float32, bfloat16), or take that chat out"
        )


class DividedRun(TargetRun):
    """The same of a target whose layers are divided among the ranks: they run each rank's forwards together, in turn.

    All ranks call `each` equally often; one without forwards of its own hands over none.
    """

    @torch.no_grad()
    def each(self, forwards: Sequence[Documents]) -> Iterator[DocumentFeatures]:
        everyone: list[list[tuple[Tensor, list[int]]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, [(x.ids.cpu(), x.lengths) for x in forwards])
        for rank, theirs in enumerate(everyone):
            if rank == dist.get_rank():
                yield from super().each(forwards)
            else:
                for ids, lengths in theirs:
                    self._hidden(ids.to(self.target.device), lengths)


class Features:
    """Turns packed batches into rollout inputs, without gradients.

    Args:
        max_rows: tokens of the largest batch.
        shelf: where documents are kept once the target has run on them; None runs it on every batch. With one that
            takes nothing (not `writable`) the target never runs, and all documents must be there.
    """

    def __init__(self, target: Target, head: Eagle3Head, max_rows: int, shelf: Shelf | None = None):
        self.target, self.head, self.shelf = target, head, shelf
        offline = shelf is not None and not shelf.writable
        run = DividedRun if target.collective else TargetRun
        self._run = None if offline else run(target, head.capture_layers, max_rows)
        self._draft_ids: Tensor | None = None

    @torch.no_grad()
    def prepare(self, batch: PackedBatch, supervision: Supervision) -> TTTBatch:
        """Inputs of a rollout over `batch` (on the target's device).

        Raises:
            NotFiniteError: the target gave NaN or infinity, naming the document.
            StoreError: a document is not in the store, or its bytes are damaged.
        """
        mask = torch.zeros(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
        mask[supervision.rows] = True
        if self.shelf is None:
            assert self._run is not None
            (values,) = self._run.each([Documents(batch.ids, batch.lengths, mask)])
        else:
            values = self._kept(batch, mask, self.shelf)
        # from the states in every case, by one product of one shape: kept and fresh ones teach bit for bit the same
        logits = self._draft_logits(values.hidden)
        in_vocab = self.head.t2d[values.argmax]
        teacher = Teacher(logits, values.lse, values.argmax, in_vocab)
        return TTTBatch(batch, values.features, self.target.embed(batch.ids), supervision, teacher)

    def flush(self) -> None:
        """Write to disk what waits there; to be called before the process ends."""
        if self.shelf is not None and self.shelf.writable:
            self.shelf.flush()

    def _kept(self, batch: PackedBatch, mask: Tensor, shelf: Shelf) -> DocumentFeatures:
        """Document by document: what is kept must not depend, not by an ulp, on the batch that it was made in."""
        # a stand-in is in no store, but takes part where ranks run together
        documents, masks = ((), ()) if batch.idle else (x.split(batch.lengths) for x in (batch.ids, mask))
        keys = document_keys(documents, masks)
        there = {key: shelf.get(key) for key in keys}
        kept = {key: values for key, values in there.items() if values is not None}
        lacking = {
            key: Documents(ids, [len(ids)], rows)
            for key, ids, rows in zip(keys, documents, masks, strict=True)
            if key not in kept
        }
        if self._run is not None:
            # strict: read to its end, beyond our own
            for key, values in zip(lacking, self._run.each([*lacking.values()]), strict=True):
                # what is read back later is what is learned from now
                kept[key] = shelf.codec.encode(values)
                shelf.add(key, kept[key])
        elif lacking:
            raise StoreError(
                f"the feature store lacks the chat {_told(self.target, next(iter(lacking.values())).ids)}; run python "
                "train/dump_features.py with the same settings, or set features.source: hybrid"
            )
        if batch.idle:
            return self._nothing(batch)
        return DocumentFeatures.join([shelf.codec.decode(kept[k], self.target.dtype, batch.ids.device) for k in keys])

    def _nothing(self, batch: PackedBatch) -> DocumentFeatures:
        """Of a stand-in, which is in no store: nobody learns from it."""
        target = self.target
        like = {"dtype": target.dtype, "device": batch.ids.device}
        features = torch.zeros(len(batch.ids), len(self.head.capture_layers) * target.hidden_size, **like)
        lse = torch.empty(0, device=batch.ids.device)
        return DocumentFeatures(features, torch.empty(0, target.hidden_size, **like), lse, lse.long())

    def _draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, Vd] of the draft vocabulary. Its rows of lm_head are copied once per map: a resumed run loads
        its map after this object is made."""
        ids = self.head.to_target(torch.arange(self.head.draft_vocab_size, device=self.head.d2t.device))
        if self._draft_ids is None or not torch.equal(ids, self._draft_ids):
            self._draft_ids, self._logits = ids, self.target.logits_of(ids)
        return self._logits(hidden)


def _told(target: Target, ids: Tensor) -> str:
    """A document as users know it: its length and its beginning."""
    if target.tokenizer is None:
        return f"of {len(ids)} tokens that begins with the ids {ids[:8].tolist()}"
    return f"of {len(ids)} tokens that begins {target.tokenizer.decode(ids[:48].tolist())!r}"
