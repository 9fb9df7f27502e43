"""Rows of bits as int32 words: bit j of a row is bit j % 32 of word j // 32; bit 31 is the sign bit."""

import torch
from torch import Tensor

WORD = 32


def words(bits: int) -> int:
    """Words that hold `bits` bits."""
    return (bits + WORD - 1) // WORD


def pack_bits(flags: Tensor) -> Tensor:
    """Bool [..., n] -> int32 [..., ceil(n / 32)]."""
    n = flags.shape[-1]
    padded = torch.nn.functional.pad(flags.to(torch.int64), (0, words(n) * WORD - n))
    weights = torch.ones(WORD, dtype=torch.int64, device=flags.device) << torch.arange(WORD, device=flags.device)
    packed = (padded.unflatten(-1, (-1, WORD)) * weights).sum(-1)
    # two's complement: bit 31 makes the word negative
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Int32 [..., W] -> bool [..., n], n <= 32 * W."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :n].to(torch.bool)
