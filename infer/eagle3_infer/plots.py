"""The report as PNG charts for papers (`--plot DIR`). Reads the report's dict only; draws with matplotlib, an extra."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3.errors import ConfigError
from eagle3.files import replace_file
from eagle3_infer.levels import FEW_ROUNDS, Point, context_order, shares_given, shares_overall
from eagle3_infer.names import mode_title
from eagle3_infer.parts import PART_NAMES, seconds_by_part
from eagle3_infer.table import drafts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
WIDTH = 6.4
# Okabe and Ito's, which the colour-blind can tell apart
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999999", "#D55E00", "#F0E442")
DARK, HOLLOW = "#222222", "white"
MARKERS = "osD^vPX*"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "legend.fontsize": 8,
    # a mode's name is no formula
    "text.parse_math": False,
}


class Mode(NamedTuple):
    """A mode of the report by the name that charts give it."""

    key: str
    title: str
    figures: dict[str, Any]


class Dot(NamedTuple):
    """A share or mean at one place of the x axis, and how many rounds it stands for."""

    x: int
    y: float
    rounds: int


def check_matplotlib() -> None:
    """Raises ConfigError where there is none."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install '.[plot]' brings it")


def write_charts(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write a PNG of 200 dpi per chart that the report has figures for; the folder is made, files are replaced whole.

    Returns:
        The files. What is not among them has nothing to show: no drafting mode, no baseline, one bucket of context.
    Raises:
        ConfigError: no matplotlib.
    """
    check_matplotlib()
    import matplotlib

    folder.mkdir(exist_ok=True)
    modes = [Mode(key, mode_title(key, figures), figures) for key, figures in report["modes"].items()]
    # an argument may hold bytes that are no text
    command = shlex.join(["eagle3-infer", *report["run"]["argv"]]).encode("utf-8", "backslashreplace").decode()
    files = []
    for name, draw in CHARTS.items():
        with matplotlib.rc_context(STYLE):
            figure, path = draw(modes), folder / f"{name}.png"
            if figure is None:
                # an earlier run's would be taken for this one's
                path.unlink(missing_ok=True)
            else:
                files.append(_save(figure, path, command))
    return files


def tau_chart(modes: Sequence[Mode]) -> Figure | None:
    """Tau by mode, pooled, and the mean over prompts beside it."""
    modes = [mode for mode in modes if mode.figures["tau"] is not None]
    if not modes:
        return None
    figure, axes = _bars(modes)
    values = [mode.figures["tau"] for mode in modes]
    bars = axes.barh(range(len(modes)), values, 0.65, color=COLOURS[0], label="all rounds pooled")
    axes.bar_label(bars, [f"{value:.2f}" for value in values], label_type="center", color="white")
    # a server's counters know no prompts
    known = [(at, mode.figures["tau_prompt_mean"]) for at, mode in enumerate(modes)]
    known = [(at, mean) for at, mean in known if mean is not None]
    if known:
        means, places = [mean for _, mean in known], [at for at, _ in known]
        axes.plot(means, places, "D", color=COLOURS[1], markersize=4, label="mean over prompts")
    axes.set_xlabel("tau: tokens per round")
    _legend_above(figure)
    return figure


def speedup_chart(modes: Sequence[Mode]) -> Figure | None:
    """Speedup by mode against each baseline that was run, with the spread of the repeats."""
    names = {"speedup_vs_plain": "vs plain decoding", "speedup_vs_hf": "vs HF generate"}
    names = {key: name for key, name in names.items() if any(mode.figures[key] is not None for mode in modes)}
    modes = [mode for mode in modes if any(mode.figures[key] is not None for key in names)]
    if len(modes) < 2:
        return None
    figure, axes = _bars(modes, rows=len(names))
    height = 0.8 / len(names)
    for i, (key, name) in enumerate(names.items()):
        known = [(at, mode.figures) for at, mode in enumerate(modes) if mode.figures[key] is not None]
        places = [at + (i - (len(names) - 1) / 2) * height for at, _ in known]
        values = [figures[key] for _, figures in known]
        bars = axes.barh(places, values, height * 0.92, color=COLOURS[i], label=name)
        spreads = [figures[f"{key}_spread"] for _, figures in known]
        errors = [[v - low for v, (low, _) in zip(values, spreads, strict=True)]]
        errors += [[high - v for v, (_, high) in zip(values, spreads, strict=True)]]
        if any(map(any, errors)):
            axes.errorbar(values, places, xerr=errors, fmt="none", ecolor=DARK, capsize=2, linewidth=1)
        ink = ("white", DARK)[i]
        axes.bar_label(bars, [f"{value:.2f}x" for value in values], label_type="center", color=ink, fontsize=8)
    axes.axvline(1, color=DARK, linewidth=0.8)
    axes.set_xlabel("speedup, prefill excluded")
    _legend_above(figure)
    return figure


def acceptance_chart(modes: Sequence[Mode]) -> Figure | None:
    """By level: share accepted given that the level before was, and share of all rounds."""
    modes = [mode for mode in modes if mode.figures["rounds"] and any(mode.figures["accepted_by_level"])]
    if not modes:
        return None
    from matplotlib.ticker import MaxNLocator

    figure, (given, overall) = _panels(2)
    for i, (_, title, figures) in enumerate(modes):
        accepted, rounds = figures["accepted_by_level"], figures["rounds"]
        _line(given, i, title, _by_level(shares_given(accepted, rounds)))
        _line(overall, i, None, _by_level(shares_overall(accepted, rounds)))
    for axes, title in ((given, "given that the level before was accepted"), (overall, "of all rounds")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("level of the tree")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    given.set_ylabel("share accepted")
    _legend_below(figure)
    return figure


def _by_level(shares: Sequence[Point]) -> list[Dot]:
    return [Dot(at, point.share, point.rounds) for at, point in enumerate(shares, 1) if point.share is not None]


def cost_chart(modes: Sequence[Mode]) -> Figure | None:
    """Milliseconds of a round by part, stacked; what a token costs is written at the end."""
    modes = [mode for mode in modes if mode.figures["rounds"] and mode.figures["tau"]]
    if not modes:
        return None
    figure, axes = _bars(modes)
    ends = [0.0] * len(modes)
    parts = [seconds_by_part(mode.figures) for mode in modes]
    for i, (part, name) in enumerate(PART_NAMES.items()):
        spent = [
            1000 * seconds.get(part, 0.0) / mode.figures["rounds"] for seconds, mode in zip(parts, modes, strict=True)
        ]
        # what no mode spent time on needs no place in the legend
        if any(spent):
            axes.barh(range(len(modes)), spent, 0.65, left=ends, color=COLOURS[i], label=name)
        ends = [end + ms for end, ms in zip(ends, spent, strict=True)]
    for at, (end, mode) in enumerate(zip(ends, modes, strict=True)):
        axes.text(end, at, f"  {end:.1f} / {mode.figures['tau']:.2f} = {end / mode.figures['tau']:.1f}", va="center")
    axes.set_xlim(0, 1.42 * max(ends))
    axes.set_xlabel("milliseconds per round (/ tokens per round = milliseconds per token)")
    _legend_above(figure)
    return figure


def context_chart(modes: Sequence[Mode]) -> Figure | None:
    """Tau by tokens of context, of the modes that draft."""
    modes = [mode for mode in modes if drafts(mode.key, mode.figures)]
    buckets = context_order({name for mode in modes for name in mode.figures["by_context"]})
    if len(buckets) < 2:
        return None
    figure, (axes,) = _panels(1)
    for i, (_, title, figures) in enumerate(modes):
        groups = [(at, figures["by_context"].get(name)) for at, name in enumerate(buckets)]
        _line(axes, i, title, [Dot(at, group["tau"], group["rounds"]) for at, group in groups if group])
    axes.set_xticks(range(len(buckets)), buckets)
    axes.margins(x=0.1)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("tokens of context when the round began")
    axes.set_ylabel("tau: tokens per round")
    _legend_below(figure)
    return figure


CHARTS: dict[str, Callable[[Sequence[Mode]], Figure | None]] = {
    "tau": tau_chart,
    "speedup": speedup_chart,
    "acceptance": acceptance_chart,
    "cost": cost_chart,
    "context": context_chart,
}


def _bars(modes: Sequence[Mode], rows: int = 1) -> tuple[Figure, Axes]:
    """A chart with a place for every mode, the first on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.1 + (0.18 + 0.16 * rows) * len(modes)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(modes)), [mode.title for mode in modes])
    axes.set_ylim(len(modes) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    return figure, axes


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def _line(axes: Axes, number: int, title: str | None, dots: Sequence[Dot]) -> None:
    """A mode's line; one that stands on few rounds is hollow there."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)]
    places, values = [dot.x for dot in dots], [dot.y for dot in dots]
    axes.plot(places, values, color=colour, marker=marker, markersize=5, label=title)
    few = [dot for dot in dots if dot.rounds < FEW_ROUNDS]
    if few:
        axes.plot(
            [dot.x for dot in few], [dot.y for dot in few], marker, color=colour, markerfacecolor=HOLLOW, markersize=5
        )


def _legend_above(figure: Figure) -> None:
    figure.legend(loc="outside upper center", ncols=len(PART_NAMES))


def _legend_below(figure: Figure) -> None:
    hollow = any(line.get_markerfacecolor() == HOLLOW for axes in figure.axes for line in axes.lines)
    title = f"hollow: fewer than {FEW_ROUNDS} rounds" if hollow else None
    figure.legend(loc="outside lower center", ncols=4, title=title, title_fontsize=8)


def _save(figure: Figure, path: Path, command: str) -> Path:
    with replace_file(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Description": command})
    return path
