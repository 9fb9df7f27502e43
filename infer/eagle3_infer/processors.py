"""What changes a request's logits before its filters: penalties, biases, bans, and transformers' own processors.

Knows token lists and one row of logits, nothing of trees: the caller brings each node's own prefix.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3_infer.config import SamplingConfig

# (tokens so far: prompt, output and the node's path; logits [V] float32) -> logits [V]; never changes its input
Processor = Callable[[Sequence[int], Tensor], Tensor]

# classes of transformers.generation.logits_process whose result depends on their arguments alone (read in 5.17;
# what some set on first use is a copy of their arguments on the logits' device, the watermark reseeds per call)
STATELESS = frozenset(
    {
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
        *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor"),
        *("ExponentialDecayLengthPenalty", "LogitNormalization", "WatermarkLogitsProcessor"),
        *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
        *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
    }
)


def build_processors(
    sampling: SamplingConfig, prompt_length: int, eos_ids: Sequence[int], extra: Iterable[Any] = ()
) -> tuple[Processor, ...]:
    """A request's processors in the order of transformers' `generate`; none where nothing is set.

    Args:
        prompt_length: tokens that are not output: presence, frequency and min_tokens leave them out.
        eos_ids: what min_tokens forbids; as in transformers, an EOS id alone is no bad word.
        extra: processors, or transformers' own (see `adapt`); they come last, before the filters.
    Raises:
        ConfigError: an extra processor that is not known to be stateless.
    """
    edits: list[Edit] = []
    if sampling.logit_bias:
        edits.append(SequenceBias(((token,), bias) for token, bias in sampling.logit_bias))
    if sampling.repetition_penalty != 1:
        edits.append(Repetition(sampling.repetition_penalty))
    if sampling.presence_penalty or sampling.frequency_penalty:
        edits.append(Occurrences(prompt_length, sampling.presence_penalty, sampling.frequency_penalty))
    words = [word for word in sampling.bad_words if not (len(word) == 1 and word[0] in eos_ids)]
    if words:
        edits.append(SequenceBias((word, -math.inf) for word in words))
    if sampling.min_tokens and eos_ids:
        edits.append(MinLength(prompt_length + sampling.min_tokens, tuple(eos_ids)))
    return adapt([*([Edits(tuple(edits))] if edits else []), *extra])


class Edit(Protocol):
    """A change in place of logits that nobody else holds."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None: ...


@dataclass(frozen=True)
class Edits:
    """Edits one after the other, on one copy of the logits."""

    edits: tuple[Edit, ...]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        logits = logits.clone()
        for edit in self.edits:
            edit(tokens, logits)
        return logits


class SequenceBias:
    """Adds a bias to the last token of a sequence wherever the tokens before it have just been emitted.

    As in transformers, a sequence longer than the tokens so far has no effect yet, even if only its last is missing.

    Args:
        biases: (token ids, what is added to the last one's logit; -inf forbids it).
    Raises:
        ConfigError: when called, of a token id that the logits do not have. A request's own ids were checked with the
            request; those of transformers' processors come unseen.
    """

    def __init__(self, biases: Iterable[tuple[Sequence[int], float]]):
        pairs = [(tuple(int(i) for i in sequence), float(bias)) for sequence, bias in biases]
        named = [token for sequence, _ in pairs for token in sequence]
        self.lowest, self.highest = min(named, default=0), max(named, default=0)
        self.single = {sequence[0]: bias for sequence, bias in pairs if len(sequence) == 1}
        self.longer = [(list(sequence[:-1]), sequence[-1], bias) for sequence, bias in pairs if len(sequence) > 1]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None:
        if self.lowest < 0 or self.highest >= len(logits):
            odd = self.lowest if self.lowest < 0 else self.highest
            raise ConfigError(
                f"a processor biases or forbids token id {odd}; the target's ids are 0 .. {len(logits) - 1}"
            )
        due = self.single
        for before, last, bias in self.longer:
            if len(tokens) > len(before) and list(tokens[-len(before) :]) == before:
                due = {**due, last: due.get(last, 0.0) + bias}
        if due:
            logits.index_add_(0, _ids(due, logits), _values(due.values(), logits))


@dataclass(frozen=True)
class Repetition:
    """Divides positive and multiplies negative logits of every token so far, prompt included (CTRL, section 4.1)."""

    penalty: float

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None:
        ids = _ids(tokens, logits)
        seen = logits[ids]
        # a token that occurs twice is written twice, with the same value
        logits.index_copy_(0, ids, torch.where(seen < 0, seen * self.penalty, seen / self.penalty))


@dataclass(frozen=True)
class Occurrences:
    """Subtracts `presence` once and `frequency` per occurrence from every token of the output."""

    prompt_length: int
    presence: float
    frequency: float

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None:
        counts = Counter(tokens[self.prompt_length :])
        if counts:
            penalties = [-(self.presence + self.frequency * count) for count in counts.values()]
            logits.index_add_(0, _ids(counts, logits), _values(penalties, logits))


@dataclass(frozen=True)
class MinLength:
    """Forbids the EOS ids while there are fewer than `length` tokens, prompt included."""

    length: int
    eos_ids: tuple[int, ...]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> None:
        # an id without a logit cannot be drawn anyhow
        ids = [i for i in self.eos_ids if i < len(logits)] if len(tokens) < self.length else []
        if ids:
            logits.index_fill_(0, _ids(ids, logits), -math.inf)


# torch.tensor takes eight times as long over a list of ints
def _ids(tokens: Iterable[int], like: Tensor) -> Tensor:
    return torch.frombuffer(array("q", tokens), dtype=torch.int64).to(like.device)


def _values(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.frombuffer(array("d", values), dtype=torch.float64).to(like.device, like.dtype)


@dataclass(frozen=True)
class Pure:
    """A transformers processor, (input_ids [1, n], scores [1, V]) -> scores [1, V], seen as one of ours."""

    processor: Callable[..., Tensor]

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        # a copy: custom processors like to write into their scores
        scores = self.processor(_ids(tokens, logits)[None], logits.clone()[None])
        if scores.shape != (1, len(logits)):
            raise ConfigError(
                f"{type(self.processor).__name__} returned scores of shape {list(scores.shape)}; "
                f"expected {[1, len(logits)]}, as it was given"
            )
        return scores[0]


def pure(processor: Callable[..., Tensor]) -> Pure:
    """Vouch for a transformers processor: its scores depend on the one row of input_ids it is called with, alone.

    A node of a draft tree asks it about a continuation that may never be emitted, and rows come in any order, so a
    processor that remembers earlier calls, reads the row's index or draws random numbers would change the output.
    """
    return Pure(processor)


def adapt(processors: Iterable[Any]) -> tuple[Processor, ...]:
    """Processors as the engine calls them: common ones of transformers become edits, neighbours share a copy.

    Args:
        processors: ours, transformers' stateless ones (STATELESS), or others wrapped by `pure`.
    Raises:
        ConfigError: a processor of another class.
    """
    adapted: list[Processor] = []
    for each in map(_adapted, processors):
        last = adapted[-1] if adapted else None
        if isinstance(each, Edits) and isinstance(last, Edits):
            adapted[-1] = Edits(last.edits + each.edits)
        else:
            adapted.append(each)
    return tuple(adapted)


def _adapted(processor: Any) -> Processor:
    from transformers import LogitsProcessor, LogitsProcessorList

    kind = type(processor)
    if issubclass(kind, LogitsProcessor):
        if kind.__name__ not in STATELESS or kind.__module__ != "transformers.generation.logits_process":
            raise ConfigError(
                f"logits processor {kind.__name__} is not known to be stateless; if its scores depend on its "
                "input_ids alone, say so with eagle3_infer.pure(processor), else leave it out"
            )
        edit = _edit(kind.__name__, processor)
        return Pure(processor) if edit is None else Edits((edit,))
    if issubclass(kind, LogitsProcessorList) or not issubclass(kind, Callable):
        raise ConfigError(f"a processor is of type {kind.__name__}; expected a callable or a transformers processor")
    return processor


def _edit(name: str, processor: Any) -> Edit | None:
    """The edit that does what a transformers processor does, if there is one."""
    match name:
        case "RepetitionPenaltyLogitsProcessor" if not processor.prompt_ignore_length:
            return Repetition(processor.penalty)
        case "SequenceBiasLogitsProcessor" | "NoBadWordsLogitsProcessor":
            return SequenceBias(processor.sequence_bias.items())
        case "SuppressTokensLogitsProcessor":
            return SequenceBias(((token,), -math.inf) for token in processor.suppress_tokens.tolist())
        case "MinLengthLogitsProcessor":
            return MinLength(processor.min_length, tuple(processor.eos_token_id.flatten().tolist()))
        case "MinNewTokensLengthLogitsProcessor":
            length = processor.prompt_length_to_skip + processor.min_new_tokens
            return MinLength(length, tuple(processor.eos_token_id.flatten().tolist()))
    return None
