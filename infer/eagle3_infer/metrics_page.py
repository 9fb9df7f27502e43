"""What a serving engine's `/metrics` page (Prometheus' text format) says of drafting. Knows no HTTP.

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


def count(before: Sequence[Series], after: Sequence[Series], model: str | None = None) -> Counted | None:
    """What the engine did between two pages; None where the page is of no known engine.

    Args:
        model: its series alone, where the page tells several models apart.
    """
    names = next((names for names in ENGINES if _total(after, names.tokens, model) is not None), None)
    if names is None:
        return None

    def grown(name: str | None) -> int | None:
        end = None if name is None else _total(after, name, model)
        # a counter that appears with its first use was 0 before
        return None if name is None or end is None else round(end - (_total(before, name, model) or 0.0))

    found = {key: grown(getattr(names, key)) for key in ("tokens", "requests", "drafts", "offered", "accepted")}
    if any(value is not None and value < 0 for value in found.values()):
        return Counted(names.engine, how="its counters fell during the run: it was restarted")
    tau, rounds, how = _tau(found)
    positions = _by_position(before, after, names.by_position, model) if names.by_position else []
    gauges = {name: value for name in names.gauges if (value := _gauge(after, name, model)) is not None}
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
        all_models=_names_others(after, names.tokens, model),
    )


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
    return None, None, ""


def _by_position(before: Sequence[Series], after: Sequence[Series], name: str, model: str | None) -> list[int]:
    positions = {s.labels.get("position", "") for s in _of(after, name, model)}
    ordered = sorted(int(position) for position in positions if position.isdigit())
    return [
        round((_total(after, name, model, str(p)) or 0.0) - (_total(before, name, model, str(p)) or 0.0))
        for p in ordered
    ]


def _of(page: Sequence[Series], name: str, model: str | None) -> list[Series]:
    """All series of a counter or gauge: of every engine and rank, and of one model where several are told apart."""
    found = [s for s in page if s.name in (name, f"{name}_total") and math.isfinite(s.value)]
    named = [s for s in found if s.labels.get("model_name") == model]
    return named or found


def _names_others(page: Sequence[Series], name: str, model: str | None) -> bool:
    """Whether a counter tells models apart and does not know this one."""
    models = {s.labels["model_name"] for s in _of(page, name, None) if "model_name" in s.labels}
    return model is not None and bool(models) and model not in models


def _total(page: Sequence[Series], name: str, model: str | None, position: str | None = None) -> float | None:
    found = [s for s in _of(page, name, model) if position is None or s.labels.get("position") == position]
    return sum(s.value for s in found) if found else None


def _gauge(page: Sequence[Series], name: str, model: str | None) -> float | None:
    """The mean of its ranks."""
    found = [s.value for s in _of(page, name, model)]
    return sum(found) / len(found) if found else None
