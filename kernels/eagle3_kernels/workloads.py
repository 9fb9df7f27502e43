"""Inputs of every op at a model's shapes, and torch's own ways to the same result; what the benchmark runs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from eagle3_kernels.bits import unpack_bits
from eagle3_kernels.build_tree import build_tree
from eagle3_kernels.capture_copy import capture_copy
from eagle3_kernels.expand_level import expand_level
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.sample_nodes import greedy_nodes, sample_rows
from eagle3_kernels.structures import Level, Tree, Walk
from eagle3_kernels.traffic import Model, Round
from eagle3_kernels.tree_attention import TreeView, tree_attention
from eagle3_kernels.verify_tree import TARGET_ONLY, verify_sampled, verify_tree


class Place(NamedTuple):
    """Where and in which numbers inputs are made."""

    device: torch.device
    dtype: torch.dtype
    model: Model
    round: Round

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)


class Work(NamedTuple):
    """An op on its inputs, through its dispatch, and torch's own ways to the same result, if it has any."""

    run: Callable[[], Any]
    own: dict[str, Callable[[], Any]]


def draft_levels(at: Place) -> list[Level]:
    """Levels of random drafts, grown as the engine grows them; sharp ones, so that the trees reach the last level."""
    x, scores, levels = at.round, torch.zeros(at.round.batch, 1, device=at.device), []
    for _ in range(x.depth):
        keys = (8 * at.random(x.batch, scores.shape[1], 64, dtype=torch.float32)).log_softmax(-1)
        levels.append(expand_level(keys, scores, x.top_k))
        scores = levels[-1].frontier_scores
    return levels


def draft_tree(at: Place) -> Tree:
    roots = torch.zeros(at.round.batch, dtype=torch.int64, device=at.device)
    return build_tree(roots, draft_levels(at), at.round.nodes)


def page_table(at: Place, rows: int) -> Tensor:
    """Pages of slots with that many rows, scattered over the pool."""
    per_slot = -(-rows // at.round.page_size)
    pages = torch.randperm(at.round.batch * per_slot, device=at.device)
    return pages.view(at.round.batch, per_slot).int()


def full_walk(at: Place) -> Walk:
    """Every level accepted, each row but the root's away from its place."""
    x = at.round
    path = (2 * torch.arange(x.depth + 1, device=at.device)).clamp(max=x.nodes).int().repeat(x.batch, 1)
    full = torch.full((x.batch,), x.depth, dtype=torch.int32, device=at.device)
    return Walk(path, full, full)


def work_capture_copy(at: Place) -> Work:
    rows = at.round.batch * at.round.rows
    hidden, out = at.random(rows, at.model.hidden), at.random(rows, at.model.captured * at.model.hidden)
    return Work(lambda: capture_copy(hidden, out, 1), {})


def work_tree_attention(at: Place) -> Work:
    model, x, tree = at.model, at.round, draft_tree(at)
    table = page_table(at, x.context + x.rows)
    keys, values = (at.random(table.numel(), x.page_size, model.kv_heads, model.head_dim) for _ in range(2))
    query = at.random(x.batch, x.rows, model.heads, model.head_dim)
    lens = torch.full((x.batch,), x.context, dtype=torch.int32, device=at.device)
    view = TreeView(table, lens, tree.position, tree.ancestor_mask, x.rows)
    scaling = model.head_dim**-0.5
    return Work(
        lambda: tree_attention(query, keys, values, view, scaling),
        dense_attention(at, tree, query, keys, values, table),
    )


def dense_attention(at: Place, tree: Tree, query: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> dict:
    """SDPA and FlexAttention over the same keys laid side by side: the copy to get there is not counted."""
    x, rows, kv_heads = at.round, at.round.context + at.round.rows, at.model.kv_heads
    own = unpack_bits(tree.ancestor_mask, x.rows)
    seen = torch.cat([own.new_ones(x.batch, x.rows, x.context), own], -1)[:, None]
    keys, values = (p[table.long()].flatten(1, 2)[:, :rows].transpose(1, 2).contiguous() for p in (keys, values))
    query = query.transpose(1, 2).contiguous()
    group = query.shape[1] // kv_heads
    # a group's heads as rows over the same keys: SDPA's fused kernels take no mask with enable_gqa
    folded, mask = query.unflatten(1, (kv_heads, group)).flatten(2, 3), seen.repeat(1, 1, group, 1)

    def sdpa() -> Tensor:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return out.unflatten(2, (group, x.rows)).flatten(1, 2).transpose(1, 2)

    def visible(b, h, q, k):
        return (k < x.context) | own[b, q, (k - x.context).clamp(min=0, max=x.rows - 1)]

    blocks = create_block_mask(visible, x.batch, None, x.rows, rows, device=str(at.device))
    # compiled for a GPU only: its formula is what a CPU checks
    flex: Any = torch.compile(flex_attention, dynamic=False) if at.device.type == "cuda" else flex_attention
    return {
        "SDPA": sdpa,
        "FlexAttention": lambda: flex(query, keys, values, block_mask=blocks, enable_gqa=True).transpose(1, 2),
    }


def work_sample(at: Place, kind: str) -> Work:
    rows = at.round.batch * at.round.rows
    logits = at.random(rows, at.model.vocab)
    if kind == "greedy":
        return Work(lambda: greedy_nodes(logits, checked=False), {"argmax": lambda: logits.argmax(-1)})
    heat, share = (torch.full((rows,), value, device=at.device) for value in (0.8, 0.05))
    seeds, positions = torch.arange(2 * rows, device=at.device).chunk(2)
    min_p = share if kind == "min-p" else None
    return Work(
        lambda: sample_rows(logits, heat, seeds, positions, min_p),
        # other noise, drawn by torch: what a sampler without keys would do
        {"softmax + exponential": lambda: exponential_race(logits, heat)} if min_p is None else {},
    )


def exponential_race(logits: Tensor, temperature: Tensor) -> Tensor:
    p = (logits.float() / temperature[:, None]).softmax(-1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


def wanted_tokens(tree: Tree) -> Tensor:
    """A target's token after every row [B, N] that leads down each slot's longest path; 0 off the path."""
    wanted = torch.zeros_like(tree.tokens, dtype=torch.int64)
    for slot in range(len(wanted)):
        path = max(tree.paths(slot).tolist(), key=lambda rows: sum(row >= 0 for row in rows))
        rows = [row for row in path if row >= 0]
        wanted[slot, rows[:-1]] = tree.tokens[slot, rows[1:]].long()
    return wanted


def work_verify_match(at: Place) -> Work:
    tree = draft_tree(at)
    target = wanted_tokens(tree)
    return Work(lambda: verify_tree(tree, target), {})


def work_verify_target_only(at: Place) -> Work:
    tree, x = draft_tree(at), at.round
    p = at.random(x.batch, x.rows, at.model.vocab, dtype=torch.float32).softmax(-1)
    # the longest path is accepted, so every level is visited
    p.mul_(1e-6).scatter_(2, wanted_tokens(tree)[..., None], 1 - 1e-6)
    seeds, positions = (torch.arange(x.batch, device=at.device) for _ in range(2))
    return Work(lambda: verify_sampled(tree, p, seeds, positions, TARGET_ONLY), {})


def work_relocate_kv(at: Place) -> Work:
    model, x = at.model, at.round
    # the committed rows stay where they are: any context will do
    table = page_table(at, 64 + x.rows)
    pools = [at.random(model.layers, table.numel(), x.page_size, model.kv_heads, model.head_dim) for _ in range(2)]
    lens = torch.full((x.batch,), 61, dtype=torch.int32, device=at.device)
    path = full_walk(at).path
    return Work(lambda: relocate_kv(pools, table, lens, path), {})


def work_gather_first_step(at: Place) -> Work:
    tree, walk = draft_tree(at), full_walk(at)
    starts = at.round.rows * torch.arange(at.round.batch, device=at.device)
    return Work(lambda: gather_first_step(tree, walk, starts), {})


def work_expand_level(at: Place) -> Work:
    x = at.round
    keys = at.random(x.batch, x.top_k, at.model.draft_vocab, dtype=torch.float32).log_softmax(-1)
    scores = at.random(x.batch, x.top_k, dtype=torch.float32).clamp(max=0)
    return Work(lambda: expand_level(keys, scores, x.top_k), {"topk": lambda: keys.topk(x.top_k)})


def work_build_tree(at: Place) -> Work:
    levels, roots = draft_levels(at), torch.zeros(at.round.batch, dtype=torch.int64, device=at.device)
    return Work(lambda: build_tree(roots, levels, at.round.nodes), {})


WORKS: dict[str, Callable[[Place], Work]] = {
    "capture_copy": work_capture_copy,
    "tree_attention": work_tree_attention,
    "sample_greedy": partial(work_sample, kind="greedy"),
    "sample_noise": partial(work_sample, kind="noise"),
    "sample_min_p": partial(work_sample, kind="min-p"),
    "verify_match": work_verify_match,
    "verify_target_only": work_verify_target_only,
    "relocate_kv": work_relocate_kv,
    "gather_first_step": work_gather_first_step,
    "expand_level": work_expand_level,
    "build_tree": work_build_tree,
}
