"""Where an output ends: EOS ids, stop strings, a token limit, exact inside an accepted run."""

from collections.abc import Sequence
from typing import Any


class Stops:
    """One request's stop rules, fed with tokens in order.

    Args:
        eos_ids: ids that end the output (kept in it).
        strings: texts that end the output once its decoded tokens contain them; they may span tokens.
        max_new_tokens: limit of emitted tokens.
        tokenizer: needed for stop strings only.
    """

    def __init__(self, eos_ids: Sequence[int], strings: Sequence[str], max_new_tokens: int, tokenizer: Any = None):
        self.eos_ids = frozenset(eos_ids)
        self.strings = tuple(strings)
        self.max_new_tokens = max_new_tokens
        self.tokenizer = tokenizer
        # a token adds at least one byte, so the last tokens decide; the spare ones keep the cut away from the match
        self._tail = max((len(s.encode()) for s in self.strings), default=0) + 8

    def keep(self, emitted: list[int], run: Sequence[int]) -> tuple[int, str | None]:
        """How many tokens of `run` follow `emitted` before the output ends, and why it ends (None: it goes on)."""
        output = list(emitted[-self._tail :]) if self.strings else []
        for kept, token in enumerate(run, start=1):
            output.append(token)
            if token in self.eos_ids:
                return kept, "eos"
            if self.strings and self._stopped(output):
                return kept, "stop"
            if len(emitted) + kept >= self.max_new_tokens:
                return kept, "length"
        return len(run), None

    def _stopped(self, output: list[int]) -> bool:
        text = self.tokenizer.decode(
            output[-self._tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)
