"""From a server's answers to the report of `report.py`: counting and dividing. What is not known is null."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

from eagle3_infer.endpoint import Reply
from eagle3_infer.metrics_page import Counted
from eagle3_infer.prompts import Prompt
from eagle3_infer.report import SCHEMA, Comparison, ModeRun, summarise_mode, summarise_verify
from eagle3_infer.request import STAGES

SERVER = "server"
_SHOWN_FAILURES = 5


@dataclass(frozen=True)
class Answer:
    """The reply to one turn of a prompt."""

    prompt: Prompt
    turn: int
    reply: Reply

    @property
    def first(self) -> float:
        """Seconds to the first token; a reply without text is all prefill."""
        return self.reply.seconds if self.reply.first is None else self.reply.first


@dataclass
class Repeat:
    """One run over all prompts.

    Args:
        answers: in the order of the prompts; failures: what became of the other requests.
        lost: from when to when a request was under way that got no answer, as it failed or was interrupted; in seconds
            since the run began.
        seconds: from its beginning to the last answer, however many requests were under way at once.
        counted: by the engine meanwhile; None where it has no page, or one that is not known.
    """

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lost: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0
    counted: Counted | None = None

    @property
    def share(self) -> float:
        """Seconds of the run per second that some request waited: 1 one at a time, 1/n with n at once."""
        waited = sum(answer.reply.seconds for answer in self.answers)
        # what came to nothing took its part of the run all the same, up to the last answer
        waited += sum(max(0.0, min(ended, self.seconds) - began) for began, ended in self.lost)
        return self.seconds / waited if waited else 0.0

    @property
    def answered(self) -> float:
        """Seconds of the run without the part of the requests that got no answer."""
        return sum(answer.reply.seconds for answer in self.answers) * self.share

    def rate(self, answers: Sequence[Answer] | None = None) -> float | None:
        """Tokens per second without the first of each reply and the time to it; None where tokens are not told."""
        answers = self.answers if answers is None else answers
        tokens = token_count(answers)
        decode = sum(answer.reply.seconds - answer.first for answer in answers) * self.share
        # an empty reply has no first token
        begun = sum(answer.reply.tokens != 0 for answer in answers)
        return None if tokens is None or not decode else (tokens - begun) / decode


def token_count(answers: Iterable[Answer]) -> int | None:
    counts = [answer.reply.tokens for answer in answers]
    return sum(count for count in counts if count is not None) if None not in counts else None


def middle(repeats: Sequence[Repeat]) -> Repeat:
    """The repeat of median speed, of those that answered most."""
    most = max(len(repeat.answers) for repeat in repeats)
    ranked = sorted((r for r in repeats if len(r.answers) == most), key=lambda r: r.rate() or 0.0)
    return ranked[(len(ranked) - 1) // 2]


def build_server_report(run: dict[str, Any], repeats: Sequence[Repeat], server: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: its one mode is `server`, its tokens have no ids.

    Args:
        server: what is known of the server before it was measured.
    """
    # an interrupt may come before the first
    shown = middle(repeats) if repeats else Repeat()
    modes = {SERVER: summarise_server(repeats, server)} if shown.answers else {}
    return {
        "schema": SCHEMA,
        "run": run,
        "modes": modes,
        "verify": summarise_verify(Comparison()),
        "outputs": [_row(answer) for answer in shown.answers],
    }


def summarise_server(repeats: Sequence[Repeat], server: dict[str, Any]) -> dict[str, Any]:
    """A mode's keys, null or empty where only the engine's own code could tell, and `server` beside them."""
    shown = middle(repeats)
    counted = shown.counted or Counted("unknown")
    tokens, answers = token_count(shown.answers), shown.answers
    prefill = sum(answer.first for answer in answers) * shown.share
    rates = [rate for repeat in repeats if (rate := repeat.rate()) is not None]
    return summarise_mode(ModeRun(SERVER, {}), {}) | {
        "tokens": tokens,
        "rounds": counted.rounds,
        "tau": counted.tau,
        "seconds": shown.answered,
        "tokens_per_second": shown.rate(),
        "tokens_per_second_spread": [min(rates), max(rates)] if rates else None,
        "end_to_end_tokens_per_second": _ratio(tokens, shown.answered),
        "seconds_by_stage": dict.fromkeys(STAGES, 0.0) | {"prefill": prefill, "other": shown.answered - prefill},
        "accepted_by_level": counted.accepted_by_position,
        "nodes_per_round": _ratio(counted.offered, counted.rounds),
        "utilisation": _ratio(counted.accepted, counted.offered),
        "by_category": _by(shown, [answer.prompt.category for answer in answers]),
        # no speedups: nothing was measured beside the server
        "by_set": {
            name: group | {"speedup_vs_plain": None, "speedup_vs_hf": None}
            for name, group in _by(shown, [answer.prompt.prompt_set for answer in answers]).items()
            if name
        },
        "server": server | _told(shown),
    }


def _told(repeat: Repeat) -> dict[str, Any]:
    """Latencies of the requests, failures, and the engine's counters as they grew."""
    tokens = [(answer, answer.reply.tokens) for answer in repeat.answers if answer.reply.tokens is not None]
    each = [(answer.reply.seconds - answer.first) / (count - 1) for answer, count in tokens if count > 1]
    return {
        "requests": len(repeat.answers),
        "failed": len(repeat.failures),
        "failures": repeat.failures[:_SHOWN_FAILURES],
        "first_token_seconds": spread([answer.first for answer in repeat.answers]),
        "request_seconds": spread([answer.reply.seconds for answer in repeat.answers]),
        "seconds_per_token": spread(each),
        "counted": None if repeat.counted is None else asdict(repeat.counted),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median, 90th percentile and most; None of nothing."""
    if not values:
        return None
    p90 = quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"median": median(values), "p90": p90, "max": max(values)}


def _by(repeat: Repeat, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures of the answers by their names, which are in the same order."""
    groups: dict[str, list[Answer]] = {}
    for name, answer in zip(names, repeat.answers, strict=True):
        groups.setdefault(name, []).append(answer)
    return {
        # rounds are counted for all requests together
        name: {"tokens": token_count(group), "rounds": None, "tau": None, "tokens_per_second": repeat.rate(group)}
        for name, group in groups.items()
    }


def _row(answer: Answer) -> dict[str, Any]:
    reply = answer.reply
    return {
        "id": answer.prompt.id,
        "category": answer.prompt.category,
        "turn": answer.turn,
        "mode": SERVER,
        "prompt_tokens": reply.prompt_tokens,
        "tokens": reply.tokens,
        "token_ids": None,
        "text": reply.text,
        "rounds": None,
        "run_lengths": None,
        "finish_reason": reply.finish_reason,
        "seconds": reply.seconds,
        "first_token_seconds": reply.first,
    }


def _ratio(top: int | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def server_lines(mode: dict[str, Any]) -> str:
    """Latencies and what the engine counted, as the terminal shows them below the table."""
    server = mode["server"]
    lines = [
        f"{name:<20}median {value['median']:.3f} s, 90 % within {value['p90']:.3f} s, most {value['max']:.3f} s"
        for name, value in (
            ("time to first token", server["first_token_seconds"]),
            ("whole request", server["request_seconds"]),
            ("per further token", server["seconds_per_token"]),
        )
        if value is not None
    ]
    return "\n".join([*lines, f"{'acceptance':<20}{_acceptance(server['counted'])}"])


def _acceptance(counted: dict[str, Any] | None) -> str:
    if counted is None:
        return (
            "unknown: the server shows no counters of drafts "
            "(SGLang shows them with --enable-metrics, TensorRT-LLM with return_perf_metrics)"
        )
    gauges = "".join(
        f"; {name} {value:.2f} (a recent window, not this run)" for name, value in counted["gauges"].items()
    )
    if counted["tau"] is None:
        return f"unknown: {counted['engine']}: {counted['how'] or 'its counters tell of no drafts'}{gauges}"
    return f"tau {counted['tau']:.2f} by {counted['engine']}'s counters: {counted['how']}{gauges}"
