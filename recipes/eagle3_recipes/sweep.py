"""A sweep file: a base, what differs for all runs, and the variants. Knows YAML, and nothing of what runs."""

import os
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from eagle3.config import read_yaml, unknown_key
from eagle3.errors import ConfigError
from eagle3_recipes.budget import Budget, parse_budget

Settings = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One question and the runs that answer it.

    Args:
        path: the file; its stem is the sweep's name.
        extends: recipe of the trainer, relative to the file; None = nothing is trained, the variants are settings of
            eagle3-infer.
        set: trainer's settings of all runs, dotted.
        variants: name -> what differs in it: trainer's settings, or `evaluate.` ones; the first is the one that
            others are compared with.
        grid: setting -> values, instead of variants: every combination is one.
        seeds: of training; of sampling where nothing is trained.
        budget: of every training run, unless the command line gives one.
        evaluate: flags of eagle3-infer, with _ for -; several temperatures are run one after the other. The file may
            name a YAML file of them instead.
        idle: whether the machine does nothing else, so that speeds mean something; they are shown only then.
        plot: settings among the CSV's columns that the plot shows where nothing is trained: `x`, a name, and `line` and
            `panel`, each a name or a list of names.
    Raises:
        ConfigError: an unknown key, nothing to vary, or a value of the wrong kind.
    """

    path: Path
    extends: str | None = None
    set: Settings = field(default_factory=dict)
    variants: dict[str, Settings] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    budget: Budget | None = None
    evaluate: Settings = field(default_factory=dict)
    idle: bool = False
    plot: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def trains(self) -> bool:
        return self.extends is not None

    @property
    def base(self) -> Path | None:
        return None if self.extends is None else Path(os.path.normpath(self.path.parent / self.extends))

    @property
    def question(self) -> str:
        """The file's first comment, without its mark."""
        first = self.path.read_text(encoding="utf-8").splitlines()[:1]
        return first[0].lstrip("# ").removeprefix("Question: ") if first and first[0].startswith("#") else self.name


def read_sweep(path: Path | str) -> Sweep:
    """A sweep from its file, grid and all.

    Raises:
        ConfigError: see Sweep.
    """
    path = find_sweep(path)
    content = read_yaml(path)
    known = {f.name for f in fields(Sweep)} - {"path"}
    for key in content:
        if key not in known:
            raise unknown_key(str(key), known, str(path))
    if isinstance(content.get("evaluate"), str):
        content["evaluate"] = read_yaml(path.parent / content["evaluate"])
    for key in ("set", "variants", "grid", "evaluate", "plot"):
        if not isinstance(content.setdefault(key, {}), dict):
            raise ConfigError(f"{path}: {key} is {content[key]!r}; it must be a mapping")
    if bool(content["variants"]) == bool(content["grid"]):
        raise ConfigError(f"{path}: give either variants or grid")
    content["variants"] = content["variants"] or _combinations(path, content["grid"])
    for name, given in content["variants"].items():
        if not isinstance(given, dict | None):
            raise ConfigError(f"{path}: variant {name} is {given!r}; it must be a mapping of settings")
    content["variants"] = {str(name): given or {} for name, given in content["variants"].items()}
    _check_plot(path, content["plot"])
    if not isinstance(content.get("extends"), str | None):
        raise ConfigError(f"{path}: extends is {content['extends']!r}; it must be a recipe's path")
    if not isinstance(content.get("idle", False), bool):
        raise ConfigError(f"{path}: idle is {content['idle']!r}; it must be true or false")
    if "budget" in content:
        content["budget"] = parse_budget(str(content["budget"]))
    if content.get("extends") is None and (content["set"] or content.get("budget")):
        raise ConfigError(f"{path}: set and budget are of training, and there is no extends; give evaluate")
    return Sweep(path, **{**content, "seeds": check_seeds(content.get("seeds", [0]), str(path))})


def find_sweep(name: Path | str) -> Path:
    """The file of that name, also without .yaml."""
    path = Path(name)
    return path if path.suffix in (".yaml", ".yml") else path.with_name(path.name + ".yaml")


def check_seeds(seeds: Any, where: str) -> tuple[int, ...]:
    """Raises ConfigError unless they are distinct whole numbers."""
    wrong = not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds)
    if wrong or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{where}: seeds is {seeds!r}; it must be a list of different whole numbers, such as [0, 1]")
    return tuple(seeds)


def _check_plot(path: Path, plot: dict[str, Any]) -> None:
    if wrong := set(plot) - {"x", "line", "panel"}:
        raise unknown_key(f"plot.{wrong.pop()}", {"plot.x", "plot.line", "plot.panel"}, str(path))
    if plot and not isinstance(plot.get("x"), str):
        raise ConfigError(f"{path}: plot.x is {plot.get('x')!r}; it must be a column's name")
    for axis in ("line", "panel"):
        names = plot.get(axis, [])
        if not isinstance(names, str | list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{path}: plot.{axis} is {names!r}; it must be a column's name, or a list of them")


def _combinations(path: Path, grid: dict[str, Any]) -> dict[str, Settings]:
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} is {values!r}; it must be a list of values")
    names = list(grid)
    chosen = [dict(zip(names, values, strict=True)) for values in product(*grid.values())]
    return {",".join(f"{k.rpartition('.')[2]}={v}" for k, v in one.items()): one for one in chosen}
