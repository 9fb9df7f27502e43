"""Bytes and flops of the training ops on paper, as traffic.py has the engine's: what they must spend and do spend."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle3_kernels.traffic import Cost, Model, amount


@dataclass(frozen=True)
class Packed:
    """A batch of a rollout: documents of equal length, the last `share` of each supervised, seen at TTT step `step`."""

    documents: int
    length: int
    step: int
    share: float = 0.6

    @property
    def tokens(self) -> int:
        return self.documents * self.length

    def rows(self) -> torch.Tensor:
        """The supervised rows, int64."""
        first = self.length - round(self.share * self.length)
        inside = torch.arange(first, self.length)
        return (self.length * torch.arange(self.documents)[:, None] + inside).flatten()

    @property
    def pairs(self) -> int:
        """Queries and the step-0 keys that they see."""
        return int((self.rows() % self.length + 1).sum())


class TrainingTraffic(NamedTuple):
    """One op on one batch."""

    op: str
    must: Cost
    spent: Cost


PACKED = [Packed(1, 8192, 3), Packed(8, 1024, 3)]


def ttt_forward(model: Model, x: Packed) -> TrainingTraffic:
    """Queries, keys and values in, the output and fp32 sums out; a tile's keys once per query head."""
    from eagle3_kernels.ttt_attention.kernel import choose_plan

    blocks, sizes = choose_plan(model.head_dim, model.head_dim, _dtype(model), False).forward, _Sizes.of(model, x)
    walked = model.heads * _walked(x, blocks.queries, blocks.keys)
    must = Cost(2 * sizes.queries + 2 * sizes.keys + 2 * sizes.own + sizes.sums, 4 * sizes.flops)
    # queries, own keys and values, bounds; step-0 keys and values
    loaded = _whole(sizes.count, blocks.queries) * model.heads * ((1 + 2 * x.step) * sizes.row + 8)
    spent = Cost(
        loaded + 2 * walked * sizes.row + sizes.queries + sizes.sums, 4 * model.head_dim * walked * blocks.queries
    )
    return TrainingTraffic("ttt_attention forward", must, spent)


def ttt_backward(model: Model, x: Packed) -> TrainingTraffic:
    """All inputs, the output and its gradient in, five gradients out: 5 products of scores' size, 7 as launched."""
    from eagle3_kernels.ttt_attention.kernel import choose_plan

    plan, sizes = choose_plan(model.head_dim, model.head_dim, _dtype(model), False), _Sizes.of(model, x)
    must = Cost(4 * sizes.queries + 4 * sizes.keys + 4 * sizes.own + sizes.sums, 10 * sizes.flops)
    walked = model.heads * _walked(x, plan.d_query.queries, plan.d_query.keys)
    # query, gradient and output, own keys and values, sums and bounds in; its gradient and delta out
    queries = _whole(sizes.count, plan.d_query.queries) * model.heads * ((3 + 2 * x.step) * sizes.row + 12)
    queries += 2 * walked * sizes.row + sizes.queries + sizes.sums
    seen = model.heads * _seen(x, plan.d_key.queries, plan.d_key.keys) * plan.d_key.queries
    # a block's keys and values in, their gradients out; queries, their gradient, sums, delta and bounds of all heads
    keys = 2 * _whole(x.tokens, plan.d_key.keys) * model.kv_heads * sizes.row + 2 * sizes.keys
    keys += seen * (2 * sizes.row + 16)
    tiles = x.step * _whole(sizes.count, plan.d_own.queries)
    own = tiles * (model.heads * (2 * sizes.row + 8) + 2 * model.kv_heads * sizes.row) + 2 * sizes.own
    flops = 6 * walked * plan.d_query.queries + 8 * seen * plan.d_key.keys
    return TrainingTraffic("ttt_attention backward", must, Cost(queries + keys + own, model.head_dim * flops))


def draft_loss(model: Model, x: Packed) -> TrainingTraffic:
    """Rows of all steps up to x.step: hidden states, lm_head and teacher in, their two gradients out; three products.

    Spent: also the logits, chunk by chunk, and the weight's gradient, which every chunk adds to.
    """
    from eagle3_kernels.draft_loss.fused import GPU_CHUNK

    entries, weight = len(x.rows()), model.draft_vocab * model.hidden
    rows = (x.step + 1) * entries
    hidden, teacher = rows * model.hidden * model.value_bytes, entries * model.draft_vocab * model.value_bytes
    flops = 6 * rows * weight
    must = Cost(2 * hidden + weight * (model.value_bytes + 4) + teacher + rows * 16, flops)
    chunks = -(-rows // max(1, GPU_CHUNK // model.draft_vocab))
    logits = rows * model.draft_vocab * model.value_bytes
    # of each chunk: the weight twice; in half precision the product of its gradient, written, read and added
    weights = (
        chunks * weight * (2 * model.value_bytes + 2 * 4 + (2 * model.value_bytes if model.value_bytes < 4 else 0))
    )
    # h twice, its gradient; logits written, twice read as an operand
    products = 3 * hidden + 3 * logits + weights
    return TrainingTraffic("draft_loss", must, Cost(products + loss_rows_bytes(model, rows), flops))


def loss_rows_bytes(model: Model, rows: int) -> float:
    """The kernel of the rows with soft_ce: logits and teacher twice, the gradient once, some numbers per row."""
    return rows * (5 * model.draft_vocab * model.value_bytes + 8 + 4 + 4 + 4 + 8 + 4)


TRAINING_OPS = {op.__name__: op for op in (ttt_forward, ttt_backward, draft_loss)}
# documents are nothing to the loss
BATCHES = {"ttt_forward": PACKED, "ttt_backward": PACKED, "draft_loss": PACKED[1:]}


class _Sizes(NamedTuple):
    """Queries; bytes: a head's row, all queries, step-0 keys, own keys, fp32 numbers; half the flops of a product."""

    count: int
    row: int
    queries: int
    keys: int
    own: int
    sums: int
    flops: int

    @classmethod
    def of(cls, model: Model, x: Packed) -> "_Sizes":
        row, count = model.head_dim * model.value_bytes, len(x.rows())
        return cls(
            count,
            row,
            model.heads * count * row,
            model.kv_heads * x.tokens * row,
            x.step * model.kv_heads * count * row,
            model.heads * count * 4,
            model.heads * model.head_dim * (x.pairs + count * x.step),
        )


def _whole(count: int, tile: int) -> int:
    """Rows that whole tiles load."""
    return -(-count // tile) * tile


def _walked(x: Packed, tile: int, block: int) -> int:
    """Keys that all query tiles of one head walk, whole blocks."""
    rows, total = x.rows(), 0
    for first in range(0, len(rows), tile):
        at = rows[first : first + tile]
        low = int(at[0]) // x.length * x.length
        total += _whole(int(at[-1]) + 1 - low, block)
    return total


def _seen(x: Packed, tile: int, block: int) -> int:
    """Query tiles that all key blocks of one head walk."""
    rows, total = x.rows(), 0
    lows = rows // x.length * x.length
    for first in range(0, x.tokens, block):
        start = int(torch.searchsorted(rows, first))
        stop = int(torch.searchsorted(lows, first + block))
        total += max(0, -(-(stop - start) // tile))
    return total


def _dtype(model: Model) -> torch.dtype:
    return torch.float32 if model.value_bytes == 4 else torch.bfloat16


def training_table() -> Iterator[str]:
    """kernels/README.md's second table."""
    yield "| op | documents | tokens | must read and write | spends | must compute | computes |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for key, op in TRAINING_OPS.items():
        for x in BATCHES[key]:
            name, must, spent = op(Model(), x)
            costs = [f"{amount(c.bytes)}B" for c in (must, spent)] + [f"{amount(c.flops)}flop" for c in (must, spent)]
            yield f"| {' | '.join(map(str, (name, x.documents, x.tokens, *costs)))} |"
