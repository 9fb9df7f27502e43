"""Repetition loops in a reply: which tokens only repeat what came right before them. Knows token ids alone.

Small models loop at temperature 0, and a draft head guesses a loop almost for nothing: tau is told without them, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_PERIOD = 64
REPEATS = 3
# three times "ha", or a rule of a table, is no loop
SHORTEST = 24


class OutsideLoops(NamedTuple):
    """What a reply's rounds gave where it does not loop."""

    tokens: int
    rounds: int


def in_loop(tokens: Sequence[int]) -> list[bool]:
    """Whether each token lies in a repetition loop.

    A stretch has period L (1 .. LONGEST_PERIOD) when each of its tokens but the first L equals the one L places
    before. It is a loop when it is at least REPEATS periods and SHORTEST tokens long. Its first period is text like
    any other; the tokens after it, which repeat it, are in the loop.
    """
    marks = [False] * len(tokens)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // REPEATS) + 1):
        for start, end in _repeating(tokens, period):
            if end - start + period >= max(REPEATS * period, SHORTEST):
                marks[start:end] = [True] * (end - start)
    return marks


def _repeating(tokens: Sequence[int], period: int) -> list[tuple[int, int]]:
    """The longest stretches [start, end) whose tokens equal those `period` places before."""
    stretches, start = [], period
    for end in range(period, len(tokens) + 1):
        if end == len(tokens) or tokens[end] != tokens[end - period]:
            if end > start:
                stretches.append((start, end))
            start = end + 1
    return stretches


def outside_loops(marks: Sequence[bool], run_lengths: Sequence[int]) -> OutsideLoops:
    """Tokens and number of the rounds whose first token is in no loop.

    The first token alone decides: it is emitted whatever the draft was, so that long runs do not choose their side.

    Args:
        marks: of a reply, as `in_loop` gives them; its first token comes from the prefill, not from a round.
    """
    tokens = rounds = 0
    at = 1
    for run in run_lengths:
        if not marks[at]:
            tokens, rounds = tokens + run, rounds + 1
        at += run
    return OutsideLoops(tokens, rounds)
