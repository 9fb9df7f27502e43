"""One picture of a sweep: every seed a dot, the mean a mark. Knows records; matplotlib is the extra `plot`."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from eagle3_recipes.results import Record, mode_rows
from eagle3_recipes.sweep import Sweep

DPI = 110
# Okabe and Ito: told apart by all eyes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
MARKS = "osD^vP*X"
TAU = "tau (tokens per round)"


def draw(sweep: Sweep, records: Sequence[Record], path: Path) -> bool:
    """Write the picture; False: there is nothing to show yet."""
    measured = [r for r in records if r.get("tau") is not None]
    if not measured:
        return False
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    if sweep.trains:
        _draw_training(figure, measured)
    elif "x" in sweep.plot:
        _draw_lines(figure, measured, sweep.plot)
    else:
        rows = mode_rows(measured)
        _draw_dots(figure.subplots(), rows)
        figure.set_size_inches(6, 1 + 0.3 * len(rows))
    figure.suptitle(sweep.question, fontsize=10)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return True


def _draw_training(figure: Any, records: Sequence[Record]) -> None:
    """tau by variant, a panel per mode; beside it held-out alpha by step, in the variants' colours."""
    variants = _values(records, "variant")
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


def _draw_lines(figure: Any, records: Sequence[Record], axes_of: dict[str, Any]) -> None:
    """tau over `x`, a line per value of `line`, a panel per value of `panel`."""
    x, line_of, panel_of = axes_of["x"], axes_of.get("line", []), axes_of.get("panel", [])
    drafted = [r for r in records if "depth" in r]
    panels, lines = _values(drafted, panel_of), _values(drafted, line_of)
    figure.set_size_inches(2.4 + 3.2 * len(panels), 3.6)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        for i, line in enumerate(lines):
            points: dict[Any, list[float]] = {}
            for record in sorted(drafted, key=lambda r: r[x]):
                if (_value(record, panel_of), _value(record, line_of)) == (panel, line):
                    points.setdefault(record[x], []).append(record["tau"])
            axes.plot(list(points), [mean(v) for v in points.values()], ms=4, label=line, **_look(i))
            dots = [(at, tau) for at, values in points.items() for tau in values]
            axes.plot([at for at, _ in dots], [tau for _, tau in dots], ".", ms=3, alpha=0.5, color=_look(i)["color"])
        axes.set_title(panel, fontsize=9)
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)
    row[0].set_ylabel(TAU)
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, title=_named(line_of), title_fontsize=8)


def _look(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKS[place % len(MARKS)]}


def _values(records: Sequence[Record], names: Any) -> list[str]:
    return list(dict.fromkeys(_value(r, names) for r in records))


def _value(record: Record, names: Any) -> str:
    return ", ".join(str(record.get(name)) for name in ([names] if isinstance(names, str) else names))


def _named(names: Any) -> str:
    return names if isinstance(names, str) else ", ".join(names)
