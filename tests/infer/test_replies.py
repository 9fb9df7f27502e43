"""Replies as the HTML report gets them: texts of tokens, and trees as whole numbers."""

import json
import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3_infer.replies import SHOWN_CHARACTERS, Words, tell_reply, tell_tree
from eagle3_infer.trace import Trace, TracedRound, TracedTree
from oracles.reports import FULL, ROUNDS, TEXTS, TOKENS, Vocabulary, output, traced_output
from oracles.tiny import tiny_tokenizer


def sentence_tokenizer():
    """As Llama 2's and Gemma's: a text's first blank is dropped."""
    inner = Tokenizer(models.WordLevel({"▁a": 0, "▁cat": 1, "s": 2, "<unk>": 3}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("text", ["plain", "é🙂 שלום 漢字", "🙂🙂", "a\nb\t"])
def test_pieces_make_up_the_text(text):
    """A character of several tokens comes with its last one; no token's text is lost or told twice."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    pieces = Words(tokenizer).pieces(ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_that_is_cut_off():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("a🙂")["input_ids"][:-1]
    pieces = Words(tokenizer).pieces(ids)
    assert pieces[0] == "a" and pieces[1:-1] == ["", ""][: len(ids) - 2] and "�" in pieces[-1]
    assert Words(tokenizer).pieces([]) == []


def test_blanks_before_tokens_are_kept():
    words = Words(sentence_tokenizer())
    assert words.text(1) == " cat" and words.text(2) == "s"
    assert words.pieces([1, 1, 2]) == ["cat", " cat", "s"]
    assert words.known == {1: " cat", 2: "s"}


def test_edges_are_told_where_scores_do_not_give_them():
    """Adaptive trees weigh edge scores; a score of minus infinity is still JSON."""
    assert tell_tree(FULL) == {"t": FULL.tokens, "p": FULL.parents, "s": [0, -10, -250, -30, -110, -260]}
    weighed = TracedTree(FULL.tokens, FULL.parents, [s / 2 for s in FULL.scores], FULL.edges)
    assert tell_tree(weighed)["e"] == [0, -10, -250, -20, -100, -10]
    never = TracedTree([0, 1], [-1, 0], [0.0, -math.inf], [0.0, -math.inf])
    json.dumps(tell_tree(never), allow_nan=False)


def test_a_traced_reply_beside_one_that_was_only_measured():
    words = Words(Vocabulary())
    plain = output("plain", [1] * (len(TOKENS) - 1), TOKENS)
    told = tell_reply([plain, traced_output("tree")], {"tree": Trace(traced_output("tree"), ROUNDS)}, "q", words)
    tree, plain = told["modes"]["tree"], told["modes"]["plain"]
    assert "".join(tree["pieces"]) == "".join(plain["pieces"]) == "".join(TEXTS[token] for token in TOKENS)
    assert tree["runs"] == [3, 2, 1, 1, 1] and tree["accepted"] == [2, 1, 0, 0, 1]
    assert tree["paths"] == [[1, 4], [2], [], [], [1]]
    # the last reply ends with an accepted draft: no token of the target's own follows
    assert tree["own"] == [5, 8, 7, 6, None] and tree["apart"] is None
    assert plain["accepted"] == [0] * len(plain["runs"]) and "trees" not in plain
    shown = {token for r in ROUNDS for token in (*r.tree.tokens, *r.emitted)}
    assert set(words.known) == shown


def test_a_trace_that_parts_from_the_measured_reply():
    words = Words(Vocabulary())
    measured = traced_output("tree")
    other = Trace(output("tree", [2], [0, 1, 9]), [TracedRound(FULL, [1, 9], [1])])
    told = tell_reply([measured], {"tree": other}, "q", words)
    assert told["modes"]["tree"]["apart"] == 2 and told["modes"]["tree"]["runs"] == [2]


def test_long_questions_are_cut():
    told = tell_reply([output("plain", [])], {}, "x" * 50_000, Words(Vocabulary()))
    assert SHOWN_CHARACTERS < len(told["asked"]) < SHOWN_CHARACTERS + 20
