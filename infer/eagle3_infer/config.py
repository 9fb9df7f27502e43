"""The engine's settings: tree, rule, sampling, pools. Imports no torch, so that `--help` answers at once."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from eagle3.errors import ConfigError

# of a tree's depth, top_k and nodes alike: a level offers top_k^2 candidates, the mask has nodes^2 bits
LARGEST = 1024
# beyond these a deep level would count for nothing, or for everything
LEVEL_WEIGHTS = (0.1, 10.0)
# beyond these shared noise, or the head, would count for nothing
SHARPNESSES = (0.01, 100.0)
# a smaller divisor would take finite logits past the range of float32
SMALLEST_TEMPERATURE = 1e-4
MATCH, TARGET_ONLY, REJECTION, THRESHOLD = "match", "target_only", "rejection", "threshold"
RULES = (MATCH, TARGET_ONLY, REJECTION, THRESHOLD)
NO_NOISE, SHARED_NOISE = "none", "shared"
DRAFT_NOISES = (NO_NOISE, SHARED_NOISE)
AUTO_GRAPHS, FIXED_SHAPES, NO_GRAPHS = "auto", "fixed", "off"
GRAPHS = (AUTO_GRAPHS, FIXED_SHAPES, NO_GRAPHS)


def is_integer(value: Any) -> bool:
    """Whether it is a whole number; True and False are to Python, and are no counts or token ids."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def as_integer(name: str, value: Any) -> int:
    """A whole number of any type as an int (numpy's overflow, and are no JSON); raises ConfigError for all else."""
    if not is_integer(value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number")
    return int(value)


def set_integers(config: Any, *names: str, of: str = "") -> None:
    """Make ints of a frozen dataclass's fields; raises ConfigError for what is none, named with `of` before it."""
    for name in names:
        object.__setattr__(config, name, as_integer(of + name, getattr(config, name)))


def check_number(name: str, value: Any) -> None:
    """Raises ConfigError for what is no number."""
    if not is_number(value):
        raise ConfigError(f"{name} is {shown(value)}; it must be a number")


def shown(value: Any) -> str:
    """A value and its type, on one line and cut short where it is long (a tensor)."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


@dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree.

    Args:
        depth: levels below the root, at most LARGEST and the target's positions.
        top_k: children kept per node and nodes expanded per level, at most LARGEST; 1 makes a chain.
        nodes: draft nodes verified per round, root excluded, at most LARGEST; None = top_k * depth.
        level_weight: the score policy. The edge score of level l counts level_weight^(l-1) times: above 1 favours
            width, below 1 depth; 1 ranks nodes by the plain product of their path's probabilities.
        adaptive: depth and nodes are the most; each round takes what promises most tokens per second. Trees then depend
            on measured seconds: under the match rule that changes no token; under others a seed repeats no run (see
            RuleConfig.pathwise), though target_only and rejection keep the target's law.
    """

    depth: int = 4
    top_k: int = 4
    nodes: int = None  # type: ignore[assignment]
    level_weight: float = 1.0
    adaptive: bool = False

    def __post_init__(self):
        set_integers(self, "depth", "top_k", of="tree ")
        for name in ("depth", "top_k"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ConfigError(f"tree {name} is {getattr(self, name)}; it must be between 1 and {LARGEST}")
        most = min(self.candidates, LARGEST)
        if self.nodes is None:
            object.__setattr__(self, "nodes", max(self.depth, min(self.top_k * self.depth, most)))
        set_integers(self, "nodes", of="tree ")
        if not self.depth <= self.nodes <= most:
            raise ConfigError(
                f"tree nodes is {self.nodes}; with depth {self.depth} and top_k {self.top_k} it must be between "
                f"{self.depth} (the depth) and {most} (top_k + top_k^2 * (depth - 1), at most {LARGEST})"
            )
        check_number("tree level_weight", self.level_weight)
        low, high = LEVEL_WEIGHTS
        if not low <= self.level_weight <= high:
            raise ConfigError(f"tree level_weight is {self.level_weight}; it must be between {low} and {high}")
        if self.adaptive and self.level_weight != 1:
            raise ConfigError(
                f"tree level_weight is {self.level_weight}; an adaptive tree takes 1, as it ranks by learned acceptance"
            )

    @property
    def candidates(self) -> int:
        """Nodes that drafting can offer."""
        return self.top_k + self.top_k**2 * (self.depth - 1)

    @classmethod
    def chain(cls, depth: int) -> "TreeConfig":
        """One child per node, `depth` levels."""
        return cls(depth=depth, top_k=1, nodes=depth)

    def check_positions(self, max_positions: int) -> None:
        """Raises ConfigError for a tree deeper than the target has positions."""
        if self.depth > max_positions:
            raise ConfigError(
                f"tree depth is {self.depth}; for this target it must be between 1 and {max_positions}, its positions"
            )

    def narrowed(self, draft_vocab_size: int) -> "TreeConfig":
        """The tree that a draft vocabulary of this size can fill: a node has no more children than that."""
        narrow = replace(self, top_k=min(self.top_k, draft_vocab_size), nodes=self.depth)
        return replace(narrow, nodes=min(self.nodes, narrow.candidates))


@dataclass(frozen=True)
class RuleConfig:
    """How drafts are drawn and accepted where a request samples; greedy ones always match (but for threshold).

    Args:
        rule: match (the target's draw, a function of target and noise alone), target_only (q = 1 at each draft),
            rejection (drafts sampled without replacement; Leviathan's on a chain, recursive on a tree), or
            threshold (LOSSY: a draft whose probability reaches `threshold` is taken).
        draft_noise: none, or shared: drafts are ranked with the target's own noise (match rule only).
        draft_sharpness: shared noise ranks by this times log q, plus the noise. Above 1 trusts the noise less: better
            where the head's law is flatter than the target's. The output is the same whatever it is.
        threshold: smallest target probability that the threshold rule takes.
    """

    rule: str = MATCH
    draft_noise: str = NO_NOISE
    threshold: float = 0.3
    draft_sharpness: float = 1.0

    def __post_init__(self):
        for name, known in (("rule", RULES), ("draft_noise", DRAFT_NOISES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.draft_noise == SHARED_NOISE and self.rule != MATCH:
            raise ConfigError(f"draft_noise shared needs the match rule; the rule is {self.rule}")
        check_number("threshold", self.threshold)
        check_number("draft_sharpness", self.draft_sharpness)
        low, high = SHARPNESSES
        if not low <= self.draft_sharpness <= high:
            raise ConfigError(f"draft_sharpness is {self.draft_sharpness}; it must be between {low} and {high}")
        if self.draft_sharpness != 1 and self.draft_noise != SHARED_NOISE:
            raise ConfigError(
                f"draft_sharpness is {self.draft_sharpness} and draft_noise {self.draft_noise}; it needs shared noise"
            )
        if not 0 < self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}; it must be above 0 and at most 1")

    @property
    def lossless(self) -> bool:
        """Whether outputs follow the target's own law."""
        return self.rule != THRESHOLD

    @property
    def pathwise(self) -> bool:
        """Whether outputs are the very tokens of plain decoding with the same seed."""
        return self.rule == MATCH


@dataclass(frozen=True)
class SamplingConfig:
    """How a request draws its tokens. Processors apply in transformers' order: logit bias, repetition, presence and
    frequency, bad words, min tokens, then temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 = greedy, else SMALLEST_TEMPERATURE or more.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the most likely tokens that reach this mass; 1 = all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 = all.
        seed: the run's seed; noise also depends on the request's prompt id, turn and sample.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 = off.
        presence_penalty: subtracted once from logits of tokens in the output; 0 = off.
        frequency_penalty: subtracted per occurrence in the output; 0 = off.
        logit_bias: (token id, what is added to its logit), each id once.
        bad_words: token sequences whose last token is forbidden after the others.
        min_tokens: output tokens before an EOS id may be drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name))
        set_integers(self, "top_k", "seed", "min_tokens")
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a finite number of at least "
                f"{SMALLEST_TEMPERATURE:g}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be between 0 (off) and 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; it must be a number above 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a finite number (0 = off)")
        if self.min_tokens < 0:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be 0 or more")
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "bad_words", _word_tuples(self.bad_words))


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    pairs = _listed("logit_bias", given.items() if isinstance(given, Mapping) else given)
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and is_integer(pair[0]) and _is_finite(pair[1])):
            raise ConfigError(f"logit_bias holds {pair!r}; expected pairs of a token id and a finite number")
    if len({token for token, _ in pairs}) != len(pairs):
        raise ConfigError("logit_bias names a token id twice")
    return tuple((int(token), float(bias)) for token, bias in pairs)


def _word_tuples(given: Any) -> tuple[tuple[int, ...], ...]:
    words = _listed("bad_words", given)
    for word in words:
        if not (isinstance(word, Sequence) and word and all(map(is_integer, word))):
            raise ConfigError(f"bad_words holds {word!r}; expected sequences of at least one token id")
    return tuple(tuple(map(int, word)) for word in words)


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} is {shown(given)}; it must be a sequence")
    return list(given)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


@dataclass(frozen=True)
class EngineConfig:
    """What the engine allocates, and how it runs.

    Args:
        slots: requests that run at once.
        page_size, head_page_size: K/V rows per page of the target's and of the head's pool; None = the target's.
        max_tokens: K/V rows that one request may take; None = what the largest request needs.
        pages, head_pages: capacity of the pools; None = `slots` requests of the largest size.
        prefill_rows: prompt tokens read per round, of all joining requests together.
        graphs: auto = rounds without prompts are CUDA graphs where there is a GPU; fixed = they have the graphs' fixed
            shapes, on any device, but run as they come; off.
    """

    slots: int = 1
    page_size: int = 64
    max_tokens: int | None = None
    pages: int | None = None
    head_page_size: int | None = None
    head_pages: int | None = None
    prefill_rows: int = 512
    graphs: str = AUTO_GRAPHS

    def __post_init__(self):
        check_graphs(self.graphs)
        for field in fields(self):
            if field.name == "graphs" or (getattr(self, field.name) is None and field.default is None):
                continue
            set_integers(self, field.name)
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} is {getattr(self, field.name)}; it must be 1 or more")


def check_graphs(graphs: str) -> None:
    """Raises ConfigError for an unknown name."""
    if graphs not in GRAPHS:
        raise ConfigError(f"graphs is {graphs!r}; it must be one of {', '.join(GRAPHS)}")
