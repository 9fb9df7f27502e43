"""An engine that checks itself after every round, and heads whose acceptance a test chooses. Slow, obviously right."""

import random
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.attention import DenseCausal
from eagle3.capture import Capture
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3.vocab import VocabMap, identity_map
from eagle3_infer.adaptive import Controller
from eagle3_infer.engine import Engine
from eagle3_infer.kv import Block, KVPool, KVShape, PagedContext, probe_shapes
from eagle3_infer.running import Running
from oracles.tiny import tiny_model


def shifted_target(family: str = "llama", seed: int = 0, **changes: Any) -> Target:
    """A tiny target whose norms and biases are far from their neutral defaults."""
    model = tiny_model(family, seed, **changes)
    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    return Target(model)


def lower(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in `dtype`, buffers (rotary tables) as they are: how transformers loads a checkpoint."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def random_head(target: Target, draft_vocab_size: int | None = None, seed: int = 0) -> Eagle3Head:
    """An untrained head; with a draft vocabulary, one of random ids in random order."""
    if draft_vocab_size is None:
        vocab_map = identity_map(target.vocab_size)
    else:
        ids = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size]
        members = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        vocab_map = VocabMap(ids - torch.arange(draft_vocab_size), members)
    return Eagle3Head.for_target(target, vocab_map, seed=seed).requires_grad_(False)


class KnowingHead(Eagle3Head):
    """A real head that also favours the tokens of a known output, but only at a share of the positions.

    Its outputs carry their position in column 0, which is all that its logits need.
    """

    def __init__(self, head: Eagle3Head, known: list[int], share: float, seed: int = 0):
        assert head.draft_vocab_size == head.config.vocab_size
        nn.Module.__init__(self)
        self.__dict__.update(head.__dict__)
        self.known = torch.tensor(known)
        self.knows = torch.rand(len(known), generator=torch.Generator().manual_seed(seed)) < share

    def step(self, h: Tensor, embeds: Tensor, positions: Tensor, ctx, query_rows: Tensor | None = None) -> Tensor:
        out = super().step(h, embeds, positions, ctx, query_rows)
        asked = positions if query_rows is None else positions[query_rows]
        return torch.cat([asked[:, None].to(out.dtype), out[:, 1:]], 1)

    def logits(self, h: Tensor) -> Tensor:
        logits = super().logits(h)
        # the row at position p predicts the token at p + 2
        at = (h[..., 0].long() + 2).clamp(max=len(self.known) - 1)
        favour = self.knows[at].unsqueeze(-1) * 20.0
        return logits.scatter_add(-1, self.known[at].unsqueeze(-1), favour.to(logits.dtype))


class CheckedEngine(Engine):
    """After every step, both pools of every request in a slot equal a fresh prefill of its committed tokens."""

    def step(self, waiting):
        touched = super().step(waiting)
        for sequence in self.running:
            assert sequence.length == len(sequence.tokens) - 1
        for sequence in (*self.running, *self.scheduler.reading):
            unread = sum(len(part) for part in sequence.backlog)
            assert sequence.length == sequence.head_length + unread if self.drafter else not unread
            if sequence.length:
                self.check_pools(sequence)
        return touched

    def check_pools(self, sequence: Running) -> None:
        document = sequence.tokens[: sequence.length]
        features, target_pool = fresh_prefill(self.target, document, self.verifier.capture.layers)
        same_rows(self.pools[0], target_pool, sequence.slot, sequence.length)
        if self.drafter is None or features is None:
            return
        if sequence.backlog:
            torch.testing.assert_close(
                torch.cat(sequence.backlog), features[sequence.head_length :], rtol=1e-3, atol=1e-4
            )
        if sequence.head_length:
            following = sequence.tokens[: sequence.head_length + 1]
            pool = fresh_head_prefill(self.target, self.drafter.head, features[: sequence.head_length], following)
            same_rows(self.pools[1], pool, sequence.slot, sequence.head_length)


class Whim(Controller):
    """Decides by dice: plain stretches with backlogs, any depth, any number of nodes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dice, self.plain_rounds, self.caught_up = random.Random(4), 0, 0

    def speculate(self, useful, pending):
        super().speculate(useful, pending)
        drafts = self.dice.random() < 0.4 and max(useful) > 0
        self.plain_rounds += not drafts
        self.caught_up = max(self.caught_up, pending if drafts else 0)
        return drafts

    def deepen(self, scores):
        return self.dice.random() < 0.7

    def pick(self, scores):
        super().pick(scores)
        return torch.tensor([self.dice.randint(0, self.tree.nodes) for _ in range(len(scores[0]))])


def whimsical(monkeypatch) -> list[Whim]:
    """Engines decide by dice from now on; the controllers that they make."""
    made: list[Whim] = []

    def make(*args, **kwargs):
        made.append(Whim(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("eagle3_infer.engine.Controller", make)
    return made


def fresh_prefill(target: Target, tokens: list[int], layers: tuple[int, ...]) -> tuple[Tensor | None, KVPool]:
    """True features and K/V rows of a document."""
    rows = torch.arange(len(tokens))
    pool, ctx = one_document(target_shapes(target), len(tokens))
    capture = Capture(target, layers, len(tokens))
    with capture.rows(len(tokens)):
        target.hidden(torch.tensor(tokens), rows, ctx)
    return (capture.features.clone() if layers else None), pool


def fresh_head_prefill(target: Target, head: DraftHead, features: Tensor, tokens: list[int]) -> KVPool:
    rows = torch.arange(len(tokens) - 1)
    inputs = head.start(features), head.embed(torch.tensor(tokens[1:]), target), rows
    pool, ctx = one_document(probe_shapes(lambda ctx: head.step(*inputs, ctx))[0], len(rows))
    head.step(*inputs, ctx)
    return pool


def same_rows(pool: KVPool, fresh: KVPool, slot: int, length: int) -> None:
    for layer in range(fresh.layers):
        ours, true = pool.rows(layer, slot, length), fresh.rows(layer, 0, length)
        torch.testing.assert_close(ours, true, rtol=1e-3, atol=1e-4)


def target_shapes(target: Target) -> list[KVShape]:
    one = torch.zeros(1, dtype=torch.int64)
    return probe_shapes(lambda ctx: target.hidden(one, one, ctx))[0]


def one_document(shapes: list[KVShape], length: int) -> tuple[KVPool, PagedContext]:
    """A pool of one slot and the context of its causal prefill."""
    pool, rows = KVPool(shapes, slots=1, pages=1, page_size=length), torch.arange(length)
    pool.assign(0, length)
    return pool, PagedContext(pool, [Block(pool.view([0], [0], rows[None]), length)])


def dense_logits(target: Target, tokens: list[int]) -> Tensor:
    """Logits [T, V] of a document by the formula, no K/V kept."""
    rows = torch.arange(len(tokens))
    return target.logits(target.hidden(torch.tensor(tokens), rows, DenseCausal([len(tokens)], plain=True)))
