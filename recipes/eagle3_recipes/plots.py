"""One picture of a sweep: every seed a dot, the mean a mark. Knows records; matplotlib is the extra `plot`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from eagle3_recipes.results import Record, label
from eagle3_recipes.sweep import Sweep

DPI = 110
# Okabe and Ito: told apart by all eyes
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
MARKS = "osD^vP*X"


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
        _draw_dots(figure.subplots(), measured, label)
        figure.set_size_inches(6, 1 + 0.3 * len({label(r) for r in measured}))
    figure.suptitle(sweep.question, fontsize=10)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return True


def _draw_training(figure: Any, records: Sequence[Record]) -> None:
    """tau by variant and mode; beside it held-out alpha by step."""
    variants = _values(records, "variant")
    figure.set_size_inches(9, 1.6 + 0.42 * len(variants))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_dots(left, records, lambda r: r["variant"])
    for i, variant in enumerate(variants):
        rows = [r for r in records if r["variant"] == variant]
        steps = [k for k in range(99) if f"train.alpha.{k}" in rows[0]]
        values = [[r[f"train.alpha.{k}"] for r in rows if f"train.alpha.{k}" in r] for k in steps]
        colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
        right.plot(steps, [mean(v) for v in values], color=colour, marker=mark, ms=4, lw=1.2, label=variant)
        right.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, lw=0)
    right.set_xlabel("TTT step")
    right.set_ylabel("held-out alpha")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(fontsize=7)
    right.grid(alpha=0.3)


def _draw_dots(axes: Any, records: Sequence[Record], name: Callable[[Record], str]) -> None:
    """A line per name, a colour per mode: seeds as dots, their mean as a bar."""
    names = list(dict.fromkeys(map(name, records)))
    modes = list(dict.fromkeys((r["mode"], r["temperature"]) for r in records))
    several = len({temperature for _, temperature in modes}) > 1
    for m, (mode, temperature) in enumerate(modes):
        colour, shift = COLOURS[m % len(COLOURS)], 0.5 * ((m + 0.5) / len(modes) - 0.5)
        for y, one in enumerate(names):
            found = [r for r in records if (name(r), r["mode"], r["temperature"]) == (one, mode, temperature)]
            if not found:
                continue
            values = [r["tau"] for r in found]
            shown = f"{mode} T={temperature:g}" if several else mode
            axes.plot(values, [y + shift] * len(values), ".", color=colour, ms=7, alpha=0.6, label=None)
            axes.plot(mean(values), y + shift, "|", color=colour, ms=13, mew=2.5, label=shown if y == 0 else None)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("tau (tokens per round)")
    axes.grid(axis="x", alpha=0.3)
    if len(modes) > 1:
        axes.legend(fontsize=8)


def _draw_lines(figure: Any, records: Sequence[Record], axes_of: dict[str, Any]) -> None:
    """tau over `x`, a line per value of `line`, a panel per value of `panel`."""
    drafted = [r for r in records if "depth" in r]
    panels = _values(drafted, axes_of.get("panel", []))
    figure.set_size_inches(1.5 + 3 * len(panels), 3.4)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    lines = _values(drafted, axes_of.get("line", []))
    for axes, panel in zip(row, panels, strict=True):
        inside = [r for r in drafted if _value(r, axes_of.get("panel", [])) == panel]
        for i, line in enumerate(lines):
            rows = [r for r in inside if _value(r, axes_of.get("line", [])) == line]
            points: dict[Any, list[float]] = {}
            for record in sorted(rows, key=lambda r: r[axes_of["x"]]):
                points.setdefault(record[axes_of["x"]], []).append(record["tau"])
            if not points:
                continue
            colour, mark = COLOURS[i % len(COLOURS)], MARKS[i % len(MARKS)]
            axes.plot(list(points), [mean(v) for v in points.values()], color=colour, marker=mark, ms=4, label=line)
            dots = [(x, y) for x, values in points.items() for y in values]
            axes.plot(*zip(*dots, strict=True), ".", color=colour, ms=3, alpha=0.5)
        axes.set_title(_titled(axes_of.get("panel", []), panel), fontsize=9)
        axes.set_xlabel(axes_of["x"])
        axes.grid(alpha=0.3)
    row[0].set_ylabel("tau (tokens per round)")
    row[-1].legend(fontsize=7, title=_titled(axes_of.get("line", []), ""), title_fontsize=7)


def _values(records: Sequence[Record], names: Any) -> list[str]:
    return list(dict.fromkeys(_value(r, names) for r in records))


def _value(record: Record, names: Any) -> str:
    return ", ".join(str(record.get(name)) for name in ([names] if isinstance(names, str) else names))


def _titled(names: Any, value: str) -> str:
    title = names if isinstance(names, str) else ", ".join(names)
    return f"{title} {value}".strip()
