"""What the rollout learns from: the target's features and teacher, made online and, if asked, kept in memory."""

import torch
from torch import Tensor

from eagle3.attention import DenseCausal
from eagle3.capture import Capture
from eagle3.errors import ConfigError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_train.batches import PackedBatch, Supervision
from eagle3_train.ttt import Teacher, TTTBatch

TEACHER_CHUNK = 256


class Features:
    """Turns packed batches into rollout inputs, without gradients.

    Args:
        max_rows: tokens of the largest batch.
        keep: remember every document's features and supervised hidden states in memory, so that the target runs
            in the first epoch only.
    """

    def __init__(self, target: Target, head: Eagle3Head, max_rows: int, keep: bool = False):
        self.target, self.head = target, head
        self.capture = Capture(target, head.capture_layers, max_rows)
        self._kept: dict[bytes, tuple[Tensor, ...]] | None = {} if keep else None

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary [Vd]; not stored, as a resumed run loads its map after this is made."""
        return self.head.to_target(torch.arange(self.head.draft_vocab_size, device=self.head.d2t.device))

    @torch.no_grad()
    def prepare(self, batch: PackedBatch, supervision: Supervision) -> TTTBatch:
        """Inputs of a rollout over `batch` (on the target's device)."""
        mask = torch.zeros(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
        mask[supervision.rows] = True
        features, hidden, lse, argmax = self._recall(batch, mask) or self._run(batch, mask)
        teacher = Teacher(self.target.logits(hidden, self.draft_ids), lse, argmax, self.head.t2d[argmax])
        return TTTBatch(batch, features, self.target.embed(batch.ids), supervision, teacher)

    def _run(self, batch: PackedBatch, mask: Tensor) -> tuple[Tensor, ...]:
        """Features [T, F]; of the teacher's positions: last hidden states [R, H], log-sum-exp [R], argmax [R]."""
        if self._kept is None:
            return self._forward(batch.ids, batch.positions, batch.lengths, mask)
        # one document at a time: what is kept must not depend, not by an ulp, on the batch that it was made in
        columns = zip(*(x.split(batch.lengths) for x in (batch.ids, batch.positions, mask)), strict=True)
        parts = [self._forward(ids, positions, [len(ids)], part) for ids, positions, part in columns]
        self._kept.update(zip(_keys(batch, mask), parts, strict=True))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def _forward(self, ids: Tensor, positions: Tensor, lengths: list[int], mask: Tensor) -> tuple[Tensor, ...]:
        with self.capture.rows(len(ids)):
            hidden = self.target.hidden(ids, positions, DenseCausal(lengths))
        # row t's teacher speaks at t + 1; a supervised row is never the last
        hidden = hidden[mask.nonzero().flatten() + 1]
        lse = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        argmax = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        for start in range(0, len(hidden), TEACHER_CHUNK):
            at = slice(start, start + TEACHER_CHUNK)
            full = self.target.logits(hidden[at]).float()
            lse[at], argmax[at] = full.logsumexp(-1), full.argmax(-1)
        return self.capture.features.clone(), hidden, lse, argmax

    def _recall(self, batch: PackedBatch, mask: Tensor) -> tuple[Tensor, ...] | None:
        if self._kept is None:
            return None
        found = [self._kept.get(key) for key in _keys(batch, mask)]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return None
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def check_memory(tokens: int, supervised_tokens: int, target: Target, layers: int) -> int:
    """Bytes that keeping the features of a data set takes.

    Raises:
        ConfigError: more than this machine has free.
    """
    import psutil

    size = torch.finfo(target.dtype).bits // 8
    needed = size * target.hidden_size * (tokens * layers + supervised_tokens)
    free = psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise ConfigError(
            f"keep_features needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; set keep_features: false"
        )
    return needed


def _keys(batch: PackedBatch, mask: Tensor) -> list[bytes]:
    """A document is known by its tokens and by which of them are supervised."""
    documents = zip(batch.ids.cpu().split(batch.lengths), mask.cpu().split(batch.lengths), strict=True)
    return [ids.numpy().tobytes() + rows.numpy().tobytes() for ids, rows in documents]
