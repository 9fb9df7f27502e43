"""One picture of a sweep: every seed a dot, the mean a mark. Knows records; matplotlib is the extra `plot`."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from eagle3.config import unknown_key
from eagle3.errors import ConfigError
from eagle3.files import replace_file
from eagle3_infer.config import RuleConfig, TreeConfig
from eagle3_recipes.plan import PlannedRun
from eagle3_recipes.results import Record, mode_rows, planned_rows
from eagle3_recipes.sweep import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
# Okabe and Ito: told apart by all eyes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
MARKS = "osD^vP*X"
TAU = "tau (tokens per round)"
# what may tell two modes of a sweep apart
_SETTINGS = ("variant", "temperature", *(field.name for kind in (TreeConfig, RuleConfig) for field in fields(kind)))
# by panel and line, then by x: records that differ in their seed alone
Points = dict[tuple[str, str], dict[Any, list[Record]]]


def check_plot(sweep: Sweep, runs: Sequence[PlannedRun]) -> None:
    """Raises ConfigError for runs that cannot be drawn as the sweep says: no such column, or see points_of."""
    rows = [] if sweep.trains or not sweep.plot else planned_rows(runs)
    if not rows:
        return
    known = {name for row in rows for name in row}
    for axis, names in sweep.plot.items():
        for name in [names] if isinstance(names, str) else names:
            if name not in known:
                raise unknown_key(name, known, f"{sweep.path}: plot.{axis}")
    try:
        points_of(rows, sweep.plot)
    except ConfigError as error:
        raise ConfigError(f"{sweep.path}: {error}") from None


def draw(sweep: Sweep, records: Sequence[Record], path: Path) -> bool:
    """Write the picture, whole; False: there is nothing to show yet. Raises ConfigError as points_of."""
    figure = figure_of(sweep, records)
    if figure is None:
        return False
    with replace_file(path, binary=True) as file:
        figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return True


def figure_of(sweep: Sweep, records: Sequence[Record]) -> "Figure | None":
    """The picture; None: there is nothing to show yet. Raises ConfigError as points_of."""
    from matplotlib.figure import Figure

    measured = [r for r in records if r.get("tau") is not None]
    if sweep.plot and not sweep.trains:
        measured = [r for r in measured if "depth" in r]
    if not measured:
        return None
    figure = Figure(layout="constrained")
    if sweep.trains:
        _draw_training(figure, measured)
    elif sweep.plot:
        _draw_lines(figure, measured, sweep.plot)
    else:
        rows = mode_rows(measured)
        _draw_dots(figure.subplots(), rows)
        figure.set_size_inches(6, 1 + 0.3 * len(rows))
    figure.suptitle(sweep.question, fontsize=10)
    return figure


def points_of(records: Sequence[Record], plot: dict[str, Any]) -> tuple[Points, list[str]]:
    """What the lines go through, and the names of the modes that have no `x`.

    Raises:
        ConfigError: two modes on one point, which are no seeds of one another; nothing has x, or it holds numbers and
            words.
    """
    x, line_of, panel_of = _axes(plot)
    left_out: list[str] = []
    points: Points = {}
    for name, group in mode_rows(records):
        first = group[0]
        if first.get(x) is None:
            left_out.append(name)
            continue
        line = points.setdefault((_value(first, panel_of), _value(first, line_of)), {})
        if first[x] in line:
            apart = [name for name in _SETTINGS if first.get(name) != line[first[x]][0].get(name)]
            raise ConfigError(
                f"plot: two modes at {x} {first[x]} differ in {', '.join(apart or ['title'])}, and would be drawn as "
                "seeds of one; add it to plot.line or plot.panel"
            )
        line[first[x]] = group
    if not points:
        raise ConfigError(f"plot.x: no mode has {x}")
    if len({isinstance(at, str) for line in points.values() for at in line}) > 1:
        raise ConfigError(f"plot.x: {x} holds numbers and words, which have no order")
    return points, left_out


def _draw_training(figure: Any, records: Sequence[Record]) -> None:
    """tau by variant, a panel per mode; beside it held-out alpha by step, in the variants' colours."""
    variants = list(dict.fromkeys(r["variant"] for r in records))
    modes = list(dict.fromkeys((r["mode"], r["temperature"]) for r in records))
    several = len({temperature for _, temperature in modes}) > 1
    figure.set_size_inches(2.6 + 2.4 * (len(modes) + 1), 1.5 + 0.4 * len(variants))
    *panels, last = figure.subplots(1, len(modes) + 1)
    for axes, (mode, temperature) in zip(panels, modes, strict=True):
        shown = [r for r in records if (r["mode"], r["temperature"]) == (mode, temperature)]
        _draw_dots(axes, [(name, [r for r in shown if r["variant"] == name]) for name in variants])
        axes.set_title(f"{mode} T={temperature:g}" if several else mode, fontsize=9)
        if axes is not panels[0]:
            axes.set_yticklabels([])
    for i, variant in enumerate(variants):
        _draw_alpha(last, [r for r in records if r["variant"] == variant], i)
    last.set_title("held-out alpha", fontsize=9)
    last.set_xlabel("TTT step")
    last.xaxis.get_major_locator().set_params(integer=True)
    last.grid(alpha=0.3)


def _draw_alpha(axes: Any, rows: Sequence[Record], place: int) -> None:
    """A variant's line, between its seeds' lowest and highest."""
    values: list[list[float]] = []
    while found := [r[name] for r in rows if (name := f"train.alpha.{len(values)}") in r]:
        values.append(found)
    steps, look = range(len(values)), _look(place)
    axes.plot(steps, [mean(v) for v in values], ms=4, lw=1.2, **look)
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=look["color"], alpha=0.15, lw=0)


def _draw_dots(axes: Any, rows: Sequence[tuple[str, Sequence[Record]]]) -> None:
    """A row per name: seeds as dots, their mean as a bar."""
    for y, (_, records) in enumerate(rows):
        values = [r["tau"] for r in records]
        if values:
            axes.plot(values, [y] * len(values), ".", color=_look(y)["color"], ms=8, alpha=0.5)
            axes.plot(mean(values), y, "|", color=_look(y)["color"], ms=16, mew=2.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(TAU)
    axes.grid(axis="x", alpha=0.3)


def _draw_lines(figure: Any, records: Sequence[Record], plot: dict[str, Any]) -> None:
    """tau over `x`, a line per value of `line`, a panel per value of `panel`."""
    x, line_of, _ = _axes(plot)
    points, left_out = points_of(records, plot)
    panels, lines = (list(dict.fromkeys(place[i] for place in points)) for i in (0, 1))
    figure.set_size_inches(2.4 + 3.2 * len(panels), 3.6)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for i, line in enumerate(lines):
            taus = [(at, [r["tau"] for r in group]) for at, group in sorted(points.get((panel, line), {}).items())]
            axes.plot([at for at, _ in taus], [mean(values) for _, values in taus], ms=4, label=line, **_look(i))
            dots = [(at, tau) for at, values in taus for tau in values]
            axes.plot([at for at, _ in dots], [tau for _, tau in dots], ".", ms=3, alpha=0.5, color=_look(i)["color"])
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)
    if left_out:
        figure.supxlabel(f"without {x}, not shown: {', '.join(left_out)}", fontsize=7)
    row[0].set_ylabel(TAU)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title=_named(line_of), title_fontsize=8)


def _look(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)]}


def _axes(plot: dict[str, Any]) -> tuple[str, Any, Any]:
    """Its x, line and panel."""
    return plot["x"], plot.get("line", []), plot.get("panel", [])


def _value(record: Record, names: Any) -> str:
    return ", ".join(str(record.get(name)) for name in ([names] if isinstance(names, str) else names))


def _named(names: Any) -> str:
    return names if isinstance(names, str) else ", ".join(names)
