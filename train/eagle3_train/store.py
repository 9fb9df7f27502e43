"""The feature store: what the target says of each document, on disk, to train from without running it again.

A folder of `manifest.json` and shards (eagle3_train.shards). A kill at any moment leaves whole shards only. Several
processes may fill one store; its index is the union of the shards' own. Knows no models.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import psutil
from torch import Tensor

from eagle3.errors import StoreError
from eagle3_train.shards import Codec, Encoded, Place, ShardReader, shard_index, shard_name, write_shard
from eagle3_train.tracking import write_record

MANIFEST = "manifest.json"
SCHEMA = 1
SUPERVISED = "row t: x[t+1] and x[t+2] in one assistant span"


@dataclass(frozen=True)
class Manifest:
    """What the values depend on, beside the documents; a run reads a store whose manifest equals its own.

    The draft vocabulary is no part of it: the teacher is kept as hidden states, which serve any. `target_weights` is of
    all the checkpoint's files, as a run that reads the store does not load most of them.
    """

    target_fingerprint: str
    target_weights: str | None
    target_dtype: str
    tokenizer: str
    template: str
    capture_layers: list[int]
    hidden_size: int
    vocab_size: int
    max_length: int
    dtype: str
    supervised: str = SUPERVISED
    schema: int = SCHEMA

    @property
    def digest(self) -> str:
        return blake2b(json.dumps(asdict(self), sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def codec(self) -> Codec:
        return Codec(self.dtype, len(self.capture_layers))


class FeatureStore:
    """Documents by key (`document_keys`), each with its encoded features.

    Args:
        folder: made if there is a `writer` and no folder.
        manifest: the run's.
        writer: None to read only, else (rank, number of processes that fill it).
        shard_bytes: a shard is written once so many bytes wait.
    Raises:
        StoreError: no store there, one of another run, or a damaged shard.
    """

    def __init__(
        self,
        folder: str | Path,
        manifest: Manifest,
        writer: tuple[int, int] | None = None,
        shard_bytes: int = 2**28,
    ):
        self.folder, self.manifest, self.writer, self.shard_bytes = Path(folder), manifest, writer, shard_bytes
        self.codec, self.writable = manifest.codec, writer is not None
        self._index: dict[bytes, Place] = {}
        self._shards: set[str] = set()
        self._reader = ShardReader()
        self._waiting: dict[bytes, Encoded] = {}
        self._waiting_bytes = 0
        if writer is not None:
            self._create(*writer)
        check_manifest(self.folder, manifest)
        self.refresh()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting or key in self._index

    def __len__(self) -> int:
        return len(self._index) + len(self._waiting)

    def get(self, key: bytes) -> Encoded | None:
        """A document's values, None if the store has none.

        Raises:
            StoreError: its bytes are not those that were written.
        """
        if key not in self and self.writable:
            # another process may have written it since
            self.refresh()
        if key in self._waiting:
            return self._waiting[key]
        return self._reader.read(self._index[key]) if key in self._index else None

    def add(self, key: bytes, kept: Encoded) -> None:
        """Keep a document; it is on disk once its shard is full, or after `flush`."""
        self._waiting[key] = kept
        self._waiting_bytes += sum(x.nbytes for x in kept.values())
        if self._waiting_bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard."""
        if self._waiting:
            self.write_shard(self._waiting)
        self._waiting, self._waiting_bytes = {}, 0

    def write_shard(self, documents: dict[bytes, Encoded]) -> None:
        """Write documents as one shard.

        Raises:
            StoreError: the disk is full; what was written before stays usable.
        """
        assert self.writer is not None, "the store was opened to be read"
        final = self.folder / shard_name(documents)
        try:
            # two runs may fill one store at once
            part = self.folder / f".{final.name}.part-{os.getpid()}-{self.writer[0]}"
            write_shard(part, final, documents, self.manifest.digest)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"the disk of feature store {str(self.folder)!r} is full; {len(self._index)} documents in "
                f"{len(self._shards)} shards are whole and stay usable: make room, then the same command goes on"
            ) from error
        self.refresh()

    def refresh(self) -> None:
        """Take up the shards that appeared since."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name not in self._shards:
                self._index |= shard_index(path, self.manifest.digest)
                self._shards.add(path.name)

    def _create(self, rank: int, world: int) -> None:
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"feature store {str(self.folder)!r} is a file; give a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        for part in self.folder.glob(".shard-*.part-*"):
            # what a killed process was writing; each process removes its own, and those of a larger world
            *writer, its_rank = map(int, part.name.rpartition(".part-")[2].split("-"))
            if its_rank % world == rank and not any(map(psutil.pid_exists, writer)):
                part.unlink(missing_ok=True)
        if not (self.folder / MANIFEST).exists() and not any(self.folder.glob("*.safetensors")):
            try:
                write_record(self.folder / MANIFEST, self.manifest)
            except OSError as error:
                raise StoreError(
                    f"feature store {str(self.folder)!r} cannot be written ({error.strerror}); make room there, or "
                    "give another features.store"
                ) from error


def document_keys(ids: Sequence[Tensor], supervised: Sequence[Tensor]) -> list[bytes]:
    """A document is known by its tokens and by which of its rows are supervised (bool), each [T]."""
    pairs = ((i.cpu().int().numpy().tobytes(), s.cpu().numpy().tobytes()) for i, s in zip(ids, supervised, strict=True))
    return [blake2b(tokens + b"|" + rows, digest_size=16).digest() for tokens, rows in pairs]


def plan_shards(sizes: Sequence[int], shard_bytes: int) -> list[range]:
    """Documents of so many bytes each, in order, cut into shards of at most `shard_bytes` (or of one document)."""
    shards, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if total + size > shard_bytes and index > start:
            shards.append(range(start, index))
            start, total = index, 0
        total += size
    return [*shards, range(start, len(sizes))] if len(sizes) > start else shards


def check_space(folder: Path | str, needed: int) -> None:
    """Refuse to begin what the disk cannot hold.

    Raises:
        StoreError: naming both sizes.
    """
    path = Path(folder).absolute()
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if needed > free:
        raise StoreError(
            f"the features need {needed / 2**30:.3f} GiB in {str(folder)!r}, {free / 2**30:.3f} GiB are free there; "
            "make room, give another features.store, a smaller features.dtype, or fewer chats"
        )


def check_manifest(folder: Path, manifest: Manifest) -> None:
    """
    Raises:
        StoreError: there is none, or it is another run's; it names what differs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if any(folder.glob("*.safetensors")):
            raise StoreError(f"{str(folder)!r} holds no feature store: shards, but no {MANIFEST}; move them away")
        raise StoreError(
            f"{str(folder)!r} holds no feature store (no {MANIFEST}); make one: python train/dump_features.py with the "
            "same settings"
        )
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read ({error}); give another features.store") from error
    differing = [f"{k} {found.get(k)} (this run: {v})" for k, v in asdict(manifest).items() if found.get(k) != v]
    if differing:
        raise StoreError(
            f"feature store {str(folder)!r} was made with other settings: {'; '.join(differing)}; give another "
            "features.store, or set them as they were"
        )


def damaged_shards(folder: Path | str, manifest: Manifest) -> Iterator[tuple[Path, str]]:
    """Shards that are not what was written, each with the reason; reads the whole store.

    Raises:
        StoreError: the folder holds no store, or that of another run.
    """
    check_manifest(Path(folder), manifest)
    for path in sorted(Path(folder).glob("shard-*.safetensors")):
        reader = ShardReader()
        try:
            for place in shard_index(path, manifest.digest).values():
                reader.read(place)
        except StoreError as error:
            yield path, str(error)
