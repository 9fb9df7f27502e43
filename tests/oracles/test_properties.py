"""Properties by hypothesis: random trees, tied and saturated drafts, and whole runs of mixed requests.

Ops are compared with brute force on host lists, runs with plain decoding cut at the stop. Deterministic and bounded.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import VocabMap, identity_map
from eagle3_infer.config import DRAFT_NOISES, EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from eagle3_kernels.bits import unpack_bits
from eagle3_kernels.build_tree import build_tree, link_tree
from eagle3_kernels.expand_level import expand_level
from eagle3_kernels.structures import Level, Tree
from eagle3_kernels.verify_tree import verify_tree
from oracles.drafted import draw_log_q
from oracles.invariants import CheckedEngine, KnowingHead, shifted_target
from oracles.overfit import random_prompts
from oracles.tiny import greedy

quick = settings(max_examples=80, deadline=None, derandomize=True)
KINDS = ["random", "tied", "saturated", "all zero"]
WEIGHTS = [0.1, 0.25, 1.0, 3.0, 10.0]


# trees of any shape

# row r of a slot hangs below row `draw % r`: every tree whose parents come before their children
parents_of_a_slot = st.lists(st.integers(0, 10**6), max_size=75).map(
    lambda draws: [-1, *(draw % row for row, draw in enumerate(draws, start=1))]
)


def linked(parents: list[list[int]]) -> Tree:
    """Trees with these parents, padded to one size; token = row."""
    n = max(map(len, parents))
    padded = torch.tensor([slot + [-1] * (n - len(slot)) for slot in parents])
    scores = torch.arange(0, -n, -1.0).expand(len(parents), -1)
    tokens = torch.arange(n).expand(len(parents), -1)
    return link_tree(torch.tensor([len(slot) for slot in parents]), tokens, padded, scores, depth=n)


def root_path(parent: list[int], row: int) -> list[int]:
    return [row] if parent[row] < 0 else [*root_path(parent, parent[row]), row]


@quick
@given(st.lists(parents_of_a_slot, min_size=1, max_size=4))
def test_links_masks_positions_and_paths_follow_from_the_parents(parents):
    tree = linked(parents)
    assert tree.used_parents() == parents
    for slot, parent in enumerate(parents):
        n = tree.tokens.shape[1]
        chains = {row: root_path(parent, row) for row in range(len(parent))}
        seen = unpack_bits(tree.ancestor_mask[slot], n)
        for row in range(n):
            chain = chains.get(row, [row])
            assert sorted(seen[row].nonzero().flatten().tolist()) == sorted(chain)
            assert int(tree.position[slot, row]) == len(chain) - 1
            children = [child for child in range(1, len(parent)) if parent[child] == row]
            assert children_of(tree, slot, row) == children
        leaves = [chains[row] for row in chains if row not in parent]
        paths = tree.paths(slot).tolist()
        assert [[row for row in path if row >= 0] for path in paths] == leaves
        assert {len(path) for path in paths} == {max(map(len, leaves))}


def children_of(tree: Tree, slot: int, row: int) -> list[int]:
    rows, child = [], int(tree.first_child[slot, row])
    while child >= 0:
        rows.append(child)
        child = int(tree.next_sibling[slot, child])
    return rows


@quick
@given(st.lists(parents_of_a_slot, min_size=1, max_size=4), st.integers(0, 10**6))
def test_any_rule_walks_one_root_path_and_emits_its_token(parents, seed):
    """A rule that accepts whatever child it likes: the walk is the path that it chose, wherever it stops."""
    tree, draw, chosen = linked(parents), torch.Generator().manual_seed(seed), {}

    def decide(slot: int, row: int, level: int, children: list[int]) -> tuple[int, int]:
        which = int(torch.randint(-1, len(children), (1,), generator=draw))
        chosen.setdefault(slot, []).append((row, level, children, which))
        return which, children[which] if which >= 0 else 1000 + row

    walk = verify_tree(tree, decide)
    for slot, parent in enumerate(parents):
        path = [row for row in walk.path[slot].tolist() if row >= 0]
        assert path == root_path(parent, path[-1])
        assert int(walk.accepted[slot]) == len(path) - 1
        assert int(walk.bonus[slot]) == 1000 + path[-1]
        asked = chosen[slot]
        assert [(row, level) for row, level, *_ in asked] == [(row, level) for level, row in enumerate(path)]
        assert [children for _, _, children, _ in asked] == [children_of(tree, slot, row) for row in path]


# drafted trees


@st.composite
def drafts(draw) -> tuple[list[Level], int, Tensor, Tensor]:
    """Levels of some slots under a score policy; how many nodes, and what each slot allows (0 = a bare root)."""
    slots, depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    # often fewer tokens than children wanted
    vocab, weight = draw(st.integers(1, 8)), draw(st.sampled_from(WEIGHTS))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=depth, max_size=depth))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    scores, levels = torch.zeros(slots, 1), []
    for below_first, kind in enumerate(kinds):
        log_q = draw_log_q(kind, (slots, scores.shape[1], vocab), generator)
        levels.append(expand_level(log_q, scores, top_k, weigh=lambda edges, by=weight**below_first: edges * by))
        scores = levels[-1].frontier_scores
    per_slot = st.lists(st.integers(0, 8), min_size=slots, max_size=slots).map(torch.tensor)
    return levels, draw(st.integers(1, 60)), draw(per_slot), draw(per_slot)


@quick
@given(drafts())
def test_saturated_and_tied_drafts_keep_every_parent(drafted):
    """Whatever the score policy: rows fall in score, parents stand before their children, limits are kept."""
    levels, nodes, max_level, limit = drafted
    slots = len(limit)
    tree = build_tree(torch.arange(slots), levels, nodes, max_level, limit)
    assert not tree.scores.isnan().any()
    for slot in range(slots):
        count, parent = int(tree.count[slot]), tree.parent[slot].tolist()
        usable = sum(int((level.scores[slot] > -torch.inf).sum()) for level in levels[: int(max_level[slot])])
        assert count == 1 + min(nodes, int(limit[slot]), usable)
        scores = tree.scores[slot].tolist()
        assert scores[:count] == sorted(scores[:count], reverse=True)
        for row in range(1, count):
            assert 0 <= parent[row] < row
            assert scores[row] <= scores[parent[row]]
            assert int(tree.position[slot, row]) == int(tree.position[slot, parent[row]]) + 1 <= int(max_level[slot])
        siblings = [(parent[row], int(tree.tokens[slot, row])) for row in range(1, count)]
        assert len(set(siblings)) == len(siblings)


@quick
@given(drafts())
def test_a_slots_tree_does_not_depend_on_its_neighbours(drafted):
    """Bare roots, small and full trees side by side: each is what it is alone."""
    levels, nodes, max_level, limit = drafted
    together = build_tree(torch.arange(len(limit)), levels, nodes, max_level, limit)
    for slot in range(len(limit)):
        one = slice(slot, slot + 1)
        own = [Level(*(field[one] for field in level)) for level in levels]
        alone = build_tree(torch.tensor([slot]), own, nodes, max_level[one], limit[one])
        for name in ("count", "tokens", "parent", "position", "ancestor_mask", "first_child", "next_sibling", "scores"):
            assert torch.equal(getattr(together, name)[one], getattr(alone, name)), name


# whole runs


class BentHead(KnowingHead):
    """A head that knows part of an output, with log-probabilities that are tied or saturated."""

    bend = "none"

    def logits(self, h: Tensor) -> Tensor:
        logits = super().logits(h)
        if self.bend == "saturated":
            return logits * 1e5
        if self.bend == "tied":
            return (logits / 8).round()
        return logits * 0 if self.bend == "all zero" else logits


VOCAB, LONGEST, PROMPTS = 40, 20, 5


@cache
def small_target() -> Target:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return shifted_target("llama", vocab_size=VOCAB, num_key_value_heads=1, **sizes)


@cache
def prompts() -> list[list[int]]:
    return [[7], *random_prompts(small_target(), PROMPTS - 1)]


@cache
def full_output(prompt: int, sampling: SamplingConfig) -> list[int]:
    """What plain decoding emits without a stop; transformers' own where it is greedy."""
    ids = prompts()[prompt]
    if sampling.temperature == 0:
        return greedy(small_target(), ids, LONGEST)
    request = Request(ids, sampling, max_new_tokens=LONGEST, prompt_id=prompt)
    return Engine(small_target()).generate_one(request).token_ids


@cache
def bent_head(bend: str, share: float, draft_vocab_size: int) -> Eagle3Head:
    """Over the whole vocabulary a head that knows prompt 1's greedy output; else a random one."""
    target, options = small_target(), HeadOptions(capture_layers=(0, 1))
    if draft_vocab_size < VOCAB:
        ids = torch.arange(draft_vocab_size) * (VOCAB // draft_vocab_size)
        members = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        vocab_map = VocabMap(ids - torch.arange(draft_vocab_size), members)
        return Eagle3Head.for_target(target, vocab_map, options).requires_grad_(False)
    head = Eagle3Head.for_target(target, identity_map(VOCAB), options).requires_grad_(False)
    known = BentHead(head, prompts()[1] + full_output(1, SamplingConfig()), share)
    known.bend = bend
    return known


@dataclass(frozen=True)
class Asked:
    """A request, and the output that it must give."""

    request: Request
    tokens: list[int]
    reason: str


@st.composite
def asked(draw) -> Asked:
    prompt, limit = draw(st.integers(0, PROMPTS - 1)), draw(st.integers(1, LONGEST))
    sampling = SamplingConfig(draw(st.sampled_from([0.0, 0.0, 0.8])), seed=3)
    full = full_output(prompt, sampling)
    # an EOS somewhere in the output, or none
    at = draw(st.none() | st.integers(0, LONGEST - 1))
    eos = () if at is None else (full[at],)
    request = Request(prompts()[prompt], sampling, max_new_tokens=limit, prompt_id=prompt, eos_ids=eos)
    end = full.index(eos[0]) + 1 if eos else LONGEST + 1
    return Asked(request, full[: min(end, limit)], "eos" if end <= limit else "length")


@st.composite
def trees(draw) -> TreeConfig:
    depth, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    most = min(top_k + top_k**2 * (depth - 1), 40)
    nodes = draw(st.none() | st.integers(depth, max(depth, most)))
    return TreeConfig(depth, top_k, nodes, level_weight=draw(st.sampled_from(WEIGHTS)))


@st.composite
def engine_configs(draw) -> EngineConfig:
    """Slots, prompts in chunks or whole, pools with room for all slots or for little more than one request, rounds of
    fixed shapes or not.
    """
    # of any prompt, output and tree
    largest = 7 + LONGEST + 40
    pages = draw(st.sampled_from([None, -(-largest // 4)]))
    return EngineConfig(
        slots=draw(st.integers(1, 3)),
        page_size=4,
        pages=pages,
        head_pages=pages,
        prefill_rows=draw(st.sampled_from([1, 3, 512])),
        graphs=draw(st.sampled_from(["off", "fixed"])),
    )


def check_counts(result: Result) -> None:
    assert 1 + sum(result.run_lengths) == len(result.token_ids)
    assert result.nodes == sum(result.offered_by_level)
    assert all(0 <= a <= o for a, o in zip(result.accepted_by_level, result.offered_by_level, strict=False))
    # a walk that reaches a level has passed those above it
    assert result.accepted_by_level == sorted(result.accepted_by_level, reverse=True)


@pytest.mark.filterwarnings("ignore:tree top_k .* is more than the draft vocabulary")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(asked(), min_size=1, max_size=6),
    trees(),
    st.sampled_from(["none", "saturated", "tied", "all zero"]),
    st.sampled_from([0.5, 1.0]),
    st.sampled_from([VOCAB, VOCAB, 4]),
    st.sampled_from(DRAFT_NOISES).map(lambda noise: RuleConfig(draft_noise=noise)),
    engine_configs(),
)
def test_any_run_equals_plain_decoding(wanted, tree, bend, share, draft_vocab_size, rule, config):
    """Limits of 1 to 20, EOS anywhere, greedy and sampled rows, one node to forty, more children than tokens exist."""
    engine = CheckedEngine(small_target(), bent_head(bend, share, draft_vocab_size), tree, config, rule)
    results = engine.generate([each.request for each in wanted])
    for result, each in zip(results, wanted, strict=True):
        assert (result.token_ids, result.finish_reason) == (each.tokens, each.reason)
        check_counts(result)


@pytest.mark.parametrize("tree", [TreeConfig.chain(5), TreeConfig(5, 4, 16), TreeConfig(1, 6, 6), TreeConfig(1, 1, 1)])
def test_eos_at_every_position_of_every_run(tree):
    """A head that knows everything: runs are as long as the tree is deep, and end at each of their places."""
    full, cut = full_output(1, SamplingConfig()), set()
    engine = Engine(small_target(), bent_head("saturated", 1.0, VOCAB), tree)
    for token in dict.fromkeys(full):
        end = full.index(token) + 1
        request = Request(prompts()[1], max_new_tokens=LONGEST, eos_ids=(token,))
        result = engine.generate_one(request)
        assert (result.token_ids, result.finish_reason) == (full[:end], "eos")
        cut.update(result.run_lengths[-1:])
    assert cut == set(range(1, tree.depth + 2))
