"""Training rows of data that fits neither disk nor memory: rendered as they are read, shuffled in a buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eagle3.errors import DataError
from eagle3_train.data import supervised_rows
from eagle3_train.data_report import DataReport
from eagle3_train.render import ChatRenderer
from eagle3_train.sources import Source


@dataclass
class StreamedRows:
    """The rows of all sources, epoch after epoch: a RowStream.

    Row p of the stream is a function of the sources, `buffer` and `seed` alone. It is reached by reading what lies
    before it in its epoch; where an epoch ends is known once one was read. So resuming costs the rendering of what was
    trained on (of one epoch, and of the part of another), and every rank reads the whole stream.

    Args:
        sources: read in their order.
        renderer: of their chats.
        max_length: tokens of a row.
        buffer: rows that are held, of which each next one is drawn.
        left_out: keys of the held-out rows' prompts.
        seed: of the draws.
    """

    sources: list[Source]
    renderer: ChatRenderer
    max_length: int
    buffer: int
    left_out: frozenset[int] = frozenset()
    seed: int = 0
    _rows: Iterator[dict[str, Any]] | None = field(default=None, init=False, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    _length: int | None = field(default=None, init=False, repr=False)

    def take(self, first: int, count: int) -> list[dict[str, Any]]:
        """Rows [first, first + count); cheap where the last call ended, else all before it is read again."""
        if self._rows is None or first != self._next:
            self._go_to(first)
        assert self._rows is not None
        self._next = first + count
        return list(itertools.islice(self._rows, count))

    def _go_to(self, position: int) -> None:
        if self._length is None:
            # the first epoch, as far as it reaches, tells where the others begin
            rows = self._epoch(0)
            if sum(1 for _ in itertools.islice(rows, position)) == position:
                self._rows = itertools.chain(rows, self._from(1))
                return
        assert self._length is not None
        epoch, place = divmod(position, self._length)
        self._rows = itertools.islice(self._from(epoch), place, None)

    def _from(self, epoch: int) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(map(self._epoch, itertools.count(epoch)))

    def _epoch(self, epoch: int) -> Iterator[dict[str, Any]]:
        draw = np.random.default_rng([self.seed % 2**64, epoch])
        held: list[dict[str, Any]] = []
        length = 0
        for row in self._ordered():
            length += 1
            if len(held) < self.buffer:
                held.append(row)
                continue
            at = int(draw.integers(self.buffer))
            yield held[at]
            held[at] = row
        self._length = length
        if not length:
            raise DataError("the stream holds no row but the held-out ones: nothing to train on")
        for at in draw.permutation(len(held)):
            yield held[at]

    def _ordered(self) -> Iterator[dict[str, Any]]:
        rows = supervised_rows(self.sources, self.renderer, self.max_length, DataReport(), streaming=True)
        return (row for row in rows if row["prompt_key"] not in self.left_out)
