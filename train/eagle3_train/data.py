"""Chats to supervised token rows: render, truncate, drop and count, deduplicate, split, count tokens.

Rows are a `datasets.Dataset` with `input_ids`, `span_ids` (lists of one length) and `greedy`. Everything is
built in memory from the files as they are now: no cache is read, so none can be stale.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3.errors import ConfigError, DataError, Eagle3Error, EmptyLossMaskError
from eagle3_train.batches import supervised
from eagle3_train.chats import read_chats
from eagle3_train.render import ChatRenderer

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class DataReport:
    """What became of the chats; `str()` is the table that users see."""

    chats_read: int = 0
    rows_rendered: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    dropped_no_reply: int = 0
    dropped_after_truncation: int = 0
    dropped_duplicate: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    greedy_rows: int = 0
    train_rows: int = 0
    eval_rows: int = 0
    eval_rows_not_greedy: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{name.replace('_', ' '):<26}{count:>12,}" for name, count in asdict(self).items())


def build_rows(
    files: Iterable[str], renderer: ChatRenderer, max_length: int, report: DataReport | None = None
) -> tuple[Dataset, DataReport]:
    """Read chats and render them to supervised rows of at most `max_length` tokens, in the files' order.

    Returns:
        (dataset with `input_ids`, `span_ids`, `greedy`, `prompt_key`; the counts)
    Raises:
        DataError: a broken line, naming `file:line`; no chats at all.
        EmptyLossMaskError: no row has anything to supervise.
    """
    if max_length < 3:
        raise ConfigError(f"max_length is {max_length}; a row needs 3 tokens or more to supervise one")
    files = [str(f) for f in ([files] if isinstance(files, str) else files)]
    if not files:
        raise DataError("no data files given")
    report = report or DataReport()
    dataset = _dataset(lambda: _supervised_rows(files, renderer, max_length, report), files)
    return dataset, report


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
    keys, greedy = np.array(dataset["prompt_key"], dtype=np.uint64), np.array(dataset["greedy"], dtype=bool)
    usable = greedy if greedy.any() else np.ones_like(greedy)
    held_out = keys < np.uint64(eval_fraction * 2**63)
    if eval_rows:
        held_out = keys <= _key_limit(keys[usable], eval_rows)
    train, chosen = np.flatnonzero(~held_out), np.flatnonzero(held_out & usable)
    if not len(train):
        raise DataError(f"0 of {len(keys)} rows left to train on: hold out fewer than {len(chosen)} or add data")
    if held_out.any() and not greedy.any():
        print("data: no reply is marked greedy (temperature 0): held-out tau is over all replies")
    if report:
        report.train_rows, report.eval_rows = len(train), len(chosen)
        report.eval_rows_not_greedy = int(held_out.sum()) - len(chosen)
    return dataset.select(train), dataset.select(chosen)


def load_data(
    files: Iterable[str],
    renderer: ChatRenderer,
    max_length: int,
    eval_fraction: float = 0.0,
    eval_rows: int = 0,
) -> tuple[Dataset, Dataset, DataReport]:
    """`build_rows`, then `split_rows`: (train, held-out, counts)."""
    dataset, report = build_rows(files, renderer, max_length)
    return *split_rows(dataset, report, eval_fraction, eval_rows), report


def token_counts(dataset: Dataset, vocab_size: int) -> Tensor:
    """How often each token is one that a head must predict at step 0: int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    rows: Any = dataset.with_format("numpy")
    for row in rows:
        ids, predicted = row["input_ids"], predicted_tokens(row["span_ids"])
        if ids.max(initial=0) >= vocab_size:
            raise DataError(f"token id {ids.max()} in the data is outside the target's vocabulary of {vocab_size}")
        counts += np.bincount(ids[predicted], minlength=vocab_size)
    return torch.from_numpy(counts)


def predicted_tokens(span_ids: np.ndarray) -> np.ndarray:
    """Which tokens of one row [T] a head predicts at step 0: those in a span, but not its first."""
    inside = np.zeros(len(span_ids), dtype=bool)
    # row t predicts token t + 2
    inside[2:] = supervised(torch.from_numpy(np.asarray(span_ids, dtype=np.int64)), 0).numpy()[:-2]
    return inside


def _supervised_rows(
    files: list[str], renderer: ChatRenderer, max_length: int, report: DataReport
) -> Iterator[dict[str, Any]]:
    seen: set[bytes] = set()
    for chat in read_chats(files):
        report.chats_read += 1
        rows = renderer.rows(chat)
        report.dropped_no_reply += not rows
        for row in rows:
            report.rows_rendered += 1
            ids, spans = np.array(row.input_ids[:max_length]), np.array(row.span_ids[:max_length])
            supervised, cut = int(predicted_tokens(spans).sum()), len(row.input_ids) > max_length
            if not supervised:
                report.dropped_after_truncation += cut
                report.dropped_no_reply += not cut
                continue
            digest = _digest(ids, spans)
            if digest in seen:
                report.dropped_duplicate += 1
                continue
            seen.add(digest)
            report.rows_kept += 1
            report.rows_truncated += cut
            report.greedy_rows += chat.greedy
            report.tokens += len(ids)
            report.supervised_tokens += supervised
            key = int.from_bytes(_digest(np.array(row.prompt_ids))[:8], "little") >> 1
            yield {"input_ids": ids, "span_ids": spans, "greedy": chat.greedy, "prompt_key": key}
    _check_kept(report, files, max_length)


def _check_kept(report: DataReport, files: list[str], max_length: int) -> None:
    if not report.chats_read:
        raise DataError(f"no chats in {', '.join(files)}")
    if not report.rows_kept:
        raise EmptyLossMaskError(
            f"0 of {report.chats_read} chats kept: {report.dropped_no_reply} without a reply to supervise, "
            f"{report.dropped_after_truncation} lost it to truncation at max_length {max_length}; "
            "add chats with assistant replies of two tokens or more, or raise max_length"
        )


def _dataset(generator: Callable[[], Iterator[dict]], files: list[str]) -> Dataset:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "span_ids": datasets.List(datasets.Value("int32")),
            "greedy": datasets.Value("bool"),
            "prompt_key": datasets.Value("int64"),
        }
    )
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-data-") as folder:
            # a fresh fingerprint and folder: `datasets` would else reuse rows of files that changed since
            return datasets.Dataset.from_generator(
                generator,
                features=features,
                cache_dir=folder,
                keep_in_memory=True,
                fingerprint=uuid.uuid4().hex,
            )
    except DatasetGenerationError as error:
        cause = error.__cause__ or error.__context__
        raise (cause if isinstance(cause, Eagle3Error) else error) from None
    finally:
        if bars:
            datasets.enable_progress_bars()


def _key_limit(keys: np.ndarray, rows: int) -> np.uint64:
    if rows >= len(keys):
        raise DataError(f"eval_rows is {rows}, but there are only {len(keys)} rows that could be held out")
    return np.sort(keys)[rows - 1]


def _digest(*arrays: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.asarray(array, dtype=np.int32).tobytes() + b"|")
    return digest.digest()
