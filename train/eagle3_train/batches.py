"""Rows to packed batches: several documents laid end to end, no padding. Pure functions on tensors.

What is supervised is decided here too, from the span ids alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import ConfigError


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end; T tokens in all.

    `ids`, `positions` (restart per document), `documents` (index of the token's document) and `span_ids` are int64
    [T]. A span id is 0 outside spans and on a document's first token; no two documents of a batch share another one,
    so equal ids mean one span of one document. `lengths` sums to T.
    """

    ids: Tensor
    span_ids: Tensor
    positions: Tensor
    documents: Tensor
    lengths: list[int]

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {name: getattr(self, name).to(device) for name in ("ids", "span_ids", "positions", "documents")}
        return replace(self, **moved)


def pack(rows: Sequence[dict[str, Any]]) -> PackedBatch:
    """Lay rows (`input_ids`, `span_ids`) end to end."""
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    spans, used = [], 0
    for row in rows:
        span = torch.as_tensor(row["span_ids"], dtype=torch.int64)
        used, span = used + int(span.max()), torch.where(span == 0, span, span + used)
        # no row of its document lies before a first token: it is nobody's root
        span[0] = 0
        spans.append(span)
    lengths = [len(i) for i in ids]
    return PackedBatch(
        ids=torch.cat(ids),
        span_ids=torch.cat(spans),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        documents=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        lengths=lengths,
    )


def supervised(span_ids: Tensor, step: int) -> Tensor:
    """Which rows count at TTT step k (DESIGN section 4): bool [T].

    Row t predicts x[t+2+k] for the round whose root is x[t+1]; it counts iff both lie in one assistant span.

    Args:
        span_ids: [T], 0 outside spans, distinct over the documents (as in PackedBatch).
        step: k >= 0.
    """
    root, predicted = _left(span_ids, 1), _left(span_ids, 2 + step)
    return (root != 0) & (root == predicted)


@dataclass(frozen=True)
class Supervision:
    """What a rollout of `steps` steps learns at, from masks and the vocabulary map alone.

    rows int64 [R]: rows supervised at step 0, ascending; counted bool [steps, R]: those that count at step k;
    tokens int64 [steps, R]: x[t+2+k], the token that step k predicts.
    """

    rows: Tensor
    counted: Tensor
    tokens: Tensor


def supervise(batch: PackedBatch, t2d: Tensor, steps: int) -> Supervision:
    """Step k's row t counts iff root x[t+1] and predicted x[t+2+k] lie in one assistant span and all tokens drafted
    before, x[t+2..t+1+k], are in the draft vocabulary (the head cannot have proposed them otherwise).

    Args:
        t2d: bool [V], the draft vocabulary.
    """
    rows = supervised(batch.span_ids, 0).nonzero().flatten()
    counted, tokens = [], []
    reachable = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for k in range(steps):
        counted.append(supervised(batch.span_ids, k)[rows] & reachable)
        tokens.append(_left(batch.ids, 2 + k)[rows])
        reachable = reachable & t2d[tokens[-1]]
    return Supervision(rows, torch.stack(counted), torch.stack(tokens))


class Batches:
    """Shuffled batches by optimizer step; stateless, so resuming at a step needs nothing but its number.

    The rows of epoch after epoch, each a permutation by (seed, epoch), are one endless stream. Step s takes rows
    [s * G, (s + 1) * G) of it, G = rows_per_batch * accumulation * world; micro-batches and ranks only share them out,
    so neither changes what a step learns from.
    """

    def __init__(
        self, dataset: Any, rows_per_batch: int, seed: int = 0, rank: int = 0, world: int = 1, accumulation: int = 1
    ):
        if min(rows_per_batch, accumulation) < 1 or not 0 <= rank < world:
            raise ConfigError(
                f"need rows_per_batch >= 1, accumulation >= 1 and 0 <= rank < world, found {rows_per_batch}, "
                f"{accumulation}, {rank}, {world}"
            )
        if not len(dataset):
            raise ConfigError("no rows to make batches of")
        self.dataset, self.rows_per_batch, self.seed = dataset, rows_per_batch, seed
        self.rank, self.world, self.accumulation = rank, world, accumulation
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks and micro-batches."""
        return self.rows_per_batch * self.accumulation * self.world

    def step(self, step: int) -> list[PackedBatch]:
        """This rank's micro-batches of an optimizer step, counted from the start of training."""
        return [pack([self.dataset[i] for i in indexes]) for indexes in self.indexes(step)]

    def indexes(self, step: int) -> list[list[int]]:
        """The rows of each of this rank's micro-batches."""
        first, width = step * self.rows_per_step, self.rows_per_batch * self.world
        rows = [self._row(at) for at in range(first, first + self.rows_per_step)]
        return [rows[start : start + width][self.rank :: self.world] for start in range(0, len(rows), width)]

    def _row(self, at: int) -> int:
        epoch, place = divmod(at, len(self.dataset))
        return self._order(epoch)[place]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator).tolist()


def sequential_batches(dataset: Any, rows_per_batch: int, rank: int = 0, world: int = 1) -> Iterator[PackedBatch]:
    """Every row exactly once, in order, shared among the ranks; they may get unequal numbers."""
    mine = range(rank, len(dataset), world)
    for start in range(0, len(mine), rows_per_batch):
        yield pack([dataset[i] for i in mine[start : start + rows_per_batch]])


def _left(values: Tensor, k: int) -> Tensor:
    """values[t+k], 0 past the end."""
    out = torch.zeros_like(values)
    if k < len(values):
        out[: len(values) - k] = values[k:]
    return out
