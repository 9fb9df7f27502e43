"""Acceptance by level of the tree as shares of rounds, for tables, charts and pages. Knows counts alone."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# charts draw hollow what stands for fewer rounds
FEW_ROUNDS = 20


class Point(NamedTuple):
    """A share at a level, and how many rounds it stands for; `share` is None where there were none."""

    share: float | None
    rounds: int


def shares_given(accepted: Sequence[int], rounds: int) -> list[Point]:
    """By level: the share accepted of the rounds that accepted the level before."""
    tried = [rounds, *accepted[:-1]]
    return [Point(n / t if t else None, t) for n, t in zip(accepted, tried, strict=True)]


def shares_overall(accepted: Sequence[int], rounds: int) -> list[Point]:
    """By level: the share accepted of all rounds."""
    return [Point(n / rounds, rounds) for n in accepted]


def context_order(names: Iterable[str]) -> list[str]:
    """Buckets of context (`0-127`, ..., `8192+`) from short to long."""
    return sorted(names, key=lambda name: int(name.rstrip("+").split("-")[0]))
