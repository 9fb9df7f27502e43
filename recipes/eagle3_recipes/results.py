"""What a run left on disk, as records: one per variant, seed, temperature and mode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError
from eagle3_infer.names import mode_title
from eagle3_infer.settings import CHAIN
from eagle3_recipes.plan import Evaluation, PlannedRun

Record = dict[str, Any]


# what a file of another version lacks, or holds in another shape
_OTHER_KEYS = (KeyError, IndexError, TypeError, ValueError, AttributeError)


def trained(run: PlannedRun) -> bool:
    """Whether its training came to its end; raises ConfigError as training_figures."""
    return training_figures(run) is not None


def evaluated(run: PlannedRun, evaluation: Evaluation) -> bool:
    """Whether its evaluation's report lies there, whole; raises ConfigError for one of another version."""
    return evaluation_figures(run, evaluation) is not None


def unmeasured(run: PlannedRun) -> Record:
    """The result of a run of which nothing is known but its settings."""
    place = {"variant": run.variant, "seed": run.seed, "settings": run.given, "folder": str(run.folder)}
    return {**place, "complete": False, "training": None, "evaluations": []}


def result(run: PlannedRun) -> Record:
    """What is known of a run so far: its settings, its training, and the figures of each evaluation's modes.

    Raises:
        ConfigError: a record or report of another version.
    """
    training = None if run.training is None else training_figures(run)
    evaluations = [figures for e in run.evaluations if (figures := evaluation_figures(run, e)) is not None]
    complete = len(evaluations) == len(run.evaluations) and (run.training is None or training is not None)
    return {**unmeasured(run), "complete": complete, "training": training, "evaluations": evaluations}


def evaluation_figures(run: PlannedRun, evaluation: Evaluation) -> Record | None:
    """Of every mode; None: there is no whole report. Raises ConfigError for one of another version."""
    file = run.report(evaluation)
    report = _read(file)
    if not report.get("modes"):
        return None
    try:
        return {
            "temperature": evaluation.temperature,
            "seconds": sum(mode["seconds"] for mode in report["modes"].values()),
            "prompts": len({row["id"] for row in report["outputs"]}),
            "modes": {key: mode_figures(key, mode) for key, mode in report["modes"].items()},
        }
    except _OTHER_KEYS as error:
        raise _other_version(file, error, file) from error


def training_figures(run: PlannedRun) -> Record | None:
    """Size and length of the training, and its last held-out figures; None: it has not ended.

    `update_seconds` are of all parts of a resumed run; `wall_seconds`, loading and all, None where a part was killed.

    Raises:
        ConfigError: a record of another version, or without an evaluation.
        OSError: a record that cannot be read.
    """
    record = _read(run.head / "run.json")
    if record.get("ended") is None or not (run.head / "last").is_dir():
        return None
    try:
        return _training_figures(run, record)
    except (FileNotFoundError, *_OTHER_KEYS) as error:
        raise _other_version(f"{run.head}: run.json or metrics.jsonl", error, run.head) from error


def _training_figures(run: PlannedRun, record: Record) -> Record:
    lines = [json.loads(line) for line in (run.head / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [line for line in lines if line.get("split") == "eval"]
    if not held_out:
        raise ConfigError(f"{run.head}/metrics.jsonl holds no evaluation; move {run.head} away to have it made anew")
    parts = [part.get("seconds") for part in [*record["previous"], record]]
    wall = None if None in parts else sum(parts)
    updates = record["train_seconds"] if "train_seconds" in record else _update_seconds(lines)
    kept = ("tau", "loss", "alpha", "accept", "accept_chain", "coverage")
    sizes = {key: record[key] for key in ("step", "tokens", "parameters")}
    return {**sizes, "update_seconds": updates, "wall_seconds": wall, **{key: held_out[-1][key] for key in kept}}


def _update_seconds(lines: list[Record]) -> float:
    """Of a run whose record is older than `train_seconds`: by the speeds that it logged."""
    seconds, before = 0.0, 0
    for line in lines:
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - before) / line["tokens_per_second"]
            before = line["tokens"]
    return seconds


def records(results: list[Record]) -> list[Record]:
    """A row for every mode of every evaluation; a run without any has one row, without figures."""
    rows: list[Record] = []
    for one in results:
        training = one["training"] or {}
        head = {"variant": one["variant"], "seed": one["seed"], "status": "done" if one["complete"] else "unfinished"}
        head |= _given(one["settings"])
        head |= {f"train.{k}": v for k, v in training.items() if not isinstance(v, list)}
        for name in ("alpha", "accept", "accept_chain"):
            head |= {f"train.{name}.{k}": value for k, value in enumerate(training.get(name, ()))}
        modes = [
            {"temperature": evaluation["temperature"], "mode": key, **mode}
            for evaluation in one["evaluations"]
            for key, mode in evaluation["modes"].items()
        ]
        rows += [{**head, **mode} for mode in modes] or [head]
    return rows


def planned_rows(runs: Sequence[PlannedRun]) -> list[Record]:
    """The rows that drafting modes of the runs will have, without figures."""
    return [
        {
            "variant": run.variant,
            **_given(run.given),
            "temperature": evaluation.temperature,
            "mode": plan.key,
            **_names(plan.key, {"settings": plan.settings, "lossy": not plan.settings["lossless"]}),
        }
        for run in runs
        for evaluation in run.evaluations
        for plan in evaluation.settings.plans()
        if plan.settings
    ]


def mode_rows(records: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    """Records that differ in their seed alone, by the name that a table or a picture shows of them."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((record["variant"], record.get("temperature"), record.get("mode")), []).append(record)
    variants, temperatures = ({key[i] for key in groups if key[i] is not None} for i in (0, 1))

    def name(record: Record) -> str:
        parts = [record["variant"]] if len(variants) > 1 else []
        parts += [f"T={record['temperature']:g}"] if len(temperatures) > 1 and "mode" in record else []
        return "  ".join([*parts, record.get("title", "-")])

    return [(name(rows[0]), rows) for rows in groups.values()]


def _given(settings: Record) -> Record:
    return {f"set.{key}": _cell(value) for key, value in settings.items()}


def _names(key: str, mode: Record) -> Record:
    """A mode's settings, and what tables and plots call it; `shape` is that of a line over nodes."""
    settings = {k: v for k, v in mode["settings"].items() if k != "lossless"}
    kind = shape = key.partition("[")[0]
    if "depth" in settings and kind != CHAIN:
        weight = settings.get("level_weight", 1)
        shape = f"{kind} d{settings['depth']}k{settings['top_k']}{'' if weight == 1 else f'w{weight:g}'}"
    return {**settings, "title": mode_title(key, mode), "kind": kind, "shape": shape}


def mode_figures(key: str, mode: Record) -> Record:
    """The figures of a mode that tables and plots show."""
    figures = ("tau", "tau_prompt_mean", "tokens", "rounds", "nodes_per_round", "utilisation", "tokens_per_second")
    speeds = {k: mode[k] for k in ("speedup_vs_plain", "speedup_vs_hf")}
    rates = [n / mode["rounds"] for n in mode["accepted_by_level"]] if mode["rounds"] else []
    return {
        **_names(key, mode),
        **{key: mode[key] for key in figures},
        **speeds,
        "loop_share": mode["loops"]["share"],
        **{f"level.{k + 1}": rate for k, rate in enumerate(rates)},
    }


def _other_version(record: Path | str, error: Exception, made: Path) -> ConfigError:
    what = f"{type(error).__name__}: {error}"
    return ConfigError(f"{record} is not as this version writes it ({what}); move {made} away to have it made anew")


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _read(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
