"""What a head offers below every token of the target's own replies: plain decoding, drafting widely in every round.

Runs the engine as it is; the trees are looked at and put aside, so that each round emits one token.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.config import LARGEST, NO_GRAPHS, EngineConfig, RuleConfig, TreeConfig
from eagle3_infer.drafter import Draft
from eagle3_infer.engine import Engine
from eagle3_infer.request import Request, Result
from eagle3_infer.tune_shapes import Offers, Root

# at once while counting: that is not timed
SLOTS = 8
# candidates that are kept of a root, far more than a tree takes
MOST_CANDIDATES = 512


@dataclass
class _Reply:
    """Trees below one token after the other: parents and tokens of their rows."""

    trees: list[tuple[list[int], list[int]]] = field(default_factory=list)
    result: Result | None = None

    def roots(self, depth: int) -> list[Root]:
        assert self.result is not None
        tokens = self.result.token_ids
        assert len(self.trees) == len(tokens) - 1, "a tree per token but the last"
        return [
            Root(parents, _path(parents, drafted, tokens[at + 1 : at + 1 + depth]))
            for at, (parents, drafted) in enumerate(self.trees)
        ]


def _path(parents: Sequence[int], drafted: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Rows of the tokens, each below the one before, as far as they go."""
    rows = {(parent, token): row for row, (parent, token) in enumerate(zip(parents, drafted, strict=True))}
    path, at = [], 0
    for token in tokens:
        at = rows.get((at, token), 0)
        if not at:
            break
        path.append(at)
    return path


def wide_engine(target: Target, head: DraftHead, most: TreeConfig, rule: RuleConfig, prefill_rows: int) -> Engine:
    """An engine that drafts all candidates up to the depth and top_k of `most`, within reason."""
    everything = TreeConfig(most.depth, most.top_k, min(most.candidates, max(most.nodes, MOST_CANDIDATES), LARGEST))
    return Engine(target, head, everything, EngineConfig(SLOTS, prefill_rows=prefill_rows, graphs=NO_GRAPHS), rule)


def count_offers(engine: Engine, requests: Sequence[Request]) -> Offers:
    """Answer the requests plainly, noting what was drafted below each token.

    Args:
        engine: a `wide_engine`.
    """
    replies = [_Reply() for _ in requests]
    looked_at = engine.draft
    with closing(engine.stream(requests)) as updates:
        for number, _, result in updates:
            # a round tells of each request in turn; its trees are looked at once
            if engine.draft is not looked_at:
                _look(engine, replies)
                looked_at = engine.draft = Draft.bare([s.root for s in engine.running], engine.target.device)
            if result is not None:
                replies[number].result = result
    depth = engine.drafter.tree.depth if engine.drafter else 0
    return Offers([reply.roots(depth) for reply in replies], depth)


def _look(engine: Engine, replies: Sequence[_Reply]) -> None:
    tree = engine.draft.tree
    tokens = tree.tokens.tolist()
    for sequence, parents, drafted in zip(engine.running, tree.used_parents(), tokens, strict=True):
        replies[sequence.number].trees.append((parents, drafted[: len(parents)]))
