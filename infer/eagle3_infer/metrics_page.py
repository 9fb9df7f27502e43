"""What a serving engine's page of counters (Prometheus' text format) says of drafting. Knows no HTTP.

Counters are differenced around a run; gauges are shown as they are, as they speak of some recent window.
Names as of vLLM 0.32, SGLang 0.5 and TensorRT-LLM 1.3; a counter without its `_total` is taken too.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# name{labels} value [timestamp] [# exemplar]; braces, commas and blanks may stand inside a label's quotes
_SAMPLE = re.compile(r'([A-Za-z_:][\w:]*)\s*(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?\s+(\S+)(?:\s+-?[\d.]+)?(?:\s+#.*)?')
_LABEL = re.compile(r'(\w+)\s*=\s*"((?:\\.|[^"\\])*)"')
# a position's label; int() takes other digits than these, and refuses some that isdigit() takes
_POSITION = re.compile(r"[0-9]{1,4}")
# beyond it floats no longer count one by one
MOST_COUNT = 2**53
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Series:
    """One line of the page."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Names:
    """How an engine calls its counters; None where it has none of the kind.

    Args:
        drafts: rounds that verified a draft; by_position: accepted tokens, labelled with the draft's position.
        tokens, requests: emitted in all, and how many requests they were for.
        gauges: shown, and never taken for a measurement of the run.
    """

    engine: str
    tokens: str
    requests: str
    drafts: str | None = None
    offered: str | None = None
    accepted: str | None = None
    by_position: str | None = None
    gauges: tuple[str, ...] = ()


ENGINES = (
    Names(
        "vLLM",
        tokens="vllm:generation_tokens",
        requests="vllm:request_success",
        drafts="vllm:spec_decode_num_drafts",
        offered="vllm:spec_decode_num_draft_tokens",
        accepted="vllm:spec_decode_num_accepted_tokens",
        by_position="vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    Names(
        "SGLang",
        tokens="sglang:generation_tokens",
        requests="sglang:num_requests",
        drafts="sglang:spec_verify_calls",
        gauges=("sglang:spec_accept_length", "sglang:spec_accept_rate"),
    ),
    Names(
        "TensorRT-LLM",
        tokens="trtllm_generation_tokens",
        requests="trtllm_request_success",
        offered="trtllm_spec_decode_num_draft_tokens",
        accepted="trtllm_spec_decode_num_accepted_tokens",
        gauges=("trtllm_spec_decode_acceptance_length",),
    ),
)


@dataclass(frozen=True)
class Counted:
    """What an engine counted between two pages; None = it does not say.

    Args:
        rounds: verifications of a draft.
        offered, accepted: draft tokens, by position where the engine tells.
        tokens: emitted for all of its clients, the first token of each reply included.
        tau: tokens per round; how says which counters it comes from.
        gauges: as they stood at the end.
        all_models: its series name models, and not the one that was asked for: everything is of all of them.
    """

    engine: str
    rounds: int | None = None
    offered: int | None = None
    accepted: int | None = None
    accepted_by_position: list[int] = field(default_factory=list)
    tokens: int | None = None
    tau: float | None = None
    how: str = ""
    gauges: dict[str, float] = field(default_factory=dict)
    all_models: bool = False


def parse_page(text: str) -> list[Series]:
    """The samples of a page; comments and lines that are none are passed over."""
    return [series for line in text.splitlines() if (series := _parse_line(line.strip())) is not None]


def _parse_line(line: str) -> Series | None:
    if not line or line.startswith("#"):
        return None
    if (found := _SAMPLE.fullmatch(line)) is None:
        return None
    name, labels, number = found.groups()
    try:
        value = float(number)
    except ValueError:
        return None
    return Series(name, {key: _unescape(text) for key, text in _LABEL.findall(labels or "")}, value)


def _unescape(text: str) -> str:
    return re.sub(r'\\[\\"n]', lambda match: _ESCAPES[match[0]], text)


def find_engine(page: Sequence[Series]) -> Names | None:
    """Whose counters a page holds; None where they are of no known engine."""
    return next((names for names in ENGINES if _of(page, names.tokens)), None)


def count(before: Sequence[Series], after: Sequence[Series], model: str | None = None) -> Counted | None:
    """What the engine did between two pages; None where the page is of no known engine.

    Args:
        model: its series alone, where the page after tells models apart and knows this one.
    """
    if (names := find_engine(after)) is None:
        return None
    models = {s.labels["model_name"] for s in _of(after, names.tokens) if "model_name" in s.labels}
    if model in models:
        # on both pages: a counter that this model does not have is none, whatever other models have of it
        before, after = ([s for s in page if s.labels.get("model_name") == model] for page in (before, after))
    keys = ("tokens", "requests", "drafts", "offered", "accepted")
    found = {key: _grown(before, after, getattr(names, key)) for key in keys}
    positions = _by_position(before, after, names.by_position)
    if wrong := _impossible(found, positions):
        return Counted(names.engine, how=wrong)
    tau, rounds, how = _tau(found)
    gauges = {name: value for name in names.gauges if (value := _gauge(after, name)) is not None}
    return Counted(
        names.engine,
        rounds=rounds,
        offered=found["offered"],
        accepted=found["accepted"],
        accepted_by_position=positions,
        tokens=found["tokens"],
        tau=tau,
        how=how,
        gauges=gauges,
        all_models=model is not None and bool(models) and model not in models,
    )


def _impossible(found: Mapping[str, int | None], positions: Sequence[int]) -> str:
    """Why no figure can be made of this growth; empty where it is possible."""
    if any(value is not None and value < 0 for value in (*found.values(), *positions)):
        return "its counters fell during the run: it was restarted"
    accepted, drafts = found["accepted"], found["drafts"]
    # accepted tokens may be more than the emitted ones, as replies are trimmed at their ends
    most, of = (found["tokens"], "generated") if found["offered"] is None else (found["offered"], "drafted")
    pairs = (
        ("accepted tokens", accepted, f"{of} tokens", most),
        ("accepted tokens by position", sum(positions), "accepted tokens", accepted),
        # a round emits one token at least
        ("drafts", drafts, "generated tokens", found["tokens"]),
        ("accepted tokens of one position", max(positions, default=0), "drafts", drafts),
    )
    for name, part, bound, whole in pairs:
        if part is not None and whole is not None and part > whole:
            return f"its counters contradict each other: {part} {name}, {whole} {bound}"
    return ""


def _tau(found: Mapping[str, int | None]) -> tuple[float | None, int | None, str]:
    """Tokens per round, rounds, and from which counters; None where they do not suffice."""
    drafts, accepted, tokens, requests = (found[key] for key in ("drafts", "accepted", "tokens", "requests"))
    if drafts and accepted is not None:
        return 1 + accepted / drafts, drafts, "1 + accepted / drafts, before replies are trimmed at their ends"
    # a reply's first token comes from its prompt
    emitted = None if tokens is None or not requests else tokens - requests
    if drafts and emitted is not None and emitted >= drafts:
        return emitted / drafts, drafts, "(generated tokens - requests) / verifications"
    if accepted and emitted is not None and emitted > accepted:
        rounds = emitted - accepted
        return emitted / rounds, rounds, "rounds = generated tokens - requests - accepted; each emits one of its own"
    drafted = drafts or accepted or found["offered"]
    return None, None, "it counted drafts, and not what they emitted" if drafted else ""


def _by_position(before: Sequence[Series], after: Sequence[Series], name: str | None) -> list[int]:
    """Growth of each position, nothing where one of them cannot be told."""
    labels = {s.labels.get("position", "") for s in _of(after, name)} if name else set()
    ordered = sorted((label for label in labels if _POSITION.fullmatch(label)), key=int)
    grown = [_grown(before, after, name, label) for label in ordered]
    return [value for value in grown if value is not None] if None not in grown else []


def _grown(
    before: Sequence[Series], after: Sequence[Series], name: str | None, position: str | None = None
) -> int | None:
    """A counter's growth; None where the engine has none, or where a page's value cannot be a count."""
    end = None if name is None else _total(after, name, position)
    if name is None or end is None:
        return None
    start = _total(before, name, position)
    # a counter that appears with its first use was 0 before
    grown = end - (0.0 if start is None else start)
    return None if math.isnan(grown) else round(grown)


def _of(page: Sequence[Series], name: str) -> list[Series]:
    """All series of a counter or gauge: of every engine and rank."""
    return [s for s in page if s.name in (name, f"{name}_total")]


def _total(page: Sequence[Series], name: str, position: str | None = None) -> float | None:
    """The sum of a counter's series; None without any, NaN where one cannot be a count."""
    found = [s.value for s in _of(page, name) if position is None or s.labels.get("position") == position]
    if not found:
        return None
    return sum(found) if all(0 <= value <= MOST_COUNT for value in found) else math.nan


def _gauge(page: Sequence[Series], name: str) -> float | None:
    """The mean of its ranks."""
    found = [s.value for s in _of(page, name) if math.isfinite(s.value)]
    # divided first: a sum may be beyond a float's range
    return sum(value / len(found) for value in found) if found else None
