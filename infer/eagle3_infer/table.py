"""The report as plain text: what `eagle3-infer` prints after a run. Reads the report's dict only."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from eagle3_infer.levels import Point, context_order, shares_given, shares_overall
from eagle3_infer.names import key_name, mode_name, mode_shape
from eagle3_infer.parts import WHOLE, seconds_by_part, timed_by_stage
from eagle3_infer.settings import HF, HF_ASSISTED, HF_PROMPT_LOOKUP, PLAIN
from eagle3_infer.unseen import columns, name_unseen

HEADER = ("mode", "shape", "tokens", "tau", "tok/s", "vs plain", "vs HF", "prefill", "draft", "verify", "rest")
SHOWN_DIVERGENCES = 12


class Group(NamedTuple):
    """A part of every mode's figures by which they are told apart, and which of its figures are shown."""

    part: str
    corner: str
    keys: tuple[str, ...]
    title: str


GROUPS = (
    Group("by_set", "set", ("tau", "tokens_per_second", "speedup_vs_plain"), "tau | tok/s | speedup by set"),
    Group("by_category", "category", ("tau", "tokens_per_second"), "tau | tok/s by category"),
    Group("by_context", "context", ("tau",), "tau by tokens of context"),
)


def render_report(report: dict[str, Any]) -> str:
    """Summary table, sets, categories, contexts, acceptance by level, loops, and whether the outputs are the same."""
    if not report["modes"]:
        return "nothing was measured"
    parts = [summary_table(report), *group_tables(report)]
    parts += [acceptance_lines(report), logprob_line(report), loop_lines(report), identity_lines(report["verify"])]
    # ids and texts of prompts and servers are anything
    return name_unseen("\n\n".join(part for part in parts if part))


def summary_table(report: dict[str, Any]) -> str:
    return align(summary_rows(report)) + "\n" + "\n".join(summary_notes(report))


def summary_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The header, and a row per mode."""
    return [HEADER] + [_summary_row(key, mode) for key, mode in report["modes"].items()]


def summary_notes(report: dict[str, Any]) -> list[str]:
    """What the summary's figures mean, and what of them is to be known."""
    modes = report["modes"]
    batch = report["run"].get("settings", {}).get("batch", 1)
    notes = [
        "tau: tokens per round; tok/s and speedups without the prefill; prefill ... rest in seconds.",
    ]
    if whole := [key_name(key) for key, mode in modes.items() if not timed_by_stage(mode)]:
        notes.append(f"Not timed by stage, so that rest is all of the decoding: {', '.join(whole)}.")
    if batch > 1:
        notes.append(f"Up to {batch} prompts at once: tok/s is what the whole batch emits.")
    if lossy := [key_name(key) for key, mode in modes.items() if mode["lossy"]]:
        notes.append(f"LOSSY: {', '.join(lossy)} may emit what the target would not.")
    slower = [key_name(k) for k, m in modes.items() if (m["speedup_vs_plain"] or 1) < 1 and drafts(k, m)]
    if slower:
        notes.append(f"Slower than plain decoding here: {', '.join(slower)}.")
    if any(_spread(mode["tokens_per_second_spread"]) for mode in modes.values()):
        notes.append("tok/s, speedups: median of the repeats (lowest - highest); a speedup is taken within a repeat.")
    return notes


def _summary_row(key: str, mode: dict[str, Any]) -> tuple[str, ...]:
    parts = seconds_by_part(mode)
    rest = parts.get("rest", parts.get(WHOLE))
    seconds = (mode["seconds_by_stage"]["prefill"], parts.get("draft"), parts.get("verify"), rest)
    return (
        mode_name(key, mode),
        mode_shape(mode),
        "-" if mode["tokens"] is None else str(mode["tokens"]),
        _number(mode["tau"]),
        _number(mode["tokens_per_second"], 1) + _spread(mode["tokens_per_second_spread"], 1),
        _times(mode["speedup_vs_plain"]) + _spread(mode["speedup_vs_plain_spread"]),
        _times(mode["speedup_vs_hf"]) + _spread(mode["speedup_vs_hf_spread"]),
        *map(_number, seconds),
    )


def _spread(values: Sequence[float] | None, digits: int = 2) -> str:
    """` (low - high)`, where the two differ."""
    low, high = values or (0.0, 0.0)
    return f" ({low:.{digits}f} - {high:.{digits}f})" if low != high else ""


def group_tables(report: dict[str, Any]) -> list[str]:
    """Tau, and speed where that is told, of every mode by set, category and context; nothing where there is but one."""
    return [f"{group.title}\n{align(rows)}" for group in GROUPS if (rows := group_rows(group, report))]


def group_rows(group: Group, report: dict[str, Any]) -> list[tuple[str, ...]]:
    """The header, and a row per group; empty when there is one group."""
    modes = {key: mode for key, mode in report["modes"].items() if group.part != "by_context" or drafts(key, mode)}
    # a report that was saved before there were sets has no such part
    parts = [mode.get(group.part, {}) for mode in modes.values()]
    names = list(dict.fromkeys(name for part in parts for name in part))
    if len(names) < 2:
        return []
    if group.part == "by_context":
        names = context_order(names)
    rows = [(group.corner, *(key_name(key) for key in modes))]
    for name in names:
        cells = [part.get(name) for part in parts]
        rows.append((name, *(_cell(cell, group.keys) for cell in cells)))
    return rows


def _cell(group: dict[str, Any] | None, keys: Sequence[str]) -> str:
    if group is None:
        return "-"
    return " | ".join(_FORMATS[key](group[key]) for key in keys)


def acceptance_lines(report: dict[str, Any]) -> str:
    """By level: share of rounds that accepted it, and the share given that the level before was."""
    rows = [("acceptance", "level 1, 2, ...", "given the level before")]
    for key, mode in report["modes"].items():
        accepted, rounds = mode["accepted_by_level"], mode["rounds"]
        if accepted and rounds:
            overall, given = shares_overall(accepted, rounds), shares_given(accepted, rounds)
            rows.append((key_name(key), _series(overall), _series(given)))
    return align(rows, left=3) if len(rows) > 1 else ""


def logprob_line(report: dict[str, Any]) -> str:
    told = {key: mode["mean_logprob"] for key, mode in report["modes"].items() if mode["mean_logprob"] is not None}
    cells = ", ".join(f"{key_name(key)} {value:.3f}" for key, value in told.items())
    return f"mean log-prob of a token under the target, at temperature 1: {cells}" if told else ""


def loop_lines(report: dict[str, Any]) -> str:
    """How much of the replies only repeats itself, and tau without that; nothing where nothing loops."""
    modes = {key: mode["loops"] for key, mode in report["modes"].items()}
    if not any(loops["share"] for loops in modes.values()):
        return ""
    shares = list(dict.fromkeys(f"{loops['share']:.0%}" for loops in modes.values() if loops["share"] is not None))
    named = ", ".join(f"{key_name(key)} {loops['share'] or 0:.0%}" for key, loops in modes.items())
    drafted = {key: loops["tau_outside"] for key, loops in modes.items() if drafts(key, report["modes"][key])}
    outside = ", ".join(f"{key_name(key)} {_number(value)}" for key, value in drafted.items())
    line = f"repetition loops: {shares[0] if len(shares) == 1 else named} of the tokens"
    return f"{line}; tau outside them: {outside}" if outside else line


def identity_lines(verify: dict[str, Any]) -> str:
    """Which modes gave the same tokens, and where one did not."""
    pairs = _telling_pairs(verify["pairs"])
    apart = _apart_lines(verify["not_compared"])
    if not pairs:
        return "\n".join(apart or ["outputs: one mode only, nothing to compare"])
    same = [p for p in pairs if p["identical"] == p["compared"]]
    lines = []
    if same:
        counts = {p["compared"] for p in same}
        span = f"{min(counts)}/{min(counts)} replies" if len(counts) == 1 else "all replies that both gave"
        lines.append(f"outputs: {', '.join(map(_pair, same))} ({span})")
    for pair in pairs:
        if pair not in same:
            left, right = key_name(pair["mode"]), key_name(pair["reference"])
            lines.append(f"outputs: {left} == {right} in {pair['identical']}/{pair['compared']} replies")
    lines += _divergence_lines(verify, {(p["mode"], p["reference"]) for p in pairs})
    if verify["unclassified"]:
        lines.append("  --verify tells rounding from a bug; --dtype float32 makes the comparison exact")
    lines += apart
    return "\n".join(lines)


def _apart_lines(rows: list[dict[str, str]]) -> list[str]:
    """One line for all modes that are not compared for the same reason."""
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        by_reason.setdefault(row["reason"], []).append(key_name(row["mode"]))
    return [f"outputs: {', '.join(names)} not compared: {reason}" for reason, names in by_reason.items()]


def _telling_pairs(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that follow from two others: of X == plain, plain == HF and X == HF, two are enough."""
    same = {(p["mode"], p["reference"]) for p in pairs if p["identical"] == p["compared"]}
    told = [p for p in pairs if PLAIN in (p["mode"], p["reference"])]
    if (PLAIN, HF) in same:
        return told
    return told + [p for p in pairs if p not in told and (p["mode"], PLAIN) not in same]


def _divergence_lines(verify: dict[str, Any], pairs: set[tuple[str, str]]) -> list[str]:
    rows = [row for kind in ("bugs", "numeric", "unclassified") for row in verify[kind]]
    rows = [row for row in rows if (row["mode"], row["reference"]) in pairs]
    lines = [_divergence_line(row) for row in rows[:SHOWN_DIVERGENCES]]
    if len(rows) > len(lines):
        lines.append(f"  ... and {len(rows) - len(lines)} more; --json lists all")
    return lines


def _pair(pair: dict[str, Any]) -> str:
    return f"{key_name(pair['mode'])} == {key_name(pair['reference'])}"


def _divergence_line(row: dict[str, Any]) -> str:
    where = f"prompt {row['id']}, turn {row['turn'] + 1}, token {row['position']}"
    label = {"bug": "BUG", "numeric": "numeric", "unclassified": "differs"}[row["kind"]]
    gap = "" if row["gap"] is None else f"; the two best logits are {row['gap']:.3g} apart"
    detail = f"; {row['detail']}" if row["detail"] else ""
    return f"  {label}: {key_name(row['mode'])} against {key_name(row['reference'])}, {where}{gap}{detail}"


def align(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """Columns padded with blanks, the first `left` of them to the left; a rule under the header."""
    rows = [[name_unseen(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in rows]
    widths = [max(columns(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [_padded(cell, width, i < left) for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(columns, lines)))
    return "\n".join(lines)


def _padded(cell: str, width: int, left: bool) -> str:
    blank = " " * (width - columns(cell))
    return cell + blank if left else blank + cell


def drafts(key: str, mode: dict[str, Any]) -> bool:
    """Whether the mode's tau says something: the engine's modes have a tree, transformers' do not."""
    return bool(mode["settings"]) or key in (HF_PROMPT_LOOKUP, HF_ASSISTED)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


_FORMATS: dict[str, Callable[[float | None], str]] = {
    "tau": _number,
    "tokens_per_second": partial(_number, digits=1),
    "speedup_vs_plain": _times,
}


def _series(points: Sequence[Point]) -> str:
    return " ".join(_number(point.share) for point in points)
