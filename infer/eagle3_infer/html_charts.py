"""Charts of the HTML report, each with its numbers in a table. Reads the report's dict only."""

from collections.abc import Callable, Sequence
from typing import Any

from eagle3_infer.figures import SERIES, Bar, Line, Stack, bars, lines, series_legend, stacks, text
from eagle3_infer.levels import FEW_ROUNDS, shares_given, shares_overall
from eagle3_infer.names import mode_title
from eagle3_infer.parts import PART_NAMES, ROUND_STAGES, seconds_by_part, timed_by_stage
from eagle3_infer.settings import HF, PLAIN
from eagle3_infer.table import drafts

# rounds that emit as many tokens or more are one part
MOST_EMITTED = 6

Modes = dict[str, dict[str, Any]]
Rows = Sequence[Sequence[str]]


def table(rows: Rows, kind: str = "") -> str:
    """The first row is the head; numbers are aligned by their class."""
    head, *body = rows
    cells = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    lines_ = [
        f'<tr><th scope="row">{text(row[0])}</th>{"".join(f"<td>{text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in body
    ]
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(lines_)}</tbody></table></div>"
    )


def figure(title: str, said: str, chart: str, rows: Rows) -> str:
    return (
        f"<figure><figcaption><h3>{text(title)}</h3><p>{text(said)}</p></figcaption>{chart}"
        f"<details><summary>Numbers</summary>{table(rows)}</details></figure>"
    )


def speed_figures(modes: Modes) -> str:
    """Tau, tokens per second, and the speedup against each baseline that was run."""
    drafted = any((mode["tau"] or 1) != 1 for mode in modes.values())
    parts = [
        _bar_figure(modes if drafted else {}, "Tau", "tokens per round; plain decoding has 1", "tau", mark=1.0),
        _bar_figure(modes, "Tokens per second", "of decoding, without the prefill", "tokens_per_second", digits=1),
        _speedup(modes, PLAIN, "speedup_vs_plain", "plain decoding"),
        _speedup(modes, HF, "speedup_vs_hf", "HF generate"),
    ]
    return f'<div class="grid">{"".join(parts)}</div>' if any(parts) else ""


def _speedup(modes: Modes, baseline: str, key: str, name: str) -> str:
    others = {k: mode for k, mode in modes.items() if k != baseline}
    said = "ratio of decode rates over the same replies; right of the line is faster"
    return _bar_figure(others, f"Speedup against {name}", said, key, unit="×", mark=1.0)


def _bar_figure(
    modes: Modes, title: str, said: str, key: str, digits: int = 2, unit: str = "", mark: float | None = None
) -> str:
    rows = [_bar(k, mode, key, digits, unit) for k, mode in modes.items() if mode[key]]
    if not rows:
        return ""
    if any(row.spread and row.spread[0] != row.spread[1] for row in rows):
        said += "; median of the repeats, whiskers from lowest to highest"
    head = ["mode", title.lower(), "lowest", "highest"]
    body = [(row.name, row.told, *(f"{v:.{digits}f}{unit}" for v in row.spread or (row.value,) * 2)) for row in rows]
    return figure(title, said, bars(rows, title, mark), [head, *body])


def _bar(key: str, mode: dict[str, Any], figure_key: str, digits: int, unit: str) -> Bar:
    value = mode[figure_key]
    told = f"{value:.{digits}f}{unit}"
    return Bar(mode_title(key, mode), value, told, mode.get(f"{figure_key}_spread"), quiet=not mode["settings"])


def acceptance_figures(modes: Modes) -> str:
    """Acceptance by level, conditional and not, and how many tokens the rounds emit."""
    emitted = {key: mode for key, mode in modes.items() if mode["run_length_hist"] and drafts(key, mode)}
    return _level_figures(modes) + _emitted_figure(emitted)


def _level_figures(modes: Modes) -> str:
    """Of the modes that tell it; transformers' do not."""
    drafting = [(mode_title(k, m), m) for k, m in modes.items() if m["rounds"] and any(m["accepted_by_level"])]
    if not drafting:
        return ""
    given = [Line(name, shares_given(m["accepted_by_level"], m["rounds"])) for name, m in drafting]
    overall = [Line(name, shares_overall(m["accepted_by_level"], m["rounds"])) for name, m in drafting]
    said = f"share of the rounds that reached the level; hollow: fewer than {FEW_ROUNDS} rounds"
    more = f"; the first {SERIES} of {len(drafting)} modes are drawn" if len(drafting) > SERIES else ""
    legend = series_legend([name for name, _ in drafting])
    return (
        legend
        + '<div class="grid">'
        + _line_figure("Given that the level before was accepted", said + more, given)
        + _line_figure("Of all rounds", "share of the rounds that accepted this level or more" + more, overall)
        + "</div>"
    )


def _line_figure(title: str, said: str, series: Sequence[Line]) -> str:
    levels = max(len(line.points) for line in series)
    head = ["mode", *(f"level {level}" for level in range(1, levels + 1))]
    rows = [
        [line.name, *("-" if p.share is None else f"{p.share:.3f}" for p in line.points)]
        + ["-"] * (levels - len(line.points))
        for line in series
    ]
    return figure(title, said, lines(series, title), [head, *rows])


def _emitted_figure(modes: Modes) -> str:
    """Shares of rounds by the tokens that they emit."""
    if not modes:
        return ""
    kinds = {f"n{n}": str(n) for n in range(1, MOST_EMITTED)} | {f"n{MOST_EMITTED}": f"{MOST_EMITTED} or more"}
    rows, numbers = [], []
    for key, mode in modes.items():
        counts = dict.fromkeys(kinds, 0)
        for length, count in mode["run_length_hist"].items():
            counts[f"n{min(int(length), MOST_EMITTED)}"] += count
        total = sum(counts.values())
        name, told = mode_title(key, mode), f"{total} rounds"
        rows.append(Stack(name, [(kind, count / total) for kind, count in counts.items()], told))
        numbers.append([name, str(total), *(str(count) for count in counts.values())])
    said = "shares of the rounds; one token is the target's own, with no draft accepted"
    chart = stacks(rows, kinds, "Tokens that rounds emit")
    return figure("Tokens per round", said, chart, [["mode", "rounds", *kinds.values()], *numbers])


def cost_figures(modes: Modes) -> str:
    """Milliseconds per emitted token by part, and all stages of a round in the table."""
    known = {key: mode for key, mode in modes.items() if mode["rounds"] and mode["tau"]}
    if not known:
        return ""
    rows = [_cost_row(mode_title(key, mode), mode) for key, mode in known.items()]
    numbers = [_cost_numbers(mode_title(key, mode), mode) for key, mode in known.items()]
    head = ["mode", *(f"{s.replace('_', ' ')}, ms/round" for s in ROUND_STAGES)]
    head += ["ms/round", "tokens/round", "ms/token", "prefill, s in all"]
    chart = stacks(rows, PART_NAMES, "Milliseconds per token")
    said = "milliseconds per emitted token, without the prefill; shorter is faster"
    return figure("Where the time of a token goes", said, chart, [head, *numbers])


def _cost_row(name: str, mode: dict[str, Any]) -> Stack:
    tokens = mode["rounds"] * mode["tau"]
    parts = [(part, 1000 * seconds / tokens) for part, seconds in seconds_by_part(mode).items()]
    return Stack(name, parts, f"{sum(value for _, value in parts):.1f} ms")


def _cost_numbers(name: str, mode: dict[str, Any]) -> list[str]:
    per_round = {stage: 1000 * mode["seconds_by_stage"][stage] / mode["rounds"] for stage in ROUND_STAGES}
    total, tau = sum(per_round.values()), mode["tau"]
    show: Callable[[float], str] = "{:.2f}".format if timed_by_stage(mode) else lambda _: "-"
    figures = [show(per_round[stage]) for stage in ROUND_STAGES]
    prefill = mode["seconds_by_stage"]["prefill"]
    return [name, *figures, f"{total:.2f}", f"{tau:.2f}", f"{total / tau:.2f}", f"{prefill:.2f}"]
