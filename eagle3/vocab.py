"""Draft vocabulary: which target tokens the head can propose. `d2t[j]` is an OFFSET: target id = j + d2t[j]."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.errors import ConfigError, VocabMapError


@dataclass(frozen=True)
class VocabMap:
    """d2t int64 [Vd] (offsets), t2d bool [V] (membership)."""

    d2t: Tensor
    t2d: Tensor

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, int64 [Vd]."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    def coverage(self, counts: Tensor) -> float:
        """Share of `counts` [V] that falls on tokens of the draft vocabulary."""
        total = counts.sum().item()
        return counts[self.t2d].sum().item() / total if total else 0.0


def identity_map(vocab_size: int) -> VocabMap:
    """The map of a head that can propose every token."""
    return VocabMap(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))


def build_vocab_map(counts: Tensor, draft_vocab_size: int, always: Iterable[int], usable_vocab: int) -> VocabMap:
    """Keep the most frequent tokens; ties and never-seen fill-ups take the lowest id.

    Args:
        counts: int64 [V], how often each target id is to be predicted in the training data.
        draft_vocab_size: tokens to keep; V keeps all.
        always: ids that are in whatever their count (every EOS and end-of-turn id).
        usable_vocab: ids from here on lie past the tokenizer (padded lm_head) and are never chosen.
    Raises:
        ConfigError: draft_vocab_size out of range, or smaller than `always`.
    """
    vocab_size = counts.shape[0]
    if draft_vocab_size == vocab_size:
        return identity_map(vocab_size)
    forced = sorted({i for i in always if 0 <= i < usable_vocab})
    if not max(1, len(forced)) <= draft_vocab_size <= usable_vocab:
        raise ConfigError(
            f"draft_vocab_size {draft_vocab_size} must be in [{max(1, len(forced))}, {usable_vocab}] "
            f"or exactly {vocab_size} (the whole lm_head)"
        )
    ranked = counts[:usable_vocab].clone().to(torch.int64)
    seen = int((ranked > 0).sum())
    if seen < draft_vocab_size:
        warnings.warn(
            f"only {seen} distinct tokens occur in the data; the draft vocabulary of {draft_vocab_size} "
            "is filled up with the lowest unused ids",
            stacklevel=2,
        )
    ranked[forced] = torch.iinfo(torch.int64).max
    chosen = torch.sort(ranked, descending=True, stable=True).indices[:draft_vocab_size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return VocabMap(chosen - torch.arange(draft_vocab_size), t2d)


def _check_tensors(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> None:
    if d2t.dim() != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise VocabMapError(f"d2t is {d2t.dtype} {list(d2t.shape)}; it must be int64 [draft vocabulary]")
    if t2d is not None and t2d.shape != (vocab_size,):
        raise VocabMapError(f"t2d is {list(t2d.shape)}; it must be [{vocab_size}], one per target id")


def check_vocab_map(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> VocabMap:
    """Validate a loaded map; order need not be sorted.

    Raises:
        VocabMapError: no integer vector, ids out of range or repeated, or `t2d` disagrees.
    """
    _check_tensors(d2t, t2d, vocab_size)
    size = d2t.shape[0]
    ids = torch.arange(size) + d2t
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(bad):
        j = int(bad[0])
        raise VocabMapError(
            f"d2t[{j}] maps draft token {j} to target id {int(ids[j])}, outside [0, {vocab_size}); "
            "d2t holds offsets (target = draft + offset): was it saved as absolute ids?"
        )
    if t2d is None and size < vocab_size and not d2t.any():
        raise VocabMapError(
            f"d2t is all zeros although the draft vocabulary ({size}) is smaller than the target's ({vocab_size}), "
            "and no t2d confirms it: the map was not saved with the weights"
        )
    if t2d is None and size > 2 and bool((d2t.diff() > 0).all()):
        # real offsets grow at every step only if no two neighbouring ids were chosen
        raise VocabMapError(
            "d2t rises at every step, as absolute target ids do; it must hold offsets (target = draft + offset). "
            "If these are offsets, store t2d (bool, one per target id) beside it to confirm them"
        )
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    if int(members.sum()) != size:
        raise VocabMapError(
            f"d2t maps {size} draft tokens to {int(members.sum())} target ids: some are reached twice; "
            "d2t holds offsets (target = draft + offset): was it saved as absolute ids?"
        )
    if t2d is not None and not torch.equal(t2d.bool(), members):
        raise VocabMapError(f"t2d and d2t disagree on {int((t2d.bool() ^ members).sum())} target ids")
    return VocabMap(d2t.to(torch.int64), members)
