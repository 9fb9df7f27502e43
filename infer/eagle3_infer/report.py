"""From outputs to the report of DESIGN section 9: counting and dividing, nothing of models or terminals."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low
from typing import Any

from eagle3_infer.loops import in_loop, outside_loops
from eagle3_infer.request import STAGES, Result
from eagle3_infer.settings import HF, PLAIN

SCHEMA = 1
CONTEXT_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Output(Result):
    """The result of one turn of one prompt in one mode.

    `seconds` sum to its share of the wall time: what ran for several requests at once is divided among them, so that
    sums over requests are times of the whole batch.
    """

    mode: str
    id: str
    category: str
    turn: int
    text: str
    prompt_set: str = ""

    @property
    def place(self) -> tuple[str, int]:
        return self.id, self.turn

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def decode_seconds(self) -> float:
        return self.total_seconds - self.seconds["prefill"]


@dataclass
class ModeRun:
    """All outputs of one mode, one list per repeat, in the order they were run."""

    key: str
    settings: dict[str, Any]
    repeats: list[list[Output]] = field(default_factory=list)
    peak_memory_bytes: int | None = None

    @property
    def complete(self) -> dict[int, list[Output]]:
        """The repeats that an interrupt did not cut short, by their number."""
        return {i: repeat for i, repeat in enumerate(self.repeats) if len(repeat) == len(self.repeats[0])}

    @property
    def outputs(self) -> list[Output]:
        """The repeat of median speed, the lower of two: the one every figure but the speedups is taken from."""
        ranked = sorted(self.complete.values(), key=lambda outputs: decode_rate(outputs) or 0.0)
        return ranked[(len(ranked) - 1) // 2] if ranked else []

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each complete repeat."""
        rates = [decode_rate(repeat) for repeat in self.complete.values()]
        return [rate for rate in rates if rate is not None]

    @property
    def lossy(self) -> bool:
        """Whether its rule may emit what the target would not."""
        return not self.settings.get("lossless", True)

    def of_set(self, name: str) -> "ModeRun":
        """Of the same run, what one set of the prompts gave."""
        return replace(self, repeats=[[o for o in outputs if o.prompt_set == name] for outputs in self.repeats])

    def speedups(self, baseline: "ModeRun | None") -> list[float]:
        """Of each repeat against the baseline's run in the same repeat, which met the same state of the machine."""
        if baseline is None:
            return []
        theirs = baseline.complete
        ratios = [speedup(repeat, theirs[i]) for i, repeat in self.complete.items() if i in theirs]
        return [ratio for ratio in ratios if ratio is not None]


@dataclass(frozen=True)
class Divergence:
    """Where the tokens of `mode` left those of `reference`; `kind` is numeric, bug or unclassified."""

    id: str
    turn: int
    mode: str
    reference: str
    position: int
    kind: str = "unclassified"
    gap: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Pair:
    """How two modes' outputs compare."""

    mode: str
    reference: str
    compared: int
    identical: int


@dataclass(frozen=True)
class Comparison:
    """Which modes emitted the same; `not_compared` tells of a mode why its tokens need not be the others'."""

    pairs: list[Pair] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    not_compared: dict[str, str] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[Divergence]:
        return [d for d in self.divergences if d.kind == kind]


def build_report(run: dict[str, Any], modes: Sequence[ModeRun], comparison: Comparison) -> dict[str, Any]:
    """The JSON document; every mode that produced an output is in it."""
    modes = [mode for mode in modes if mode.outputs]
    by_key = {mode.key: mode for mode in modes}
    return {
        "schema": SCHEMA,
        "run": run,
        "modes": {mode.key: summarise_mode(mode, by_key) for mode in modes},
        "verify": summarise_verify(comparison),
        "outputs": [output_row(output) for mode in modes for output in mode.outputs],
    }


def summarise_mode(mode: ModeRun, by_key: dict[str, ModeRun]) -> dict[str, Any]:
    """DESIGN section 9, where `tau_prompt_mean` pools each prompt's turns, and beside it: `settings` (tree and rule;
    empty where nothing is drafted), `lossy`, `loops` (share, tau_outside), `mean_logprob` (null unless asked for),
    `*_spread` ([lowest, highest] of the repeats), and `by_set`, which is empty unless several sets of prompts are
    run."""
    outputs = mode.outputs
    rates = mode.rates
    nodes = sum(o.nodes for o in outputs)
    conflicts, pairs = (sum(o.path_conflict[i] for o in outputs) for i in (0, 1))
    offered = _sum_levels(o.offered_by_level for o in outputs)
    # as many levels as were offered, also where the last ones were never accepted
    accepted = _sum_levels([[0] * len(offered), *(o.accepted_by_level for o in outputs)])
    stages = {stage: sum(o.seconds.get(stage, 0.0) for o in outputs) for stage in STAGES}
    vs_plain, vs_hf = (mode.speedups(by_key.get(name)) for name in (PLAIN, HF))
    return {
        "settings": mode.settings,
        "lossy": mode.lossy,
        **_pooled(outputs),
        "tau_prompt_mean": _mean([t for turns in grouped(outputs, "id").values() if (t := tau(turns)) is not None]),
        "seconds": sum(stages.values()),
        "tokens_per_second_spread": _spread(rates),
        "end_to_end_tokens_per_second": _ratio(
            sum(len(o.token_ids) for o in outputs), sum(o.total_seconds for o in outputs)
        ),
        "speedup_vs_plain": median_low(vs_plain) if vs_plain else None,
        "speedup_vs_plain_spread": _spread(vs_plain),
        "speedup_vs_hf": median_low(vs_hf) if vs_hf else None,
        "speedup_vs_hf_spread": _spread(vs_hf),
        "seconds_by_stage": stages,
        "offered_by_level": offered,
        "accepted_by_level": accepted,
        "nodes_per_round": _ratio(nodes, sum(o.rounds for o in outputs)),
        "utilisation": _ratio(sum(accepted), nodes),
        "path_conflict": _ratio(conflicts, pairs),
        "run_length_hist": _histogram(outputs),
        "by_set": {name: _of_set(mode, name, by_key) for name in dict.fromkeys(o.prompt_set for o in outputs) if name},
        "by_category": {name: _pooled(group) for name, group in grouped(outputs, "category").items()},
        "by_context": tau_by_context(outputs),
        "loops": loop_figures(outputs),
        "mean_logprob": mean_logprob(outputs),
        "peak_memory_bytes": mode.peak_memory_bytes,
    }


def _of_set(mode: ModeRun, name: str, by_key: dict[str, ModeRun]) -> dict[str, Any]:
    """What `_pooled` tells, and the speedups, of one set of the prompts."""
    own, others = mode.of_set(name), {key: other.of_set(name) for key, other in by_key.items()}
    speedups = {f"speedup_vs_{short}": own.speedups(others.get(key)) for short, key in (("plain", PLAIN), ("hf", HF))}
    return _pooled(own.outputs) | {key: median_low(ratios) if ratios else None for key, ratios in speedups.items()}


def summarise_verify(comparison: Comparison) -> dict[str, Any]:
    return {
        "compared": sum(pair.compared for pair in comparison.pairs),
        "identical": sum(pair.identical for pair in comparison.pairs),
        "numeric": [asdict(d) for d in comparison.of_kind("numeric")],
        "bugs": [asdict(d) for d in comparison.of_kind("bug")],
        "unclassified": [asdict(d) for d in comparison.of_kind("unclassified")],
        "pairs": [asdict(pair) for pair in comparison.pairs],
        "not_compared": [{"mode": mode, "reason": reason} for mode, reason in comparison.not_compared.items()],
    }


def output_row(output: Output) -> dict[str, Any]:
    keys = ("id", "category", "turn", "mode", "prompt_tokens", "token_ids", "text", "rounds", "run_lengths")
    row = {key: getattr(output, key) for key in (*keys, "finish_reason")} | {"seconds": output.total_seconds}
    return row if output.logprobs is None else row | {"logprobs": output.logprobs}


def tau(outputs: Iterable[Output]) -> float | None:
    """Tokens emitted in rounds per round, pooled; None when there was no round."""
    outputs = list(outputs)
    return _ratio(sum(sum(o.run_lengths) for o in outputs), sum(o.rounds for o in outputs))


def decode_rate(outputs: Sequence[Output]) -> float | None:
    """Tokens per second without the prefill and the token that it yields."""
    return _ratio(sum(sum(o.run_lengths) for o in outputs), sum(o.decode_seconds for o in outputs))


def speedup(outputs: Sequence[Output], baseline: Sequence[Output]) -> float | None:
    """Ratio of decode rates over the turns that both ran (an interrupted run has fewer)."""
    shared = {o.place for o in outputs} & {o.place for o in baseline}
    fast = decode_rate([o for o in outputs if o.place in shared])
    slow = decode_rate([o for o in baseline if o.place in shared])
    return None if fast is None or not slow else fast / slow


def loop_figures(outputs: Iterable[Output]) -> dict[str, float | None]:
    """The share of tokens inside repetition loops (`loops.in_loop`), and tau over the rounds outside them."""
    inside = total = tokens = rounds = 0
    for output in outputs:
        marks = in_loop(output.token_ids)
        outside = outside_loops(marks, output.run_lengths)
        inside, total = inside + sum(marks), total + len(marks)
        tokens, rounds = tokens + outside.tokens, rounds + outside.rounds
    return {"share": _ratio(inside, total), "tau_outside": _ratio(tokens, rounds)}


def mean_logprob(outputs: Iterable[Output]) -> float | None:
    """Over all tokens; None where they were not asked for."""
    return _mean([logprob for output in outputs for logprob in output.logprobs or ()])


def grouped(outputs: Iterable[Output], name: str) -> dict[str, list[Output]]:
    """By the value of that field, in the order of their first."""
    groups: dict[str, list[Output]] = {}
    for output in outputs:
        groups.setdefault(getattr(output, name), []).append(output)
    return groups


def tau_by_context(outputs: Iterable[Output]) -> dict[str, dict[str, Any]]:
    """Tau by how many tokens (prompt and reply) were committed when the round began."""
    emitted, rounds = Counter[int](), Counter[int]()
    for output in outputs:
        context = output.prompt_tokens + 1
        for run in output.run_lengths:
            bucket = sum(context >= edge for edge in CONTEXT_EDGES)
            emitted[bucket] += run
            rounds[bucket] += 1
            context += run
    return {
        context_name(bucket): {
            "tokens": emitted[bucket],
            "rounds": rounds[bucket],
            "tau": emitted[bucket] / rounds[bucket],
        }
        for bucket in sorted(rounds)
    }


def context_name(bucket: int) -> str:
    """0 -> "0-127", 1 -> "128-255", ..., the last one open."""
    low = 0 if bucket == 0 else CONTEXT_EDGES[bucket - 1]
    return f"{low}-{CONTEXT_EDGES[bucket] - 1}" if bucket < len(CONTEXT_EDGES) else f"{low}+"


def _pooled(outputs: Sequence[Output]) -> dict[str, Any]:
    return {
        "tokens": sum(len(o.token_ids) for o in outputs),
        "rounds": sum(o.rounds for o in outputs),
        "tau": tau(outputs),
        "tokens_per_second": decode_rate(outputs),
    }


def _histogram(outputs: Iterable[Output]) -> dict[str, int]:
    counts = Counter(run for o in outputs for run in o.run_lengths)
    return {str(length): counts[length] for length in sorted(counts)}


def _sum_levels(rows: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for row in rows:
        total += [0] * (len(row) - len(total))
        for level, count in enumerate(row):
            total[level] += count
    return total


def _spread(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
