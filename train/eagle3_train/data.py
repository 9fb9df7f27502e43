"""Chats to supervised token rows: render, truncate, drop and count, deduplicate, split, count tokens.

Rows are a `datasets.Dataset` over a memory-mapped Arrow file, with `input_ids`, `span_ids` (lists of one length),
`greedy` and `prompt_key`. What is kept and for how long is eagle3_train.prepared's business.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import ConfigError, DataError, EmptyLossMaskError
from eagle3_train.batches import supervised
from eagle3_train.chats import parse_chat
from eagle3_train.data_report import DataReport, SourceReport
from eagle3_train.render import ChatRenderer
from eagle3_train.rendering import digest_of, rendering
from eagle3_train.sources import Source

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_PER_BLOCK = 512
# seconds between two lines about the progress
_TELL = 30.0


def build_rows(
    sources: Iterable[Source], renderer: ChatRenderer, max_length: int, file: Path, workers: int = 1
) -> tuple[Dataset, DataReport]:
    """Render all chats to supervised rows of at most `max_length` tokens, in the sources' order, into an Arrow file.

    Returns:
        (the file's rows, memory-mapped; the counts)
    Raises:
        DataError: a broken row, naming `file:line`; no chats at all.
        EmptyLossMaskError: no row has anything to supervise.
        OSError: the file cannot be written.
    """
    sources, report = list(sources), DataReport()
    rows = supervised_rows(sources, renderer, max_length, report, workers=workers)
    write_rows(_told(rows, report), file)
    check_kept(report, max_length)
    report.notes += renderer.notes.values()
    return read_rows(file), report


def supervised_rows(
    sources: Iterable[Source],
    renderer: ChatRenderer,
    max_length: int,
    report: DataReport,
    streaming: bool = False,
    workers: int = 1,
) -> Iterator[dict[str, Any]]:
    """The rows that are worth training on, as they are rendered; `report` counts them and the others.

    A stream may be longer than memory: its duplicates are kept, and it is not downloaded ahead. `workers` processes
    render; the rows are the same.
    """
    if max_length < 3:
        raise ConfigError(f"max_length is {max_length}; a row needs 3 tokens or more to supervise one")
    seen: set[bytes] | None = None if streaming else set()
    with rendering(renderer, workers) as rendered:
        for source in sources:
            report.sources.append(mine := SourceReport(source.name))
            for chat, rows in rendered(parse_chat(row, place) for place, row in source.rows(streaming)):
                report.chats_read += 1
                mine.forms[chat.form] = mine.forms.get(chat.form, 0) + 1
                kept = 0
                for ids, spans, key in rows:
                    if (made := _checked(ids, spans, max_length, seen, report)) is not None:
                        kept += 1
                        report.greedy_rows += chat.greedy
                        yield {**made, "greedy": chat.greedy, "prompt_key": key}
                report.dropped_no_reply += not rows
                mine.rows_kept += kept
                mine.rows_dropped += max(1, len(rows)) - kept


def _told(rows: Iterator[dict[str, Any]], report: DataReport) -> Iterator[dict[str, Any]]:
    """The rows; long work says every while how far it is."""
    began = told = time.monotonic()
    for row in rows:
        if (now := time.monotonic()) - told > _TELL:
            told = now
            done = f"{report.chats_read:,} chats read, {report.rows_kept:,} rows kept"
            print(f"rows: {done} ({now - began:.0f} s)", flush=True)
        yield row


def _checked(
    ids: np.ndarray, spans: np.ndarray, max_length: int, seen: set[bytes] | None, report: DataReport
) -> dict[str, np.ndarray] | None:
    """A row cut to `max_length`, or None where it is to be dropped; counts both."""
    report.rows_rendered += 1
    cut = len(ids) > max_length
    ids, spans = ids[:max_length], spans[:max_length]
    if not (predicted := int(predicted_tokens(spans).sum())):
        report.dropped_after_truncation += cut
        report.dropped_no_reply += not cut
        return None
    if seen is not None:
        if (digest := digest_of(ids, spans)) in seen:
            report.dropped_duplicate += 1
            return None
        seen.add(digest)
    report.rows_kept += 1
    report.rows_truncated += cut
    report.tokens += len(ids)
    report.supervised_tokens += predicted
    return {"input_ids": ids, "span_ids": spans}


def check_kept(report: DataReport, max_length: int) -> None:
    """Raise if nothing is left to train on."""
    if not report.chats_read:
        raise DataError(f"no chats in {', '.join(source.name for source in report.sources)}")
    if not report.rows_kept:
        raise EmptyLossMaskError(
            f"0 of {report.chats_read} chats kept: {report.dropped_no_reply} without a reply to supervise, "
            f"{report.dropped_after_truncation} lost it to truncation at max_length {max_length}; "
            "add chats with assistant replies of two tokens or more, or raise max_length"
        )


def write_rows(rows: Iterable[dict[str, Any]], file: Path) -> None:
    """Write rows to an Arrow file, a block at a time."""
    import pyarrow as pa

    ids = pa.list_(pa.int32())
    fields = {"input_ids": ids, "span_ids": ids, "greedy": pa.bool_(), "prompt_key": pa.int64()}
    schema = pa.schema(list(fields.items()))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        rows = iter(rows)
        while block := list(itertools.islice(rows, _ROWS_PER_BLOCK)):
            writer.write_batch(pa.RecordBatch.from_pylist(block, schema=schema))


def read_rows(file: Path) -> Dataset:
    """The rows of an Arrow file, left on the disk."""
    import datasets

    return datasets.Dataset.from_file(str(file))


def split_rows(
    dataset: Dataset, report: DataReport | None = None, eval_fraction: float = 0.0, eval_rows: int = 0
) -> tuple[Dataset, Dataset]:
    """Split into (train, held-out) by a hash of each row's prompt: order and other rows do not matter to it.

    Rows with one prompt land on one side. The held-out side keeps greedy replies only, as the simulated tau
    needs them; where it has none it keeps all. Give `eval_fraction` (of the prompts), or `eval_rows`: the
    prompts with the smallest hashes until that many rows are held out.
    """
    if not 0 <= eval_fraction < 1 or eval_rows < 0 or (eval_fraction and eval_rows):
        raise ConfigError(f"give eval_fraction in [0, 1) or eval_rows >= 0, found {eval_fraction} and {eval_rows}")
    keys, greedy = _column(dataset, "prompt_key").astype(np.uint64), _column(dataset, "greedy")
    usable = greedy if greedy.any() else np.ones_like(greedy)
    held_out = keys < np.uint64(eval_fraction * 2**63)
    if eval_rows:
        held_out = keys <= _key_limit(keys[usable], eval_rows)
    train, chosen = np.flatnonzero(~held_out), np.flatnonzero(held_out & usable)
    if not len(train):
        raise DataError(f"0 of {len(keys)} rows left to train on: hold out fewer than {len(chosen)} or add data")
    if report:
        report.train_rows, report.eval_rows = len(train), len(chosen)
        report.eval_rows_not_greedy = int(held_out.sum()) - len(chosen)
        if held_out.any() and not greedy.any():
            report.notes.append("no reply is marked greedy (temperature 0): held-out tau is over all replies")
    return dataset.select(train), dataset.select(chosen)


def token_counts(dataset: Dataset, vocab_size: int) -> Tensor:
    """How often each token is one that a head must predict at step 0: int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows: Any = dataset.with_format("numpy")
    for row in rows:
        ids, predicted = row["input_ids"], predicted_tokens(row["span_ids"])
        if ids.max(initial=0) >= vocab_size:
            raise DataError(f"token id {ids.max()} in the data is outside the target's vocabulary of {vocab_size}")
        np.add.at(counts, ids[predicted], 1)
    return torch.from_numpy(counts)


def predicted_tokens(span_ids: np.ndarray) -> np.ndarray:
    """Which tokens of one row [T] a head predicts at step 0: those in a span, but not its first."""
    inside = np.zeros(len(span_ids), dtype=bool)
    # row t predicts token t + 2
    inside[2:] = supervised(torch.from_numpy(np.asarray(span_ids, dtype=np.int64)), 0).numpy()[:-2]
    return inside


def _column(dataset: Dataset, name: str) -> np.ndarray:
    table: Any = dataset.with_format("arrow").select_columns(name)[:]
    return table[name].to_numpy()


def _key_limit(keys: np.ndarray, rows: int) -> np.uint64:
    if rows >= len(keys):
        raise DataError(f"eval_rows is {rows}, but there are only {len(keys)} rows that could be held out")
    return np.sort(keys)[rows - 1]
