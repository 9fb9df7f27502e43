"""What makes two runs the same: their settings, and the content of the files these name; not the code, not the paths of
outputs, not how fast a machine is told to be."""

import json
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError
from eagle3_train.sources import FileSource, SavedSource, Source, open_sources

Settings = dict[str, Any]
# of a head's folder, what load_head reads
HEAD_FILES = ("config.json", "model.safetensors")


class Identity:
    """Settings by dotted name: those that differ from the defaults make the digest, all of them are kept beside a run.

    A setting that is new in the code, with a default, leaves the digests of older runs as they were.
    """

    def __init__(self, settings: Any, defaults: Any, ignored: frozenset[str], contents: Settings):
        """`settings` and `defaults` are dataclasses; `contents` are digests of files, by what they are."""
        usual, given = _by_name(defaults), _by_name(settings)
        self.full = {k: v for k, v in given.items() if not _within(k, ignored)} | contents
        self.differing = {k: v for k, v in self.full.items() if k not in usual or usual[k] != v}

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(self.differing, sort_keys=True).encode(), digest_size=5).hexdigest()

    def check(self, file: Path, made: Path) -> None:
        """Raises ConfigError where the settings in a file, of the run of this digest that left `made`, were others: the
        defaults have changed. A run without such a file counts as one of today's defaults."""
        if not file.is_file():
            return
        try:
            kept = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); move {made} away") from None
        changed = [k for k in self.full if k in kept and kept[k] != self.full[k]]
        if changed:
            told = ", ".join(f"{k} was {kept[k]!r}, is {self.full[k]!r}" for k in changed)
            raise ConfigError(f"{made} was made under other defaults ({told}); move it away, or give another --output")


def data_content(names: Iterable[str]) -> list[str]:
    """Digests of the chats that `data.files` stand for, file by file; of a data set of the hub, its name.

    Raises:
        DataError: see open_sources.
    """
    return [digest for source in open_sources(names) for digest in _source_content(source)]


def head_content(folder: Path | str) -> str:
    """Digest of a head's settings and weights; raises ConfigError for a folder that holds no head."""
    return "-".join(file_content(Path(folder) / name) for name in HEAD_FILES)


def file_content(path: Path | str) -> str:
    """Digest of a file; raises ConfigError where there is none."""
    file = Path(path).absolute()
    if not file.is_file():
        raise ConfigError(f"{path}: no such file")
    status = file.stat()
    return _digest(file, status.st_size, status.st_mtime_ns)


# every run of a sweep asks for the same files, which may be large
@cache
def _digest(file: Path, _size: int, _changed: int) -> str:
    with file.open("rb") as stream:
        digest = blake2b(digest_size=8)
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _source_content(source: Source) -> list[str]:
    if isinstance(source, FileSource):
        return [file_content(source.name)]
    if isinstance(source, SavedSource):
        # `datasets` caches what is made of a data set beside it
        files = sorted(p for p in Path(source.name).iterdir() if p.is_file() and not p.name.startswith("cache-"))
        return [file_content(file) for file in files]
    return [source.name]


def _within(key: str, names: frozenset[str]) -> bool:
    return key in names or key.partition(".")[0] in names


def _by_name(settings: Any, prefix: str = "") -> Settings:
    """A dataclass's settings and those of the dataclasses inside it by dotted name, as JSON holds their values."""
    found: Settings = {}
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            found |= _by_name(value, f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = json.loads(json.dumps(value, default=str))
    return found
