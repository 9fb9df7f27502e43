"""A vocabulary map in a file of its own: `d2t` (int64 offsets), `t2d` (bool), and what it was made for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from eagle3.errors import ConfigError, VocabMapError
from eagle3.files import replace_file
from eagle3.vocab import VocabMap, build_vocab_map, check_vocab_map
from eagle3_train.tokenizer import tokenizer_hash

if TYPE_CHECKING:
    from eagle3_train.prepared import PreparedRows


def save_vocab_map(file: Path, chosen: VocabMap, tokenizer: Any, facts: dict[str, str]) -> None:
    """Write a map that is old or whole.

    Args:
        facts: what else to record, such as the source of the counts and the coverage.
    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    metadata = {"format": "pt", "tokenizer": tokenizer_hash(tokenizer), **facts}
    file.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(file, binary=True) as part:
        part.write(save({"d2t": chosen.d2t, "t2d": chosen.t2d}, metadata))


def load_vocab_map(
    file: str, tokenizer: Any, vocab_size: int, draft_vocab_size: int | None, end_ids: Iterable[int] = ()
) -> VocabMap:
    """Read and check a map. One that was made for fewer or more padded ids of the same tokenizer fits too.

    Args:
        vocab_size: rows of the target's lm_head.
        draft_vocab_size: `head.draft_vocab_size`; None = vocab_size.
        end_ids: ids that end a turn; a map without them is warned of.
    Raises:
        VocabMapError: no such file, no map, or one of another tokenizer.
        ConfigError: its size is not `draft_vocab_size`.
    """
    tensors, metadata = _read(file)
    if (made_for := metadata.get("tokenizer")) not in (None, tokenizer_hash(tokenizer)):
        raise VocabMapError(f"{file} was made for another tokenizer ({made_for}): build a map with this target's")
    size, asked = len(tensors["d2t"]), draft_vocab_size or vocab_size
    try:
        t2d = tensors.get("t2d")
        chosen = check_vocab_map(tensors["d2t"], None if t2d is None else _resized(t2d, vocab_size), vocab_size)
    except VocabMapError as error:
        raise VocabMapError(f"{file}: {error}") from None
    if size != asked:
        raise ConfigError(
            f"{file} maps {size} draft tokens, but head.draft_vocab_size is {asked}: set it to {size}, or build a map "
            "of that size"
        )
    if missing := [i for i in sorted(end_ids) if not (i < vocab_size and chosen.t2d[i])]:
        warnings.warn(
            f"{file} lacks the ids {missing} that end a turn: a head with it misses at every reply's end", stacklevel=2
        )
    return chosen


def _read(file: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            metadata = stored.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise VocabMapError(f"{file}: cannot be read as a vocabulary map ({error})") from None
    if "d2t" not in tensors:
        raise VocabMapError(f"{file} holds {sorted(tensors)}; a vocabulary map holds d2t, and t2d to confirm it")
    return tensors, metadata


def _resized(t2d: Tensor, vocab_size: int) -> Tensor:
    """Membership over `vocab_size` ids, where those that differ are padding: not members."""
    if t2d.dim() != 1 or bool(t2d[vocab_size:].any()):
        return t2d
    return torch.cat((t2d[:vocab_size], t2d.new_zeros(max(0, vocab_size - len(t2d)))))


def coverage_table(rows: PreparedRows, sizes: Iterable[int]) -> str:
    """Share of the supervised tokens that draft vocabularies made of the training rows hold, a line for each size."""
    vocab_size = len(rows.counts)
    lines = [f"{int((rows.counts > 0).sum()):,} distinct supervised tokens; coverage by draft vocabulary size:"]
    for size in (s for s in sizes if len(rows.end_ids) <= s < vocab_size):
        with warnings.catch_warnings():
            # a size that the data cannot fill shows in the line above
            warnings.simplefilter("ignore", UserWarning)
            chosen = build_vocab_map(rows.counts, size, rows.end_ids, vocab_size)
        shares = chosen.coverage(rows.counts), chosen.coverage(rows.held_out_counts)
        lines.append(f"{size:>8,}  train {shares[0]:.4f}  held-out {shares[1]:.4f}")
    return "\n".join(lines)
