"""Rows to packed batches: several documents laid end to end, no padding. Pure functions on tensors.

What is supervised is decided here too, from the span ids alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3.errors import ConfigError

# `input_ids` and `span_ids`, of one length
Row = dict[str, Any]


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end; T tokens in all.

    `ids`, `positions` (restart per document), `documents` (index of the token's document) and `span_ids` are int64
    [T]. A span id is 0 outside spans and on a document's first token; no two documents of a batch share another one,
    so equal ids mean one span of one document. `lengths` sums to T. `idle`: a stand-in where a rank has no rows.
    """

    ids: Tensor
    span_ids: Tensor
    positions: Tensor
    documents: Tensor
    lengths: list[int]
    idle: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of data; a stand-in has none."""
        return 0 if self.idle else len(self.ids)

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {name: getattr(self, name).to(device) for name in ("ids", "span_ids", "positions", "documents")}
        return replace(self, **moved)


def pack(rows: Sequence[Row]) -> PackedBatch:
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


class RowStream(Protocol):
    """Rows to train on, without end: position p always holds the same row, so a resumed run needs only a number."""

    def take(self, first: int, count: int) -> Sequence[Row]:
        """Rows [first, first + count) of the stream."""
        ...


class ShuffledRows:
    """Epoch after epoch of a data set that can be indexed, each a permutation by (seed, epoch): a RowStream."""

    def __init__(self, dataset: Any, seed: int = 0):
        if not len(dataset):
            raise ConfigError("no rows to make batches of")
        self.dataset, self.seed = dataset, seed
        self._order = lru_cache(maxsize=2)(self._permutation)

    def take(self, first: int, count: int) -> list[Row]:
        places = (divmod(at, len(self.dataset)) for at in range(first, first + count))
        return [self.dataset[self._order(epoch)[place]] for epoch, place in places]

    def _permutation(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(len(self.dataset), generator=generator).tolist()


class Batches:
    """The packed batches of every optimizer step; stateless, so resuming at a step needs nothing but its number.

    Step s learns from rows [s * rows_per_step, (s + 1) * rows_per_step) of the stream. `tokens_per_batch`, `rank` and
    `world` only share them out.
    """

    def __init__(self, rows: RowStream, rows_per_step: int, tokens_per_batch: int, rank: int = 0, world: int = 1):
        if min(rows_per_step, tokens_per_batch) < 1 or not 0 <= rank < world:
            raise ConfigError(
                f"need rows_per_step >= 1, tokens_per_batch >= 1 and 0 <= rank < world, found {rows_per_step}, "
                f"{tokens_per_batch}, {rank}, {world}"
            )
        self.rows, self.rows_per_step, self.tokens_per_batch = rows, rows_per_step, tokens_per_batch
        self.rank, self.world = rank, world

    def step(self, step: int) -> list[PackedBatch]:
        """This rank's micro-batches of an optimizer step, counted from the start of training; as many on each rank."""
        rows = self.rows.take(step * self.rows_per_step, self.rows_per_step)
        return list(batches_of(rows, self.tokens_per_batch, self.rank, self.world))


def batches_of(dataset: Any, tokens_per_batch: int, rank: int = 0, world: int = 1) -> Iterator[PackedBatch]:
    """Every row exactly once, shared among the ranks, the same number of batches on each."""
    rows: list[Row] = list(dataset)
    for indexes in share_out([len(row["input_ids"]) for row in rows], tokens_per_batch, world)[rank]:
        yield pack([rows[i] for i in indexes]) if indexes else idle_batch()


def share_out(lengths: Sequence[int], tokens_per_batch: int, world: int = 1) -> list[list[list[int]]]:
    """Which rows go into which micro-batch of which rank.

    The fewest micro-batches, the same number on every rank, that hold at most `tokens_per_batch` tokens when rows go,
    longest first, to the one with the fewest tokens so far. Micro-batches of one turn are of about one size.

    Returns:
        [world][micro-batches] lists of indexes into `lengths`, some empty where there are fewer rows than places.
    Raises:
        ConfigError: a row is longer than `tokens_per_batch`.
    """
    if max(lengths, default=0) > tokens_per_batch:
        raise ConfigError(f"a row of {max(lengths)} tokens exceeds tokens_per_batch, {tokens_per_batch}")
    turns = max(1, math.ceil(sum(lengths) / (tokens_per_batch * world)))
    while (bins := _level(lengths, turns * world))[0][0] > tokens_per_batch:
        turns += 1
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for turn in range(turns):
        part = [rows for _, rows in bins[turn * world : (turn + 1) * world]]
        # back and forth, so that no rank gets the larger one of every turn
        for rank, rows in enumerate(part if turn % 2 == 0 else part[::-1]):
            ranks[rank].append(rows)
    return ranks


def _level(lengths: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """(tokens, indexes) of `count` bins, fullest first, filled longest row first; ties go by index."""
    heap: list[tuple[int, int, list[int]]] = [(0, place, []) for place in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, place, rows = heap[0]
        rows.append(index)
        heapq.heapreplace(heap, (tokens + lengths[index], place, rows))
    return [(tokens, rows) for tokens, _, rows in sorted(heap, key=lambda b: (-b[0], b[1]))]


def idle_batch() -> PackedBatch:
    """What a rank without rows trains on: a document that supervises nothing and counts for nothing."""
    return replace(pack([{"input_ids": [0, 0], "span_ids": [0, 0]}]), idle=True)


def _left(values: Tensor, k: int) -> Tensor:
    """values[t+k], 0 past the end."""
    out = torch.zeros_like(values)
    if k < len(values):
        out[: len(values) - k] = values[k:]
    return out
