"""The file that a long run collects its rows in: JSON lines that a kill at any byte cannot spoil, and its manifest.

A `.gz` file is a row of complete gzip members, which every reader takes for one file. Rows are appended as they come,
some at a time. Knows nothing of a row but its `id`.
"""

from __future__ import annotations

import fcntl
import glob
import gzip
import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.chats import parse_object
from eagle3.errors import ConfigError, DataError, Eagle3Error
from eagle3_train.tracking import write_record

# a kill loses the rows since the last flush, which are made again
FLUSH_ROWS = 64
FLUSH_SECONDS = 10.0
SUFFIXES = (".jsonl", ".jsonl.gz")


class ReplyFile:
    """Appends rows to one file; of an earlier run's only what a kill cut short is dropped.

    Attributes:
        ids: of the rows that the file held when it was opened.
    Raises:
        ConfigError: the file cannot be opened, or another process writes it.
        DataError: the file is damaged, other than by its end.
    """

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[bytes] = []
        self._flushed = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}); give another output") from None
        try:
            self._lock()
            self.ids, self._size = read_ids(path)
            os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path} is being written by another process; wait for it, or stop it") from None

    def __enter__(self) -> ReplyFile:
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.flush()
        finally:
            os.close(self._file)

    def add(self, row: dict[str, Any]) -> None:
        self._pending.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(self._pending) >= FLUSH_ROWS or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending behind what is whole.

        Raises:
            Eagle3Error: it cannot be written, as on a full disk; the file stays whole.
        """
        data = b"".join(self._pending)
        if data and self.path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        try:
            written = 0
            while written < len(data):
                # at a fixed place: after a signal between this and the next lines, the same bytes come there again
                written += os.pwrite(self._file, data[written:], self._size + written)
        except OSError as error:
            lost, self._pending = len(self._pending), []
            os.ftruncate(self._file, self._size)
            raise Eagle3Error(
                f"{self.path}: {error.strerror}; the {lost} newest rows are lost, those before are in the file. "
                "Make room, then the same command goes on"
            ) from None
        self._size, self._pending = self._size + written, []
        self._flushed = time.monotonic()


def read_ids(path: Path) -> tuple[set[str], int]:
    """Ids of a file's whole rows, and where these end, in bytes.

    Raises:
        DataError: a row is broken that is not the last one.
    """
    ids, size, number = set(), 0, 0
    with path.open("rb") as file:
        for data, size in _members(file, path) if path.suffix == ".gz" else _lines(file):  # noqa: B007
            for line in data.splitlines():
                number += 1
                ids.add(_id(line, f"{path}: row {number}"))
    return ids, size


def _id(line: bytes, where: str) -> str:
    row = parse_object(line.decode(errors="replace"), where)
    if not isinstance(row.get("id"), str):
        raise DataError(f"{where} has no 'id'; the file was not written by this command: give another output")
    return row["id"]


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Each whole line, and where it ends."""
    end = 0
    for line in file:
        if line.endswith(b"\n"):
            end += len(line)
            yield line, end


def _members(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of each whole gzip member, and where it ends."""
    decoder, parts, data = zlib.decompressobj(31), [], b""
    while data := data or file.read(1 << 20):
        try:
            parts.append(decoder.decompress(data))
        except zlib.error as error:
            raise DataError(f"{path} is damaged ({error}); repair it or give another output") from None
        data = decoder.unused_data
        if decoder.eof:
            yield b"".join(parts), file.tell() - len(data)
            decoder, parts = zlib.decompressobj(31), []


def part_path(output: Path, rank: int, world: int) -> Path:
    """The file of one of several processes: replies.jsonl.gz -> replies.rank0of4.jsonl.gz."""
    if world == 1:
        return output
    stem, suffix = _split(output)
    return output.with_name(f"{stem}.rank{rank}of{world}{suffix}")


def all_parts(output: Path) -> list[Path]:
    """Files of `output` that are there, by however many processes they were written."""
    stem, suffix = _split(output)
    parts = sorted(output.parent.glob(f"{glob.escape(stem)}.rank*of*{suffix}"))
    return [*([output] if output.exists() else []), *parts]


def _split(output: Path) -> tuple[str, str]:
    suffix = next(suffix for suffix in reversed(SUFFIXES) if output.name.endswith(suffix))
    return output.name.removesuffix(suffix), suffix


def check_manifest(output: Path, settings: dict[str, Any], details: dict[str, Any]) -> None:
    """Note beside `output` what its rows are made with; a later run must agree on the settings.

    Args:
        settings: all that the rows depend on, as JSON holds it; details: of the run, not compared.
    Raises:
        ConfigError: other settings, naming them, or rows of which nothing is known.
    """
    path = output.with_name(f"{output.name}.manifest")
    if not path.exists():
        if parts := [part for part in all_parts(output) if part.stat().st_size]:
            raise ConfigError(f"{parts[0]} exists, but not {path.name}: give another output, or remove the file")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_record(path, {"settings": settings, **details})
    try:
        held = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no manifest ({error!r}); give another output, or remove both files") from None
    if differing := [name for name in {**held, **settings} if held.get(name) != settings.get(name)]:
        changes = ", ".join(f"{name} {held.get(name)} (now {settings.get(name)})" for name in differing)
        raise ConfigError(f"{output} was begun with {changes}; give the same settings, or another output")
