"""Chats to token arrays, in this process or in several others: the same arrays in the same order."""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

import numpy as np

from eagle3.errors import DataError
from eagle3_train.chats import Chat
from eagle3_train.render import ChatRenderer, Learned

# ids, span ids and key of the prompt
RowArrays = tuple[np.ndarray, np.ndarray, int]
Rendered = tuple[Chat, list[RowArrays]]
CHATS_PER_WORKER = 128


@contextmanager
def rendering(renderer: ChatRenderer, workers: int) -> Iterator[Callable[[Iterable[Chat]], Iterator[Rendered]]]:
    """What turns chats into (chat, its rows) in order: in this process, or in `workers` others."""
    if workers == 1:
        yield lambda chats: ((chat, _rows_of(chat, renderer)) for chat in chats)
        return
    # spawned: a fork of a process with threads may hang
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _take_renderer, (renderer,)) as pool:
        yield lambda chats: _rendered_elsewhere(chats, renderer, pool, workers)


def _rendered_elsewhere(
    chats: Iterable[Chat], renderer: ChatRenderer, pool: ProcessPoolExecutor, workers: int
) -> Iterator[Rendered]:
    chats = iter(chats)
    # a block at a time: the executor takes in all that it is given
    while block := list(itertools.islice(chats, CHATS_PER_WORKER * workers)):
        try:
            for chat, (rows, learned) in zip(block, pool.map(_render_here, block, chunksize=16), strict=True):
                renderer.merge(learned)
                yield chat, rows
        except BrokenProcessPool:
            raise DataError("a process that renders chats died: too little memory for data.workers?") from None


_renderer_here: ChatRenderer | None = None


def _take_renderer(renderer: ChatRenderer) -> None:
    global _renderer_here
    _renderer_here = renderer


def _render_here(chat: Chat) -> tuple[list[RowArrays], Learned]:
    assert _renderer_here is not None
    rows = _rows_of(chat, _renderer_here)
    return rows, _renderer_here.learned


def _rows_of(chat: Chat, renderer: ChatRenderer) -> list[RowArrays]:
    """(ids, span ids, key of the prompt) of each row of a chat."""
    return [
        (
            np.array(row.input_ids, dtype=np.int32),
            np.array(row.span_ids, dtype=np.int32),
            int.from_bytes(digest_of(np.array(row.prompt_ids, dtype=np.int32))[:8], "little") >> 1,
        )
        for row in renderer.rows(chat)
    ]


def digest_of(*arrays: np.ndarray) -> bytes:
    """Tells rows apart by their ids."""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.asarray(array, dtype=np.int32).tobytes() + b"|")
    return digest.digest()
