"""One table of a sweep: means over seeds, their spread, and what the spread covers. Also as CSV, a row per run,
temperature and mode."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from eagle3.files import replace_file
from eagle3_recipes.results import Record, mode_rows

UNTOLD = "~"
SPREAD = "± is half the range over seeds; all answer the same prompts, so it is not the error of the measurement"
ALONE = "figures without ± are of one seed, whose spread is not known: differences are no findings"
GREEDY = "(at T=0 nothing is drawn: one seed is all)"
OTHER_REPLIES = "above T=0 rules other than match answer with other texts: their figures are of other replies"
MINUTES = "minutes are of updates; the run that fills a feature store computes the target's features in them"


@dataclass(frozen=True)
class Column:
    """A figure of a group of records: the same variant (and mode, where modes have rows) under several seeds."""

    title: str
    pick: Callable[[Record], float | None]
    digits: int = 3
    # whether its rows are told from the first one, or not
    judged: bool = False


@dataclass(frozen=True)
class Cell:
    """A figure's values, one a seed; a value is missing where a run is unfinished."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def half_range(self) -> float:
        return (max(self.values) - min(self.values)) / 2

    def text(self, digits: int) -> str:
        if not self.values:
            return "-"
        spread = f" ±{self.half_range:.{digits}f}" if len(self.values) > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"

    def overlaps(self, other: "Cell") -> bool:
        """Whether the ranges of two figures meet: their difference is then no finding."""
        if not self.values or not other.values:
            return False
        return max(self.values) >= min(other.values) and max(other.values) >= min(self.values)


def training_table(results: Sequence[Record], idle: bool) -> str:
    """A row per variant."""
    modes = list(
        dict.fromkeys((e["temperature"], key) for r in results for e in r["evaluations"] for key in e["modes"])
    )
    several = len({temperature for temperature, _ in modes}) > 1
    columns: list[Column] = []
    for place in modes:
        label = f"{place[1]}{f' T={place[0]:g}' if several else ''}"
        columns.append(Column(f"{label} tau", _of_mode(place, "tau"), judged=True))
        if idle:
            columns.append(Column(f"{label} vs plain", _of_mode(place, "speedup_vs_plain"), 2))
    steps = {len(r["training"]["alpha"]) for r in results if r["training"]}
    if len(steps) == 1:
        # a chain as deep as the rollout: taus of several rollouts do not compare
        columns.append(Column("held-out tau", lambda r: r["training"] and r["training"]["tau"], judged=True))
    columns += [Column(f"alpha {k}", _alpha(k), judged=True) for k in range(max(steps, default=0))]
    columns.append(Column("tokens", lambda r: r["training"] and r["training"]["tokens"], 0))
    columns.append(Column("minutes", lambda r: r["training"] and r["training"]["update_seconds"] / 60, 1))
    groups: dict[str, list[Record]] = {}
    for one in results:
        groups.setdefault(one["variant"], []).append(one)
    return _text(list(groups.items()), columns, ALONE, [MINUTES])


def inference_table(records: Sequence[Record], idle: bool) -> str:
    """A row per variant and mode."""
    columns = [Column("tau", lambda r: r.get("tau")), Column("nodes/round", lambda r: r.get("nodes_per_round"), 1)]
    columns.append(Column("used", lambda r: r.get("utilisation"), 3))
    if idle:
        columns += [
            Column("tok/s", lambda r: r.get("tokens_per_second"), 1),
            Column("vs plain", lambda r: r.get("speedup_vs_plain"), 2),
            Column("vs HF", lambda r: r.get("speedup_vs_hf"), 2),
        ]
    drawn = any(r.get("temperature") and r.get("rule", "match") != "match" for r in records)
    alone = f"{ALONE} {GREEDY}" if any(r.get("temperature") == 0 for r in records) else ALONE
    return _text(mode_rows(records), columns, alone, [OTHER_REPLIES] if drawn else [])


def write_csv(records: Iterable[Record], path: Path) -> None:
    """Every record, unrounded; a column for every name that any of them has."""
    rows = list(records)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with replace_file(path) as file:
        # as elsewhere in a text file; the default ends lines as Windows does
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _text(
    groups: Sequence[tuple[str, list[Record]]], columns: Sequence[Column], alone: str, more: Sequence[str]
) -> str:
    """A line per group; `alone` is said where a cell holds one seed, `more` always."""
    cells = [
        [Cell(tuple(v for r in rows if (v := column.pick(r)) is not None)) for column in columns] for _, rows in groups
    ]
    first = cells[0] if cells else []
    lines = [["variant", *(column.title for column in columns), "runs"]]
    for (name, rows), row in zip(groups, cells, strict=True):
        shown = [cell.text(column.digits) for cell, column in zip(row, columns, strict=True)]
        if row is not first:
            pairs = zip(columns, row, first, strict=True)
            untold = [column.judged and len(a.values) > 1 and a.overlaps(b) for column, a, b in pairs]
            shown = [text + UNTOLD * mark for text, mark in zip(shown, untold, strict=True)]
        whole = sum(bool(r.get("complete", r.get("status") == "done")) for r in rows)
        lines.append([name, *shown, f"{whole}" if whole == len(rows) else f"{whole} of {len(rows)}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    told = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    seeds = {len(cell.values) for row in cells for cell in row}
    notes = [SPREAD] if any(count > 1 for count in seeds) else []
    if 1 in seeds:
        notes.append(alone)
    if any(UNTOLD in cell for line in lines[1:] for cell in line[1:]):
        notes.append(f"{UNTOLD} the ranges of this and of the first row meet: no difference was found")
    return "\n".join([told[0], "-" * len(told[0]), *told[1:], *notes, *more])


def _of_mode(place: tuple[float, str], figure: str) -> Callable[[Record], float | None]:
    def pick(result: Record) -> float | None:
        for evaluation in result["evaluations"]:
            if evaluation["temperature"] == place[0] and place[1] in evaluation["modes"]:
                return evaluation["modes"][place[1]][figure]
        return None

    return pick


def _alpha(k: int) -> Callable[[Record], float | None]:
    return lambda r: r["training"]["alpha"][k] if r["training"] and k < len(r["training"]["alpha"]) else None
