"""One shard of a feature store: documents' features as tensors end to end in a safetensors file, its index and a
checksum per document in the header. Written under a temporary name and renamed. Knows files, not what a store is for.
"""

import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import StoreError

# a document's encoded values: `features...` have a row per token, the others one per supervised row
Encoded = dict[str, Tensor]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT8 = torch.float8_e4m3fn
_HEADER = "eagle3_features"
_OPEN_SHARDS = 128


@dataclass(frozen=True)
class DocumentFeatures:
    """What the target says of one document, or of several end to end.

    features [T, F]; of its R supervised rows, at the position after each: hidden [R, H] (last hidden states, after
    the final norm), lse fp32 [R] (of the logits over the whole vocabulary), argmax int64 [R].
    """

    features: Tensor
    hidden: Tensor
    lse: Tensor
    argmax: Tensor

    @classmethod
    def join(cls, parts: Sequence["DocumentFeatures"]) -> "DocumentFeatures":
        """Documents end to end."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat(column) for column in zip(*(vars(p).values() for p in parts), strict=True)))


@dataclass(frozen=True)
class Codec:
    """How values are kept: float32, bfloat16, float16, or float8.

    float8 is e4m3 with an fp32 scale per token and captured layer (layers differ by far in size), for the features;
    the teacher's hidden states then are bfloat16, as the loss is made of them.
    """

    dtype: str
    layers: int

    def encode(self, values: DocumentFeatures) -> Encoded:
        """On the CPU."""
        kept = {"lse": values.lse.float(), "argmax": values.argmax.to(torch.int32)}
        if self.dtype == "float8":
            blocks = values.features.float().unflatten(-1, (self.layers, -1))
            scale = blocks.abs().amax(-1).clamp(min=1e-30) / torch.finfo(_FLOAT8).max
            kept["features"] = (blocks / scale.unsqueeze(-1)).flatten(-2).to(_FLOAT8)
            kept["features_scale"] = scale
            kept["hidden"] = values.hidden.bfloat16()
        else:
            dtype = _DTYPES[self.dtype]
            kept["features"], kept["hidden"] = values.features.to(dtype), values.hidden.to(dtype)
        return {name: x.contiguous().cpu() for name, x in sorted(kept.items())}

    def decode(self, kept: Encoded, dtype: torch.dtype, device: torch.device | str) -> DocumentFeatures:
        """As the target gives them: features and hidden in its dtype, all on its device."""
        kept = {name: x.to(device) for name, x in kept.items()}
        features = kept["features"]
        if self.dtype == "float8":
            blocks = features.float().unflatten(-1, (self.layers, -1))
            features = (blocks * kept["features_scale"].unsqueeze(-1)).flatten(-2)
        return DocumentFeatures(features.to(dtype), kept["hidden"].to(dtype), kept["lse"], kept["argmax"].long())

    def size(self, tokens: int, rows: int, hidden_size: int) -> int:
        """Bytes of a document of so many tokens and supervised rows."""
        wide = self.layers * hidden_size
        if self.dtype == "float8":
            return tokens * (wide + 4 * self.layers) + rows * (2 * hidden_size + 8)
        item = _DTYPES[self.dtype].itemsize
        return tokens * wide * item + rows * (hidden_size * item + 8)


@dataclass(frozen=True)
class Place:
    """Where a document lies: rows of the shard's tensors, and the checksum of its bytes."""

    shard: Path
    token: int
    tokens: int
    row: int
    rows: int
    checksum: int


class ShardReader:
    """Reads documents out of shards, memory-mapped; the most recently used shards stay open."""

    def __init__(self):
        self._open: dict[Path, Any] = {}

    def read(self, place: Place) -> Encoded:
        """
        Raises:
            StoreError: the document's bytes are not those that were written.
        """
        if (handle := self._open.pop(place.shard, None)) is None:
            handle = _open_shard(place.shard)
        self._open[place.shard] = handle
        if len(self._open) > _OPEN_SHARDS:
            self._open.pop(next(iter(self._open)))
        tokens, rows = slice(place.token, place.token + place.tokens), slice(place.row, place.row + place.rows)
        names = sorted(handle.keys())
        kept = {name: handle.get_slice(name)[tokens if name.startswith("features") else rows] for name in names}
        if _checksum(kept) != place.checksum:
            raise StoreError(damaged(place.shard, "a document's checksum does not fit its bytes"))
        return kept


def shard_name(keys: Iterable[bytes]) -> str:
    """Told by the documents in it: a shard made again has its old name."""
    return f"shard-{blake2b(b''.join(keys), digest_size=8).hexdigest()}.safetensors"


def write_shard(part: Path, final: Path, documents: dict[bytes, Encoded], store: str) -> None:
    """Write documents by key; `final` appears whole and on the disk, or not at all. Equal documents give equal files.

    Args:
        part: the temporary name, in the same folder.
        store: what tells this store's shards from others'.
    """
    columns = zip(*(kept.values() for kept in documents.values()), strict=True)
    names = next(iter(documents.values()))
    tensors = {name: torch.cat(column) for name, column in zip(names, columns, strict=True)}
    rows = [[key.hex(), len(kept["features"]), len(kept["lse"]), _checksum(kept)] for key, kept in documents.items()]
    # one entry: the library writes several in no fixed order
    content = save(tensors, {_HEADER: json.dumps({"store": store, "documents": rows})})
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def shard_index(path: Path, store: str) -> dict[bytes, Place]:
    """A shard's documents, from its header.

    Raises:
        StoreError: cut short, no shard, or one of another store.
    """
    text = (_open_shard(path).metadata() or {}).get(_HEADER)
    if text is None:
        raise StoreError(damaged(path, "it is no shard of a feature store"))
    index: dict[bytes, Place] = {}
    token = row = 0
    try:
        header = json.loads(text)
        found = header["store"]
        for key, tokens, rows, checksum in header["documents"]:
            index[bytes.fromhex(key)] = Place(path, token, tokens, row, rows, checksum)
            token, row = token + tokens, row + rows
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(damaged(path, f"its index cannot be read: {error}")) from error
    if found != store:
        raise StoreError(damaged(path, "it belongs to another store"))
    if path.name != shard_name(index):
        raise StoreError(damaged(path, "its index is not that of its name"))
    return index


def damaged(path: Path, why: str) -> str:
    """The message of a StoreError."""
    return (
        f"shard {path} of the feature store is damaged: {why}; run python train/dump_features.py with the same "
        "settings and --repair true, or remove that file and run it again: only its documents are made anew"
    )


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StoreError(damaged(path, str(error))) from error


def _checksum(kept: Encoded) -> int:
    checksum = 0
    for _, tensor in sorted(kept.items()):
        checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, checksum)
    return checksum
