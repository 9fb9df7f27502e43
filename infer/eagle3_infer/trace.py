"""Requests answered once more, untimed, keeping every tree that was verified: for those who look at single rounds.

The engine is given: what was traced is told (`replies.py`) without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eagle3_infer.request import Request, Result

if TYPE_CHECKING:
    from eagle3_infer.engine import Engine


@dataclass(frozen=True)
class TracedTree:
    """What a round verified: rows in use, root first, parents before children; a bare root where nothing was drafted.

    Args:
        tokens: target ids; parents: rows, -1 at the root.
        scores: path scores (log of the estimated acceptance of the whole path), 0 at the root.
        edges: edge scores as drafted, before calibration and level weights; 0 at the root.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    edges: list[float]

    def path(self, run: Sequence[int]) -> list[int]:
        """Rows below the root whose tokens are those of `run`, each a child of the one before, as far as they go."""
        rows, at = [], 0
        for token in run:
            below = (row for row, parent in enumerate(self.parents) if parent == at and self.tokens[row] == token)
            at = next(below, -1)
            if at < 0:
                break
            rows.append(at)
        return rows


@dataclass(frozen=True)
class TracedRound:
    """A verified tree and what came of it.

    Args:
        emitted: tokens of the round after the stop rules: those of `path`, then the target's own where one came.
        path: accepted rows that were emitted, without the root.
    """

    tree: TracedTree
    emitted: list[int]
    path: list[int]


@dataclass(frozen=True)
class Trace:
    """A reply, and its rounds in order."""

    result: Result
    rounds: list[TracedRound]


def trace(engine: Engine, requests: Sequence[Request]) -> Iterator[tuple[int, Trace]]:
    """Answer the requests and tell (index, trace) of each as it ends.

    Args:
        engine: without graphs, so that the tree at hand is the next round's.
    Raises:
        As `Engine.generate` does.
    """
    rounds: list[list[TracedRound]] = [[] for _ in requests]
    trees: dict[int, TracedTree] = {}
    accepted = [0] * len(requests)
    for number, emitted, result in engine.stream(requests):
        before, accepted[number] = accepted[number], _accepted(engine, number, result)
        # the prefill's token comes from no round
        if number in trees and emitted:
            tree = trees[number]
            # a rule may refuse a draft and then draw that very token: its count decides
            path = tree.path(emitted[: accepted[number] - before])
            rounds[number].append(TracedRound(tree, emitted, path))
        if result is not None:
            yield number, Trace(result, rounds[number])
        else:
            trees[number] = _next_tree(engine, number)


def _accepted(engine: Engine, number: int, result: Result | None) -> int:
    """Drafts of the request that were accepted so far."""
    if result is not None:
        return sum(result.accepted_by_level)
    return sum(engine.running[_row(engine, number)].metrics.accepted_by_level)


def _next_tree(engine: Engine, number: int) -> TracedTree:
    """What the next round verifies of a request that goes on."""
    row, tree = _row(engine, number), engine.draft.tree
    parents = tree.used_parents()[row]
    used = len(parents)
    edges = [0.0] * used if tree.edges is None else tree.edges[row, :used].tolist()
    return TracedTree(tree.tokens[row, :used].tolist(), parents, tree.scores[row, :used].tolist(), edges)


def _row(engine: Engine, number: int) -> int:
    return [running.number for running in engine.running].index(number)
