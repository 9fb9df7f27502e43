"""What counts as a repetition loop, and which rounds lie outside of one."""

import random

import pytest

from eagle3_infer.loops import LONGEST_PERIOD, REPEATS, SHORTEST, in_loop, outside_loops


def text(count, seed=0):
    """Tokens that do not repeat."""
    return random.Random(seed).sample(range(1000, 9000), count)


def marked(tokens):
    return [index for index, mark in enumerate(in_loop(tokens)) if mark]


@pytest.mark.parametrize("period", [1, 2, 7, 10, 63, LONGEST_PERIOD])
def test_a_loop_is_what_repeats_its_first_period(period):
    before, once, after = text(20), list(range(period)), text(9, seed=1)
    repeats = max(REPEATS, -(-SHORTEST // period))
    tokens = before + once * repeats + after
    assert marked(tokens) == list(range(20 + period, 20 + period * repeats))


def test_a_loop_may_end_inside_a_period():
    tokens = text(5) + list(range(10)) * 3 + [0, 1, 2, 3]
    assert marked(tokens) == list(range(15, 39))


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [1],
        text(200),
        # two times and most of a third
        list(range(20)) * 2 + list(range(19)),
        # a period that is too long
        list(range(LONGEST_PERIOD + 1)) * 4,
        # often enough, but short: three dashes, a row of a table
        text(30) + [7] * (SHORTEST - 1) + text(30, seed=1),
        text(30) + [7, 8] * 6 + text(30, seed=1),
        # one token of each period differs
        [token for i in range(8) for token in (*range(9), 100 + i)],
    ],
)
def test_what_is_no_loop(tokens):
    assert marked(tokens) == []


def test_two_loops_in_one_reply():
    first, second = [1, 2, 3] * 9, list(range(50, 70)) * 3
    tokens = first + text(11) + second
    assert marked(tokens) == [*range(3, 27), *range(27 + 11 + 20, 27 + 11 + 60)]


def test_marks_agree_with_the_definition():
    """Against every window of every period, on short random texts of few tokens."""
    draw = random.Random(3)
    for _ in range(60):
        tokens = [draw.randrange(2)] * draw.randrange(30) + [draw.randrange(3) for _ in range(draw.randrange(40))]
        tokens += tokens[-draw.randrange(1, 9) :] * draw.randrange(8)
        expected = set()
        for period in range(1, LONGEST_PERIOD + 1):
            for start in range(len(tokens)):
                end = start + max(REPEATS * period, SHORTEST)
                same = all(tokens[i] == tokens[i - period] for i in range(start + period, min(end, len(tokens))))
                if end <= len(tokens) and same:
                    expected |= set(range(start + period, end))
        assert set(marked(tokens)) == expected


def test_rounds_are_outside_by_their_first_token():
    marks = [False, False, False, True, True, True, True, False]
    # the prefill's token, then rounds that begin at 1 (outside), 3 and 5 (inside), 7 (outside)
    assert outside_loops(marks, [2, 2, 2, 1]) == (3, 2)
    # a round that begins outside and ends inside is outside as a whole
    assert outside_loops(marks, [6, 1]) == (7, 2)
    assert outside_loops([False], []) == (0, 0)
