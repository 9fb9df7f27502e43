"""A target with its tokenizer and a head that knows its replies to three prompts, on disk as users have them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.checkpoint.reference import save_head
from eagle3.target import Target
from oracles.overfit import mapped_head, packed, train
from oracles.tiny import greedy, tiny_folder

PROMPTS = ["Once", "A longer prompt", "x"]
TOKENS = 24
# all but ASCII's letters, digits and signs: the tokenizer's lowest 94 ids
UNPRINTABLE = list(range(94, 300))


def save_pair(home: Path) -> Path:
    """`home`, with the target in target/ and the head in head/."""
    target = Target.load(tiny_folder(home / "target"))
    asked = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    batch = packed(asked, [greedy(target, prompt, TOKENS) for prompt in asked])
    head = mapped_head(target, batch, 80)
    train(target, head, batch, optimizer_steps=40, ttt_steps=3)
    save_head(home / "head", head, torch.float32)
    return home


def encode(tokenizer: Any, *texts: str) -> dict[str, Tensor]:
    return tokenizer(list(texts), return_tensors="pt", padding=True)
