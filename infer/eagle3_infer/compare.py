"""Which modes emitted the same tokens, and where they part. Knows outputs, asks a callable why they part."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from eagle3_infer.config import MATCH, RuleConfig
from eagle3_infer.report import Comparison, Divergence, ModeRun, Output, Pair
from eagle3_infer.settings import HF, HF_KEYS, PLAIN

Explain = Callable[[Output, Output, int], Divergence]


def compare_modes(modes: Sequence[ModeRun], explain: Explain | None, sampled: bool) -> Comparison:
    """Every mode that must emit plain's tokens against plain and, at temperature 0, HF generate.

    Args:
        explain: classifies (output, reference output, first differing index); None leaves it unclassified.
        sampled: outputs are drawn.
    """
    by_key = {mode.key: mode for mode in modes if mode.outputs}
    apart = {key: reason for key, mode in by_key.items() if (reason := why_not_compared(mode, sampled))}
    references = [key for key in (PLAIN, *([] if sampled else [HF])) if key in by_key]
    pairs, divergences = [], []
    for reference in references:
        for key in by_key:
            if key not in (reference, HF, *apart):
                pair, found = _compare(by_key[key], by_key[reference], explain or unclassified)
                pairs.append(pair)
                divergences += found
    return Comparison(pairs, divergences, apart)


def why_not_compared(mode: ModeRun, sampled: bool) -> str:
    """Empty where the mode must emit plain decoding's tokens."""
    if sampled and mode.key in HF_KEYS:
        return "transformers draws noise of its own"
    if mode.lossy:
        return "a lossy rule"
    if sampled and not RuleConfig(mode.settings.get("rule", MATCH)).pathwise:
        return "a rule that draws other tokens, of the same law"
    return ""


def _compare(mode: ModeRun, reference: ModeRun, explain: Explain) -> tuple[Pair, list[Divergence]]:
    expected = {output.place: output for output in reference.outputs}
    both = [(output, expected[output.place]) for output in mode.outputs if output.place in expected]
    places = [(left, right, first_difference(left.token_ids, right.token_ids)) for left, right in both]
    found = [explain(left, right, at) for left, right, at in places if at is not None]
    return Pair(mode.key, reference.key, len(both), len(both) - len(found)), found


def unclassified(output: Output, reference: Output, position: int) -> Divergence:
    return Divergence(output.id, output.turn, output.mode, reference.mode, position)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing; None if the lists are equal."""
    pairs = enumerate(zip_longest(left, right))
    return next((index for index, (a, b) in pairs if a != b), None)
