"""Bytes and flops of each op on paper: what it must spend, and what its Triton kernel spends.

Must: every input that the result depends on is read once, every output written once. Spent: the kernel as launched,
counting all that its programs ask for, whether a cache answers or not. Index arithmetic and comparisons are no flops.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from eagle3_kernels.bits import words


@dataclass(frozen=True)
class Model:
    """A target and its head; the defaults are Llama-3.1-8B's in bfloat16."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    vocab: int = 128256
    draft_vocab: int = 32000
    captured: int = 3
    value_bytes: int = 2

    @property
    def kv_row_bytes(self) -> int:
        """A row's keys and values of one layer."""
        return 2 * self.kv_heads * self.head_dim * self.value_bytes


@dataclass(frozen=True)
class Round:
    """One round: B slots with `context` committed rows and a tree of `nodes` below each root."""

    batch: int
    nodes: int
    context: int
    depth: int
    top_k: int
    page_size: int = 16

    @property
    def rows(self) -> int:
        return self.nodes + 1

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2


# a tree of 8 and one of 60, as their depths and widths are usually chosen
TREES = {8: (4, 4), 60: (6, 10)}
PAPER = [Round(batch, nodes, 8192, *TREES[nodes]) for batch, nodes in product((1, 32), (8, 60))]


class Cost(NamedTuple):
    bytes: float
    flops: float = 0.0


class Traffic(NamedTuple):
    """One op in one round: `times` it runs per round, and the cost of one run."""

    op: str
    times: int
    must: Cost
    spent: Cost


def capture_copy(model: Model, x: Round) -> Traffic:
    """Rows of one layer, in and out."""
    cost = Cost(2 * x.batch * x.rows * model.hidden * model.value_bytes)
    return Traffic("capture_copy", model.captured, cost, cost)


def expand_level(model: Model, x: Round) -> Traffic:
    """A full frontier: fp32 keys [B, K, V], then K of K * K candidates."""
    from eagle3_kernels import ordering_kernel

    nodes, k = x.batch * x.top_k, x.top_k
    keys = nodes * model.draft_vocab * 4
    # tokens, parents int64, scores and edges fp32; the chosen int64
    level = nodes * k * (8 + 8 + 4 + 4) + nodes * 8
    _, parts = ordering_kernel.chunks(nodes, model.draft_vocab)
    # ranks int64 written and read again if the row is cut; the k best values looked up; edges and scores read again
    ranks = 2 * nodes * parts * k * 8 if parts > 1 else 0
    again = nodes * k * 4 + nodes * k * (4 + 4)
    return Traffic("expand_level", x.depth, Cost(keys + level), Cost(keys + level + ranks + again))


def build_tree(model: Model, x: Round) -> Traffic:
    """Candidates of all levels -> rows and links."""
    from eagle3_kernels.build_tree.kernel import LINK_BLOCK, ORDER_BLOCK

    candidates, frontiers = x.batch * x.candidates, x.batch * (x.depth - 1) * x.top_k * 8
    levels = candidates * (8 + 8 + 4 + 4) + frontiers
    # tokens, parent, position, links int32, source, scores and edges; masks
    tree = x.batch * x.rows * (5 * 4 + 3 * 4 + 4 * words(x.rows))
    looked = x.batch * x.nodes * (8 + 8 + 4 + 4 + 8)
    # a chosen candidate's parent is gathered per candidate; fields laid side by side; scores once per block
    laid = candidates * (8 + 5 * 4)
    order = x.batch * _ceil(x.candidates, ORDER_BLOCK) * x.candidates * 4 + candidates * (4 + 4)
    fill = x.batch * x.nodes * 7 * 4
    link = x.batch * _ceil(x.rows, LINK_BLOCK) * x.rows * 4 + x.batch * x.rows * (x.depth + 2) * 4
    must = Cost(candidates * 4 + looked + tree)
    return Traffic("build_tree", 1, must, Cost(levels + laid + order + fill + link + tree))


def tree_attention(model: Model, x: Round, processors: int = 132) -> Traffic:
    """One layer's verification; `processors` = multiprocessors of the GPU (H100: 132), which set the splits."""
    from eagle3_kernels.tree_attention import kernel as attention

    dtype = torch.float32 if model.value_bytes == 4 else torch.bfloat16
    group, dim = model.heads // model.kv_heads, model.head_dim
    rows = x.rows * group
    blocks = attention.choose_blocks(rows, dim, dim, dtype, rocm=False)
    tiles = _ceil(rows, blocks.tile)
    programs = x.batch * model.kv_heads * tiles
    reach = _ceil(x.context + x.rows, x.page_size) * x.page_size
    splits = attention.choose_splits(programs, min(rows, blocks.tile), reach, processors)
    queries = x.batch * x.rows * model.heads * dim * model.value_bytes
    keys = x.batch * (x.context + x.rows) * model.kv_row_bytes
    # each split's fp32 output and sum, written and read
    parts = 2 * splits * x.batch * x.rows * model.heads * (dim + 1) * 4 if splits > 1 else 0
    walked = (_ceil(x.context, blocks.keys) + _ceil(x.rows, blocks.keys)) * blocks.keys
    masks = programs * blocks.tile * words(x.rows) * 4
    pages = programs * walked * 4
    # a node sees the context and its ancestors, at most a path
    must = Cost(keys + 2 * queries, 4 * x.batch * x.rows * model.heads * dim * (x.context + x.depth + 1))
    spent = Cost(
        tiles * x.batch * walked * model.kv_row_bytes + (splits + 1) * queries + parts + masks + pages,
        4 * programs * blocks.tile * dim * walked,
    )
    return Traffic("tree_attention", model.layers, must, spent)


def sample_greedy(model: Model, x: Round) -> Traffic:
    """argmax of every row's logits."""
    return _sampled("sample_nodes greedy", model, x, passes=1)


def sample_noise(model: Model, x: Round) -> Traffic:
    """Temperature and keyed noise, made inside."""
    return _sampled("sample_nodes T=1", model, x, passes=1)


def sample_min_p(model: Model, x: Round) -> Traffic:
    """min-p needs the row's largest logit before it can drop any."""
    return _sampled("sample_nodes min-p", model, x, passes=2)


def _sampled(name: str, model: Model, x: Round, passes: int) -> Traffic:
    from eagle3_kernels.sample_nodes import kernel as sampling

    rows = x.batch * x.rows
    logits = rows * model.vocab * model.value_bytes
    chunks = _ceil(model.vocab, sampling.BLOCK)
    parts = max(1, min(chunks, sampling.PROGRAMS // rows))
    return Traffic(name, 1, Cost(logits + rows * 8), Cost(passes * (logits + 2 * rows * parts * 8) + rows * 12))


def verify_match(model: Model, x: Round) -> Traffic:
    """Tokens, parents and targets int32 (int64) of every row -> a path."""
    cost = Cost(x.batch * x.rows * (4 + 4 + 8) + x.batch * (x.depth + 3) * 4)
    return Traffic("verify_tree match", 1, cost, cost)


def verify_target_only(model: Model, x: Round) -> Traffic:
    """A walk to the deepest level: p of the children on the way, and the row that the last token is drawn from.

    The kernel sums the rest of every row on the way, as the reference does: no mass is the difference of larger ones.
    """
    row, children = model.vocab * 4, x.depth * x.top_k * 4
    small = x.batch * x.rows * 8 + x.batch * (x.depth + 3) * 4
    must, spent = (Cost(x.batch * (n * row + children) + small) for n in (1, x.depth + 1))
    return Traffic("verify_tree target_only", 1, must, spent)


def relocate_kv(model: Model, x: Round) -> Traffic:
    """Every row of a full path moves, in every layer."""
    cost = Cost(2 * model.layers * x.batch * x.depth * model.kv_row_bytes)
    return Traffic("relocate_kv", 1, cost, cost)


def gather_first_step(model: Model, x: Round) -> Traffic:
    """Path int32, tokens int32 -> rows int64, tokens int32; the kernel reads the path twice, shifted by one."""
    cost = Cost(x.batch * (x.depth + 1) * (4 + 4 + 8 + 4) + x.batch * (4 + 4 + 8 + 4))
    return Traffic("gather_first_step", 1, cost, Cost(cost.bytes + x.batch * x.depth * 4))


OPS = {
    op.__name__: op
    for op in (
        capture_copy,
        tree_attention,
        sample_greedy,
        sample_noise,
        sample_min_p,
        verify_match,
        verify_target_only,
        relocate_kv,
        gather_first_step,
        expand_level,
        build_tree,
    )
}


def paper_table() -> Iterator[str]:
    """kernels/README.md's table: per run of an op, bytes and flops that it must spend and that its kernel spends."""
    yield "| op | batch | nodes | runs per round | must read and write | spends | must compute | computes |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for op, x in product(OPS.values(), PAPER):
        name, times, must, spent = op(Model(), x)
        cells = (
            name,
            x.batch,
            x.nodes,
            times,
            *(f"{amount(c.bytes)}B" for c in (must, spent)),
            *map(_flops, (must, spent)),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def amount(number: float) -> str:
    """Three digits and a decimal prefix."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} "


def _flops(cost: Cost) -> str:
    return f"{amount(cost.flops)}flop" if cost.flops else "-"


def _ceil(size: int, part: int) -> int:
    return -(-size // part)
