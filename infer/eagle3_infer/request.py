"""What a user asks of the engine and what comes back. Imports no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagle3.errors import ConfigError
from eagle3_infer.config import SamplingConfig, as_integer, set_integers, shown

STAGES = ("prefill", "draft", "tree_build", "verify", "accept", "relocate", "other")


@dataclass(frozen=True)
class Request:
    """One prompt to continue. Whole numbers of any type (numpy's) become ints.

    Args:
        prompt_ids: target ids, at least one, as a list of ints.
        stop: strings that end the output; the token that completes one is kept.
        prompt_id, turn, sample: with the run's seed they key the noise.
        eos_ids: ids that end the output; None = the target's.
        forced: tokens that the target is made to emit first (replays of a known output).
        logprobs: whether the result carries log-probabilities.
        processors: more logits processors (see eagle3_infer.processors), applied before the temperature.
    Raises:
        ConfigError: a field of another type, or out of range.
    """

    prompt_ids: list[int]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    prompt_id: int = 0
    turn: int = 0
    sample: int = 0
    eos_ids: tuple[int, ...] | None = None
    forced: tuple[int, ...] = ()
    logprobs: bool = False
    processors: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self):
        set_integers(self, "prompt_id", "turn", "sample", "max_new_tokens")
        object.__setattr__(self, "prompt_ids", _integers("prompt_ids", self.prompt_ids))
        for name in ("forced", *(["eos_ids"] if self.eos_ids is not None else [])):
            object.__setattr__(self, name, tuple(_integers(name, getattr(self, name))))
        if not self.prompt_ids:
            raise ConfigError(f"prompt {self.prompt_id} is empty; it needs at least one token")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be 1 or more")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop is {self.stop!r}; it must be a sequence of strings that are not empty")
        if has_surrogate(self.stop):
            raise ConfigError(f"stop is {self.stop!r}; it holds a lone surrogate, which is no character")
        if not isinstance(self.sampling, SamplingConfig):
            raise ConfigError(f"sampling is {shown(self.sampling)}; it must be a SamplingConfig")
        if not isinstance(self.processors, list | tuple):
            raise ConfigError(f"processors is {shown(self.processors)}; it must be a list or tuple of processors")


def has_surrogate(texts: Iterable[str]) -> bool:
    """Whether some text holds half of a character: no tokenizer and no file takes it."""
    return any("\ud800" <= letter <= "\udfff" for text in texts for letter in text)


def _integers(name: str, values: Any) -> list[int]:
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{name} is {shown(values)}; it must be a list or tuple of whole numbers")
    return [as_integer(f"{name}[{index}]", value) for index, value in enumerate(values)]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One finished request; 1 + sum(run_lengths) == len(token_ids), as the prefill yields the first token.

    One that was cancelled before that has neither: its token_ids and run_lengths are empty.

    Args:
        token_ids: emitted tokens, up to and including the EOS or the token that completes a stop string.
        finish_reason: eos, stop, length or cancelled.
        run_lengths: tokens emitted per round, after trimming at the stop.
        offered_by_level, accepted_by_level: draft nodes verified and accepted per level, before trimming.
        nodes: draft nodes verified.
        path_conflict: leaf pairs that part at level 1, and all leaf pairs.
        seconds: this request's share of each stage.
        logprobs: of each token by the model's raw logits (temperature 1, no processors); None if not asked for.
    """

    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    run_lengths: list[int]
    seconds: dict[str, float]
    offered_by_level: list[int] = field(default_factory=list)
    accepted_by_level: list[int] = field(default_factory=list)
    nodes: int = 0
    path_conflict: tuple[int, int] = (0, 0)
    logprobs: list[float] | None = None

    @property
    def rounds(self) -> int:
        return len(self.run_lengths)


class Update(NamedTuple):
    """What request `number` of a stream emitted in a round; its result comes with the last of its updates."""

    number: int
    token_ids: list[int]
    result: Result | None
