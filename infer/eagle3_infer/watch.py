"""What became of every draft of a chain, round by round: for people who train heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Any

from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.config import NO_GRAPHS, EngineConfig, TreeConfig
from eagle3_infer.engine import Engine
from eagle3_infer.request import Request, Result
from eagle3_infer.trace import trace

SLOTS = 8


@dataclass(frozen=True)
class Round:
    """One verified chain: some of its first drafts are emitted, then the target's own token (none where the reply ends
    with a draft)."""

    drafted: list[int]
    emitted: list[int]

    @property
    def accepted(self) -> int:
        """How many drafts were emitted."""
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.drafted, self.emitted, strict=False)))


@dataclass(frozen=True)
class Watched:
    """A reply, and its rounds in order."""

    result: Result
    rounds: list[Round]


def watch(target: Target, head: DraftHead, depth: int, requests: Sequence[Request]) -> list[Watched]:
    """Answer the requests with a chain of `depth` drafts a round.

    Raises:
        As `Engine` and `Engine.generate` do.
    """
    engine = Engine(target, head, TreeConfig.chain(depth), small(requests))
    return [
        Watched(reply.result, [Round(r.tree.tokens[1:], r.emitted) for r in reply.rounds])
        for _, reply in sorted(trace(engine, requests), key=itemgetter(0))
    ]


def told(watched: Sequence[Watched], tokenizer: Any) -> list[dict[str, Any]]:
    """A row per round, as text: the drafts accepted, those rejected, and the target's own token."""
    rows = []
    for prompt, reply in enumerate(watched):
        for number, r in enumerate(reply.rounds):
            parts = {
                "accepted": r.drafted[: r.accepted],
                "rejected": r.drafted[r.accepted :],
                "target": r.emitted[r.accepted :],
            }
            texts = {name: tokenizer.decode(ids) for name, ids in parts.items()}
            rows.append({"prompt": prompt, "round": number, **texts})
    return rows


def tau(results: Sequence[Result]) -> float:
    """Tokens per round, pooled; NaN without a round."""
    rounds = sum(result.rounds for result in results)
    return sum(sum(result.run_lengths) for result in results) / rounds if rounds else math.nan


def small(requests: Sequence[Request]) -> EngineConfig:
    """For a few requests: nothing is captured, which takes longer than they do."""
    return EngineConfig(slots=min(SLOTS, max(1, len(requests))), graphs=NO_GRAPHS)
