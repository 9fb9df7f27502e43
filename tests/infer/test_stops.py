"""Stops in isolation: which token of a run ends the output, and why."""

import pytest

from eagle3_infer.stops import Stops
from oracles.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_eos_comes_before_the_limit():
    stops = Stops([9], (), 3)
    assert stops.keep([], [1, 2, 9, 4]) == (3, "eos")
    assert stops.keep([1, 1], [9]) == (1, "eos")
    assert stops.keep([1, 1], [5, 9]) == (1, "length")
    assert stops.keep([], [1, 2]) == (2, None)


@pytest.mark.parametrize("cut", range(1, 11))
def test_stop_string_across_runs(cut):
    """However the tokens are dealt into runs, the output ends at the same one."""
    tokens, stop = ids("abc STOP def"), "c STO"
    stops, emitted, start = Stops([], (stop,), 100, TOKENIZER), [], 0
    while start < len(tokens):
        run = tokens[start : start + cut]
        kept, reason = stops.keep(emitted, run)
        emitted += run[:kept]
        start += cut
        if reason:
            break
    assert reason == "stop"
    assert TOKENIZER.decode(emitted) == "abc STO"


def test_stop_string_of_several_bytes_a_character_ends_when_complete():
    tokens = ids("naïve — 日本語!")
    kept, reason = Stops([], ("日本",), 100, TOKENIZER).keep([], tokens)
    assert reason == "stop"
    assert TOKENIZER.decode(tokens[:kept]) == "naïve — 日本"


def test_special_tokens_can_be_stop_strings():
    kept, reason = Stops([], ("<|im_end|>",), 100, TOKENIZER).keep([], [*ids("ab"), TOKENIZER.eos_token_id, 5])
    assert (kept, reason) == (3, "stop")


def test_long_output_before_the_stop():
    tokens = ids("x" * 500 + "END")
    kept, reason = Stops([], ("END", "never"), 1000, TOKENIZER).keep(tokens[:490], tokens[490:])
    assert (kept, reason) == (13, "stop")
