"""Where chats are stored, each a stream of rows (dicts) that know their place. Knows nothing of chats.

A source is one of `data.files`:

    chats.jsonl, chats.jsonl.gz, chats.json, chats.json.gz, chats.parquet    a file (.json: an array, or lines)
    data/**/*.jsonl                                                          a pattern
    data/                                                                    a folder of such files, or one that
                                                                             `datasets` saved with save_to_disk
    hub:org/name, hub:org/name@split, hub:org/name:config@split              a data set of the hub (split: train)
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3.chats import parse_object, read_lines
from eagle3.errors import DataError

Placed = tuple[str, dict[str, Any]]
_LINES, _ARRAYS, _TABLES = (".jsonl", ".jsonl.gz"), (".json", ".json.gz"), (".parquet",)
SUFFIXES = _LINES + _ARRAYS + _TABLES
_HUB = re.compile(r"hub:(?P<path>[^:@]+)(:(?P<config>[^:@]+))?(@(?P<split>[^@]+))?")
_BLOCK = 1 << 16


def open_sources(names: Iterable[str]) -> list[Source]:
    """The sources that `names` stand for: patterns and folders give one for each file, sorted.

    Raises:
        DataError: nothing named, nothing there, or a kind of file that is not read.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise DataError(
            f"no data files given: set data.files to chats ({', '.join(SUFFIXES)}, a folder or pattern of them, "
            "or hub:org/name)"
        )
    return [source for name in names for source in _sources(str(name))]


def _sources(name: str) -> list[Source]:
    if name.startswith("hub:"):
        return [HubSource(name)]
    path = Path(name)
    if path.is_dir():
        return _in_folder(path)
    if not path.exists() and glob.has_magic(name):
        found = sorted(p for p in glob.glob(name, recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"{name}: no file matches this pattern")
        return [FileSource(p) for p in found]
    return [FileSource(name)]


def _in_folder(folder: Path) -> list[Source]:
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise DataError(f"{folder} holds several splits; name one of {', '.join(str(folder / s) for s in splits)}")
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return [SavedSource(str(folder))]
    found = sorted(p for p in folder.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file() and p.name[0] != ".")
    if not found:
        raise DataError(f"{folder}: no file of this folder ends in {', '.join(SUFFIXES)}")
    return [FileSource(str(p)) for p in found]


@dataclass(frozen=True)
class FileSource:
    """One file; DataError from its methods names `file:row` where there is one."""

    name: str

    def __post_init__(self):
        if not self.name.endswith(SUFFIXES):
            raise DataError(f"{self.name}: not a kind of file that is read: use {', '.join(SUFFIXES)}")
        if not Path(self.name).exists():
            raise DataError(f"{self.name}: no such file")

    def rows(self, streaming: bool = False) -> Iterator[Placed]:
        """(place, row) of every row in order; `streaming` downloads nothing ahead."""
        if self.name.endswith(_TABLES):
            return _table_rows(self.name)
        if self.name.endswith(_ARRAYS) and _begins_with_bracket(self.name):
            return _array_rows(self.name)
        return ((place, parse_object(line, place)) for place, line in read_lines(self.name))

    def digest(self) -> str:
        """Changes whenever the rows do."""
        digest = hashlib.blake2b(digest_size=16)
        try:
            with open(self.name, "rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read ({error})") from None
        return f"{Path(self.name).stat().st_size}-{digest.hexdigest()}"

    def stamp(self) -> str:
        """What can be told without reading the rows: for data too large to be read twice."""
        status = Path(self.name).stat()
        return f"{self.name}-{status.st_size}-{status.st_mtime_ns}"


class _DatasetSource:
    """A data set of the `datasets` library; methods as FileSource's."""

    def __init__(self, name: str):
        self.name = name

    @cached_property
    def _dataset(self) -> Any:
        return self._load(streaming=False)

    def _load(self, streaming: bool) -> Any:
        raise NotImplementedError

    def rows(self, streaming: bool = False) -> Iterator[Placed]:
        dataset, number = self._load(streaming=True) if streaming else self._dataset, 0
        try:
            for number, row in enumerate(dataset, 1):
                yield f"{self.name}:{number}", _present(row)
        # the hub, its builders and Arrow may raise anything
        except Exception as error:
            raise DataError(f"{self.name}:{number + 1}: cannot be read ({_first_line(error)})") from error

    def digest(self) -> str:
        return self._dataset._fingerprint

    def stamp(self) -> str:
        return self.digest()


class SavedSource(_DatasetSource):
    """A folder written by `Dataset.save_to_disk`."""

    def _load(self, streaming: bool) -> Any:
        import datasets

        try:
            return datasets.load_from_disk(self.name)
        except Exception as error:
            raise DataError(f"{self.name}: cannot be read as a saved data set ({_first_line(error)})") from error


class HubSource(_DatasetSource):
    """`hub:org/name[:config][@split]`, through `datasets.load_dataset`."""

    def __init__(self, name: str):
        super().__init__(name)
        if (parsed := _HUB.fullmatch(name)) is None:
            raise DataError(f"{name!r}: write hub:org/name, hub:org/name@split or hub:org/name:config@split")
        self.path, self.config, self.split = parsed["path"], parsed["config"], parsed["split"] or "train"

    def stamp(self) -> str:
        # its digest would download all of it
        return self.name

    def _load(self, streaming: bool) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.path, self.config, split=self.split, streaming=streaming)
        except Exception as error:
            raise DataError(
                f"{self.name}: cannot be loaded ({type(error).__name__}: {_first_line(error)}); without a way to the "
                "hub, download its files (hf download --repo-type dataset) and name their folder"
            ) from error


Source = FileSource | SavedSource | HubSource


def _table_rows(file: str) -> Iterator[Placed]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}:{number}", _present(row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}:{number + 1}: cannot be read as Parquet ({_first_line(error)})") from None


def _present(value: Any) -> Any:
    """Without keys that hold null: Arrow has no missing keys, it writes null for what only other rows have."""
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def _open_text(file: str) -> Iterator[io.TextIOWrapper]:
    with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as raw:
        yield io.TextIOWrapper(raw, encoding="utf-8-sig")


def _begins_with_bracket(file: str) -> bool:
    try:
        with _open_text(file) as text:
            while (character := text.read(1)).isspace():
                pass
            return character == "["
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{file}:1: cannot be read ({error})") from None


def _array_rows(file: str) -> Iterator[Placed]:
    """The objects of one JSON array, of which no more than one is held at a time."""
    number, decoder = 0, json.JSONDecoder()
    try:
        with _open_text(file) as text:
            buffer = text.read(_BLOCK).lstrip()[1:]
            while not (buffer := _after_comma(buffer, number, text)).startswith("]"):
                row, buffer = _next_value(decoder, buffer, text)
                number += 1
                if not isinstance(row, dict):
                    raise DataError(f"{file}:{number}: expected a JSON object, found {type(row).__name__}")
                yield f"{file}:{number}", row
            rest = buffer[1:]
            while not rest.strip() and (rest := text.read(_BLOCK)):
                pass
            if rest.strip():
                raise ValueError(f"a file holds one array, after it stands {rest.strip()[:20]!r}")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}:{number + 1}: not valid JSON ({error})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}:{number + 1}: cannot be read ({error})") from None


def _after_comma(buffer: str, number: int, text: io.TextIOWrapper) -> str:
    """What follows the white space and, between values, the comma."""
    while not (buffer := buffer.lstrip()) and (more := text.read(_BLOCK)):
        buffer = more
    if number and buffer.startswith(","):
        return _after_comma(buffer[1:], 0, text)
    if not buffer or (number and not buffer.startswith("]")):
        raise ValueError("expected ',' or ']' after a value, found " + (repr(buffer[:20]) if buffer else "the end"))
    return buffer


def _next_value(decoder: json.JSONDecoder, buffer: str, text: io.TextIOWrapper) -> tuple[Any, str]:
    block = _BLOCK
    while True:
        try:
            value, end = decoder.raw_decode(buffer)
            return value, buffer[end:]
        except ValueError:
            # perhaps cut off: a value that needs n characters is tried log n times
            if not (more := text.read(block)):
                raise
            buffer, block = buffer + more, 2 * block


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
