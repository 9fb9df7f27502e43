"""Rows to packed batches: several documents laid end to end, no padding. Pure functions on tensors.

What is supervised is decided here too, from the span ids alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
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


def shift_ids(batch: PackedBatch, k: int) -> tuple[Tensor, Tensor]:
    """x[t+k] inside each document, 0 past its end: (int64 [T], bool [T] true where it exists)."""
    lengths = torch.tensor(batch.lengths, device=batch.ids.device)
    valid = batch.positions + k < lengths[batch.documents]
    return torch.where(valid, _left(batch.ids, k), 0), valid


class Batches:
    """Shuffled batches by global step; stateless, so resuming at a step needs nothing but its number.

    An epoch is a permutation of the rows by (seed, epoch), cut into global batches of `rows_per_batch *
    world` rows, of which each rank takes every world-th row. Up to world-1 rows repeat at an epoch's end, so
    that all ranks get the same number of batches of the same number of rows; the last batch of an epoch may
    be smaller.
    """

    def __init__(self, dataset: Any, rows_per_batch: int, seed: int = 0, rank: int = 0, world: int = 1):
        if rows_per_batch < 1 or not 0 <= rank < world:
            raise ConfigError(
                f"need rows_per_batch >= 1 and 0 <= rank < world, found {rows_per_batch}, {rank}, {world}"
            )
        if not len(dataset):
            raise ConfigError("no rows to make batches of")
        self.dataset, self.rows_per_batch, self.seed = dataset, rows_per_batch, seed
        self.rank, self.world = rank, world
        self._order = lru_cache(maxsize=2)(self._permutation)

    def __len__(self) -> int:
        """Batches of one epoch, on every rank."""
        return ceil(len(self.dataset) / (self.rows_per_batch * self.world))

    def epoch(self, step: int) -> int:
        return step // len(self)

    def batch(self, step: int) -> PackedBatch:
        """This rank's batch number `step`, counted from the start of training over all epochs."""
        return pack([self.dataset[i] for i in self.indexes(step)])

    def indexes(self, step: int) -> list[int]:
        """The rows of `batch(step)`."""
        order, size = self._order(self.epoch(step)), self.rows_per_batch * self.world
        start = step % len(self) * size
        return order[start : start + size][self.rank :: self.world]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        missing = -len(order) % self.world
        return order + (order * missing)[:missing]


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
