"""Where a run keeps features between epochs, by its settings: nowhere, in memory, or in a store on disk."""

from collections.abc import Iterable
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol

import psutil
from accelerate.utils import get_int_from_env

from eagle3.checkpoint.reference import read_config
from eagle3.errors import ConfigError, StoreError
from eagle3.heads.eagle3 import head_config
from eagle3.loading import weights_digest
from eagle3.target import Target, resolve_path
from eagle3_train.batches import Row, pack, supervised
from eagle3_train.config import TrainConfig
from eagle3_train.shards import Codec, Encoded
from eagle3_train.store import FeatureStore, Manifest, check_space, document_keys
from eagle3_train.tokenizer import template_hash, tokenizer_hash


class Shelf(Protocol):
    """Keeps encoded documents by key."""

    codec: Codec
    # False: only read, every document must be there
    writable: bool

    def get(self, key: bytes) -> Encoded | None: ...

    def add(self, key: bytes, kept: Encoded) -> None: ...

    def flush(self) -> None: ...


class MemoryShelf:
    """Documents in this process's memory."""

    def __init__(self, codec: Codec):
        self.codec, self.writable = codec, True
        self._kept: dict[bytes, Encoded] = {}

    def get(self, key: bytes) -> Encoded | None:
        return self._kept.get(key)

    def add(self, key: bytes, kept: Encoded) -> None:
        self._kept[key] = kept

    def flush(self) -> None:
        """Nothing to write."""


def open_shelf(
    config: TrainConfig,
    target: Target,
    capture_layers: tuple[int, ...],
    rows: Iterable[Any],
    ranks: tuple[int, int] = (0, 1),
) -> tuple[Shelf | None, str]:
    """Where `features.source` keeps features (None: nowhere), and what to tell the user of it.

    Args:
        rows: all that will be trained on and evaluated.
        ranks: (rank, number of processes).
    Raises:
        ConfigError: the memory is too small.
        StoreError: the disk is too small, the store is another run's, damaged, or lacks chats that nobody makes.
    """
    settings = config.features
    if settings.source == "online":
        return None, ""
    manifest = make_manifest(config, target, capture_layers)
    documents = dict(map(document_size, rows, repeat(manifest)))
    if settings.source == "memory":
        # each process comes to keep every chat
        needed = sum(documents.values()) * get_int_from_env(["LOCAL_WORLD_SIZE"], 1)
        check_memory(needed)
        return MemoryShelf(manifest.codec), f"features in memory: up to {_gib(needed)}"
    assert settings.store is not None
    if settings.source == "offline":
        store = FeatureStore(settings.store, manifest)
        if absent := sum(key not in store for key in documents):
            raise StoreError(
                f"feature store {settings.store!r} lacks {absent} of {len(documents)} chats; run python "
                "train/dump_features.py with the same settings, or set features.source: hybrid"
            )
        return store, f"features from {settings.store}: {len(documents)} chats"
    store = FeatureStore(settings.store, manifest, ranks, int(settings.shard_mib * 2**20))
    needed = sum(size for key, size in documents.items() if key not in store)
    check_space(settings.store, needed)
    return store, f"features in {settings.store}: {len(store)} chats are there, {_gib(needed)} to write"


def capture_layers(config: TrainConfig, target: Target) -> tuple[int, ...]:
    """Of the head that the run trains."""
    if config.init_head is not None:
        return read_config(Path(config.init_head), target).capture_layers
    return head_config(target, 1, config.head).capture_layers


def make_manifest(config: TrainConfig, target: Target, capture_layers: tuple[int, ...]) -> Manifest:
    """What the features of a run depend on."""
    own, tokenizer = str(target.dtype).removeprefix("torch."), target.tokenizer
    return Manifest(
        target_fingerprint=target.fingerprint,
        target_weights=weights_digest(resolve_path(config.target)),
        target_dtype=own,
        tokenizer="none" if tokenizer is None else tokenizer_hash(tokenizer),
        template="none" if tokenizer is None else template_hash(tokenizer),
        capture_layers=list(capture_layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        max_length=config.data.max_length,
        dtype=own if config.features.dtype == "auto" else config.features.dtype,
    )


def document_size(row: Row, manifest: Manifest) -> tuple[bytes, int]:
    """The key that a row's features are kept by, and the bytes that they take."""
    batch = pack([row])
    mask = supervised(batch.span_ids, 0)
    (key,) = document_keys([batch.ids], [mask])
    return key, manifest.codec.size(len(mask), int(mask.sum()), manifest.hidden_size)


def check_memory(needed: int) -> None:
    """Refuse to begin what this machine's memory cannot hold.

    Raises:
        ConfigError: naming both sizes.
    """
    free = psutil.virtual_memory().available
    if needed > 0.8 * free:
        raise ConfigError(
            f"features.source: memory needs {_gib(needed)}, {_gib(free)} are free; use hybrid (a store on disk), a "
            "smaller features.dtype, or online"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
