"""Rows made once per machine and read by all of its processes, before any process group exists.

`<output>/data/<key>` holds rows.arrow, counts.safetensors and manifest.json. It is renamed into place when it is whole;
the key covers all that the rows depend on. Local rank 0 makes it, the others wait (eagle3_train.builder).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.utils import get_int_from_env
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3.errors import DataError
from eagle3_train.batches import RowStream, ShuffledRows
from eagle3_train.builder import node, notice_file, telling, wait_for_rows
from eagle3_train.config import DataConfig, TrainConfig
from eagle3_train.data import (
    build_rows,
    check_kept,
    read_rows,
    split_rows,
    supervised_rows,
    token_counts,
    write_rows,
)
from eagle3_train.data_report import DataReport
from eagle3_train.render import MASK_RULE, ChatRenderer
from eagle3_train.sources import Source, open_sources
from eagle3_train.streams import StreamedRows
from eagle3_train.tokenizer import template_hash, tokenizer_hash
from eagle3_train.tracking import write_record

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT = 1
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class PreparedRows:
    """What to train on.

    Args:
        key: changes with whatever the rows depend on.
        train: rows to train on (of a stream: those at its beginning).
        held_out: rows of the evaluation.
        report: what became of the chats.
        counts, held_out_counts: how often each token is to be predicted, int64 [tokenizer's size]; of a stream's
            beginning, if it is one.
        end_ids: EOS ids and the last token of every turn's end that was met.
        streamed: all rows to train on, where they are streamed.
    """

    key: str
    train: Dataset
    held_out: Dataset
    report: DataReport
    counts: Tensor
    held_out_counts: Tensor
    end_ids: frozenset[int]
    streamed: StreamedRows | None = None

    def counts_of(self, vocab_size: int) -> Tensor:
        """`counts` over the target's `vocab_size` ids; DataError if one that occurs lies beyond."""
        if len(beyond := self.counts[vocab_size:].nonzero()):
            raise DataError(
                f"token id {vocab_size + int(beyond[0])} in the data is outside the target's vocabulary of {vocab_size}"
            )
        return torch.cat((self.counts[:vocab_size], self.counts.new_zeros(max(0, vocab_size - len(self.counts)))))

    def stream(self, seed: int) -> RowStream:
        """The training rows without end, shuffled."""
        return ShuffledRows(self.train, seed) if self.streamed is None else replace(self.streamed, seed=seed)


def prepare_rows(config: TrainConfig, tokenizer: Any, eos_ids: Iterable[int], folder: Path) -> PreparedRows:
    """Make the rows of `config.data` under `folder`, load those that are there, or wait for local rank 0 to do so.

    Raises:
        DataError: what is wrong with the data, the same on every rank; the rows cannot be written; the rank that
            prepares them died.
    """
    renderer = ChatRenderer(tokenizer, eos_ids, config.data.template_options)
    sources = open_sources(config.data.files)
    if get_int_from_env(LOCAL_RANK, 0) == 0:
        with telling(notice_file(folder)) as notice:
            key = rows_key(config.data, renderer, sources)
            if not _is_whole(folder / key):
                _build(config.data, renderer, sources, folder / key)
            notice.tell("ready", key)
    else:
        key = wait_for_rows(notice_file(folder))
    return _load(folder / key, config.data, renderer, sources)


def rows_key(data: DataConfig, renderer: ChatRenderer, sources: list[Source]) -> str:
    """Hash of all that the rows depend on: contents and order of the sources, tokenizer, template, rules, settings.

    Of a stream the contents are not read: its files' names, sizes and times stand for them.
    """
    facts = {
        "format": FORMAT,
        "mask_rule": MASK_RULE,
        "sources": [source.stamp() if data.streaming else source.digest() for source in sources],
        "tokenizer": tokenizer_hash(renderer.tokenizer),
        "template": template_hash(renderer.tokenizer),
        "options": data.template_options,
        "eos_ids": sorted(renderer.eos_ids),
        "max_length": data.max_length,
        "eval_rows": data.eval_rows,
        "streaming": data.streaming and data.shuffle_buffer,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _build(data: DataConfig, renderer: ChatRenderer, sources: list[Source], final: Path) -> None:
    """Write the folder `final`, under a temporary name until it is whole."""
    part = final.with_name(f".{final.name}.{node()}.{os.getpid()}.tmp")
    try:
        _remove_leftovers(final)
        part.mkdir(parents=True)
        _write(data, renderer, sources, part)
        # another machine that shares this folder may have been faster; its rows are the same
        with suppress(OSError):
            part.rename(final)
        if not _is_whole(final):
            raise DataError(f"{final} cannot be put in place; remove it, or give another output")
    except OSError as error:
        raise DataError(
            f"the rows cannot be written to {final.parent}: {error}; make room there, or give another output"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(data: DataConfig, renderer: ChatRenderer, sources: list[Source], folder: Path) -> None:
    file = folder / "rows.arrow"
    if data.streaming:
        rows, report = _head_of_stream(data, renderer, sources, file)
    else:
        rows, report = build_rows(sources, renderer, data.max_length, file, data.workers)
    train, held_out = split_rows(rows, report, eval_rows=data.eval_rows)
    sides = {"train": train, "held_out": held_out}
    counts = {name: token_counts(side, renderer.vocab_size) for name, side in sides.items()}
    (folder / "counts.safetensors").write_bytes(save(counts))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    write_record(
        folder / "manifest.json",
        {"format": FORMAT, "files": files, "report": report.as_dict(), "end_ids": sorted(renderer.end_ids)},
    )


def _head_of_stream(
    data: DataConfig, renderer: ChatRenderer, sources: list[Source], file: Path
) -> tuple[Dataset, DataReport]:
    """The rows at a stream's beginning, among which the held-out ones are chosen."""
    report = DataReport()
    rows = supervised_rows(sources, renderer, data.max_length, report, streaming=True)
    write_rows(islice(rows, max(data.shuffle_buffer, 2 * data.eval_rows)), file)
    check_kept(report, data.max_length)
    report.notes += [*renderer.notes.values(), "streamed: the counts are of its beginning, duplicates are kept"]
    return read_rows(file), report


def _load(folder: Path, data: DataConfig, renderer: ChatRenderer, sources: list[Source]) -> PreparedRows:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    counts = load_file(folder / "counts.safetensors")
    train, held_out = split_rows(read_rows(folder / "rows.arrow"), eval_rows=data.eval_rows)
    report = DataReport.from_dict(manifest["report"])
    ends = frozenset(manifest["end_ids"])
    rows = PreparedRows(folder.name, train, held_out, report, counts["train"], counts["held_out"], ends)
    if not data.streaming:
        return rows
    stream = StreamedRows(sources, renderer, data.max_length, data.shuffle_buffer, frozenset(held_out["prompt_key"]))
    return replace(rows, streamed=stream)


def _is_whole(folder: Path) -> bool:
    """Whether a folder's manifest is there and its files have the sizes that it names."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove_leftovers(final: Path) -> None:
    """Remove what a build of this folder left that was killed on this machine, or that was damaged since."""
    if final.exists():
        shutil.rmtree(final)
    for part in final.parent.glob(f".*.{node()}.*.tmp"):
        if not psutil.pid_exists(int(part.name.split(".")[-2])):
            shutil.rmtree(part, ignore_errors=True)
