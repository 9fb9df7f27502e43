"""Replies for the HTML report: their texts token by token, what each round emitted, and the trees that it verified.

Knows tokenizers, outputs and traces; nothing of pages. All of it is JSON: short names, whole numbers, tokens once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3_infer.compare import first_difference
from eagle3_infer.report import Output
from eagle3_infer.trace import Trace, TracedTree

# scores are told in hundredths
SCALE = 100
# half of a hundredth on each of a node's and its parent's score, and on its edge
ROUNDING = 0.02
SHOWN_CHARACTERS = 4000
BROKEN = "�"


@dataclass
class Words:
    """Texts of tokens as they stand within a text: some tokenizers drop the blank before a token that comes first."""

    tokenizer: Any
    known: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        self._anchor = [int(token) for token in first]
        self._anchor_text = self._decode(self._anchor)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, token: int) -> str:
        """The token alone; U+FFFD where it is a part of a character."""
        if token not in self.known:
            text = self._decode([*self._anchor, token])
            self.known[token] = text.removeprefix(self._anchor_text)
        return self.known[token]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; empty for all but the last token of a character that several make up."""
        texts, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            before, text = self._decode(ids[start:read]), self._decode(ids[start:end])
            if text.endswith(BROKEN) and end < len(ids):
                texts.append("")
                continue
            texts.append(text.removeprefix(before))
            start, read = read, end
        return texts


@dataclass
class Told:
    """Replies to look at.

    Args:
        replies: as `tell_reply` gives them; words: texts of their trees' tokens; notes: what is to be known of them.
    """

    replies: list[dict[str, Any]] = field(default_factory=list)
    words: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tell_reply(outputs: Sequence[Output], traces: dict[str, Trace], asked: str, words: Words) -> dict[str, Any]:
    """One turn of one prompt as every mode answered it.

    Args:
        outputs: of the turn, one per mode; traces: of those modes that drafted, as far as they were traced.
        asked: the user's message.
    """
    first = outputs[0]
    return {
        "id": first.id,
        "category": first.category,
        "turn": first.turn + 1,
        "asked": asked if len(asked) <= SHOWN_CHARACTERS else asked[:SHOWN_CHARACTERS] + " [...]",
        "modes": {output.mode: _tell_mode(output, traces.get(output.mode), words) for output in outputs},
    }


def _tell_mode(output: Output, trace: Trace | None, words: Words) -> dict[str, Any]:
    """What was measured, where it was not traced: then each round's last token counts as the target's own."""
    result = output if trace is None else trace.result
    told: dict[str, Any] = {
        "pieces": words.pieces(result.token_ids),
        "runs": list(result.run_lengths),
        "accepted": [run - 1 for run in result.run_lengths],
        "finish": result.finish_reason,
        "prompt": result.prompt_tokens,
    }
    if trace is not None:
        told["accepted"] = [len(r.path) for r in trace.rounds]
        told["paths"] = [r.path for r in trace.rounds]
        told["trees"] = [tell_tree(r.tree) for r in trace.rounds]
        told["own"] = [r.emitted[-1] if len(r.emitted) > len(r.path) else None for r in trace.rounds]
        for r in trace.rounds:
            for token in (*r.tree.tokens, *r.emitted):
                words.text(token)
        told["apart"] = first_difference(result.token_ids, output.token_ids)
    return told


def tell_tree(tree: TracedTree) -> dict[str, list[int]]:
    """Tokens, parents, path scores in hundredths; edge scores too where they are more than differences of those."""
    told = {"t": tree.tokens, "p": tree.parents, "s": _hundredths(tree.scores)}
    differences = (tree.scores[row] - tree.scores[tree.parents[row]] for row in range(1, len(tree.parents)))
    plain = all(abs(d - edge) < ROUNDING for d, edge in zip(differences, tree.edges[1:], strict=True))
    return told if plain else told | {"e": _hundredths(tree.edges)}


def _hundredths(values: Iterable[float]) -> list[int]:
    # a log-probability may be -inf, which JSON has no number for
    return [round(max(value, -1e6) * SCALE) for value in values]
