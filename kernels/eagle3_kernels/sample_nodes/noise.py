"""Random numbers that depend on their key alone: a counter-based 32-bit hash, uniform and Gumbel noise of it.

The same integers wherever they are computed, and independent of slot, batch, tree and head. Knows nothing of logits.
"""

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# (shift, odd factor) of each round: C. Wellons' `lowbias32`
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
# the largest float32 below 1
_BELOW_ONE = 1 - 2**-24


class Purpose(IntEnum):
    """What a random number is for; numbers of different purposes are independent."""

    TARGET = 1
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4


def mix(x: int) -> int:
    """A bijection of 32-bit integers with near-ideal avalanche."""
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x


def mix_words(words: Tensor) -> Tensor:
    """`mix` of the bits of int32 words, in place: they wrap by themselves, at a third of int64's cost."""
    shifted = torch.empty_like(words)
    for shift, factor in _ROUNDS:
        # an arithmetic shift brings the sign in; the mask takes it out
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_(_MASK >> shift))
        if factor > 1:
            words.mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def hash_words(*words: int) -> int:
    """One 32-bit hash of integers of any size and sign, order mattering."""
    state = _GOLDEN
    for word in words:
        for half in (word & _MASK, (word >> 32) & _MASK):
            state = mix(((state ^ mix(half)) + _GOLDEN) & _MASK)
    return state


def request_seed(run_seed: int, prompt: int, turn: int = 0, sample: int = 0) -> int:
    """The 32-bit seed of one request of a run: never the slot it happens to run in."""
    return hash_words(run_seed, prompt, turn, sample)


def mixed_ids(ids: Tensor) -> Tensor:
    """What the hash makes of ids, int32: worth keeping for ids that are used again (see mixed_gumbel)."""
    # a copy, as mixing is in place
    return mix_words(ids.to(torch.int32, copy=True))


def noise_integers(seed: int, purpose: Purpose, position: int, ids: Tensor) -> Tensor:
    """Uniform uint32 (as int64) for each id: `mix(hash(seed, purpose, position) ^ mix(id))`."""
    return _integers(seed, purpose, position, mixed_ids(ids))


def _integers(seed: int, purpose: Purpose, position: int, mixed: Tensor) -> Tensor:
    words = mix_words(mixed ^ _signed(hash_words(seed, purpose, position)))
    return words.long().bitwise_and_(_MASK)


def uniforms(seed: int, purpose: Purpose, position: int, count: int, device: torch.device | str) -> Tensor:
    """Coins in [0, 1), float32 [count], keyed by sibling index at an absolute position."""
    return to_uniform(noise_integers(seed, purpose, position, torch.arange(count, device=device)))


def to_uniform(integers: Tensor) -> Tensor:
    """u = (h + 0.5) / 2^32, clamped below 1 (float32 would round to it)."""
    return integers.float().add_(0.5).mul_(2**-32).clamp_(max=_BELOW_ONE)


def gumbel(seed: int, purpose: Purpose, position: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, for each id (token or sibling index) at an absolute position."""
    return mixed_gumbel(seed, purpose, position, mixed_ids(ids))


def mixed_gumbel(seed: int, purpose: Purpose, position: int, mixed: Tensor) -> Tensor:
    """`gumbel` of ids that mixed_ids went over before."""
    return to_gumbel(_integers(seed, purpose, position, mixed))


def keyed_gumbel(seeds: Tensor, purpose: Purpose, positions: Tensor, mixed: Tensor) -> Tensor:
    """`mixed_gumbel` with keys on the device: seeds, positions int64 [B], both below 2^32; mixed [V] -> [B, V]."""
    state = torch.full_like(seeds, _signed(_GOLDEN), dtype=torch.int32)
    for word in (seeds, torch.full_like(seeds, purpose), positions):
        # its low half, then its high one: 0, and so is the mix of that
        state = mix_words((state ^ mixed_ids(word)).add_(_signed(_GOLDEN)))
        state = mix_words(state.add_(_signed(_GOLDEN)))
    return to_gumbel(mix_words(state[:, None] ^ mixed).long().bitwise_and_(_MASK))


def vocabulary_gumbel(seed: int, purpose: Purpose, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """`gumbel` of every id below vocab_size."""
    return mixed_gumbel(seed, purpose, position, _mixed_vocabulary(vocab_size, device))


@lru_cache(maxsize=4)
def _mixed_vocabulary(vocab_size: int, device: torch.device) -> Tensor:
    return mixed_ids(torch.arange(vocab_size, device=device))


def to_gumbel(integers: Tensor) -> Tensor:
    """Gumbel noise of uniform 32-bit integers: G = -log(-log(1 - u)).

    u and 1 - u have one law; this side of it keeps float32's full precision where argmax looks, at large G.
    """
    return to_uniform(integers).neg_().log1p_().neg_().log_().neg_()
