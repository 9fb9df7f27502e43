"""The standard fixture: a head trained for seconds on the very replies it will draft, so that drafts are accepted.

Deterministic, fp32, on tiny random targets; made once per process and set of arguments.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import build_vocab_map
from eagle3_train.batches import PackedBatch, pack, supervise
from eagle3_train.config import TTTConfig
from eagle3_train.evaluate import Counts, Tally
from eagle3_train.features import Features
from eagle3_train.ttt import TTTBatch, TTTOutput, TTTRollout
from oracles.tiny import greedy, tiny_target


@dataclass(frozen=True)
class Overfit:
    """A target, its head, and greedy replies [ids] to prompts [ids] that the head knows."""

    target: Target
    head: Eagle3Head
    prompts: list[list[int]]
    replies: list[list[int]]

    @property
    def batch(self) -> PackedBatch:
        return packed(self.prompts, self.replies)


@lru_cache(maxsize=8)
def overfit(
    family: str = "llama",
    prompts: int = 4,
    new_tokens: int = 40,
    draft_vocab_size: int = 80,
    optimizer_steps: int = 80,
    ttt_steps: int = 4,
    seed: int = 0,
    **options: Any,
) -> Overfit:
    """Train a head on the target's own greedy replies.

    Args:
        draft_vocab_size: smaller than the tokens that occur by default is fine: then some are never drafted.
        options: of the head, as HeadOptions.
    """
    target = tiny_target(family, seed)
    asked = random_prompts(target, prompts, seed)
    replies = [greedy(target, prompt, new_tokens) for prompt in asked]
    batch = packed(asked, replies)
    head = mapped_head(target, batch, draft_vocab_size, seed, **options)
    train(target, head, batch, optimizer_steps, ttt_steps)
    return Overfit(target, head.eval().requires_grad_(False), asked, replies)


def random_prompts(target: Target, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 4, 5, ... random tokens."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, target.usable_vocab, (4 + i,), generator=draw).tolist() for i in range(count)]


def packed(prompts: list[list[int]], replies: list[list[int]]) -> PackedBatch:
    rows = [
        {"input_ids": prompt + reply, "span_ids": [0] * len(prompt) + [1] * len(reply)}
        for prompt, reply in zip(prompts, replies, strict=True)
    ]
    return pack(rows)


def mapped_head(target: Target, batch: PackedBatch, draft_vocab_size: int, seed: int = 0, **options: Any) -> Eagle3Head:
    """A fresh head whose draft vocabulary holds the batch's most frequent supervised tokens."""
    counts = batch.ids[batch.span_ids != 0].bincount(minlength=target.vocab_size)
    vocab_map = build_vocab_map(counts, draft_vocab_size, target.eos_ids, target.usable_vocab)
    return Eagle3Head.for_target(target, vocab_map, HeadOptions(**options), seed)


def train(target: Target, head: Eagle3Head, batch: PackedBatch, optimizer_steps: int, ttt_steps: int) -> None:
    rollout = TTTRollout(head, TTTConfig(decay=1.0))
    inputs = Features(target, head, len(batch.ids)).prepare(batch, supervise(batch, head.t2d, ttt_steps))
    counts = inputs.supervision.counted.sum(1).float()
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, optimizer_steps)
    for _ in range(optimizer_steps):
        rollout(inputs, counts).loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def simulate(target: Target, head: Eagle3Head, batch: PackedBatch, steps: int) -> tuple[Counts, TTTBatch, TTTOutput]:
    """Simulated tau of a chain of `steps` drafts over the batch's replies."""
    inputs = Features(target, head, len(batch.ids)).prepare(batch, supervise(batch, head.t2d, steps))
    output = TTTRollout(head)(inputs, torch.ones(steps))
    tally = Tally(steps)
    tally.add(inputs, output)
    return tally.counts(), inputs, output
