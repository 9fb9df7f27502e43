"""What a run left on disk, as records: one per variant, seed, temperature and mode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_infer.names import mode_title
from eagle3_recipes.plan import Evaluation, PlannedRun

Record = dict[str, Any]


def trained(run: PlannedRun) -> bool:
    """Whether its training came to its end."""
    return (run.head / "last").is_dir() and _read(run.head / "run.json").get("ended") is not None


def evaluated(run: PlannedRun, evaluation: Evaluation) -> bool:
    """Whether its evaluation's report lies there, whole."""
    return bool(_read(run.report(evaluation)).get("modes"))


def result(run: PlannedRun) -> Record:
    """What is known of a run so far: its settings, its training, and the figures of each evaluation's modes."""
    reports = [(e, _read(run.report(e))) for e in run.evaluations]
    evaluations = [
        {
            "temperature": evaluation.temperature,
            "seconds": sum(mode["seconds"] for mode in report["modes"].values()),
            "prompts": len({row["id"] for row in report["outputs"]}),
            "modes": {key: _mode(key, mode) for key, mode in report["modes"].items()},
        }
        for evaluation, report in reports
        if report.get("modes")
    ]
    whole = len(evaluations) == len(run.evaluations)
    return {
        "variant": run.variant,
        "seed": run.seed,
        "settings": run.given,
        "folder": str(run.folder),
        "complete": whole and (run.training is None or trained(run)),
        "training": training_figures(run) if run.training is not None else None,
        "evaluations": evaluations,
    }


def training_figures(run: PlannedRun) -> Record | None:
    """Size and length of the training, and its last held-out figures; None: it has not ended.

    `update_seconds` are of all parts of a resumed run; `wall_seconds`, loading and all, None where a part was killed.
    """
    if not trained(run):
        return None
    record = _read(run.head / "run.json")
    lines = [json.loads(line) for line in (run.head / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [line for line in lines if line.get("split") == "eval"][-1]
    parts = [part.get("seconds") for part in [*record["previous"], record]]
    wall = None if None in parts else sum(parts)
    updates = record["train_seconds"] if "train_seconds" in record else _update_seconds(lines)
    kept = ("tau", "loss", "alpha", "accept", "accept_chain", "coverage")
    sizes = {key: record[key] for key in ("step", "tokens", "parameters")}
    return {**sizes, "update_seconds": updates, "wall_seconds": wall, **{key: held_out[key] for key in kept}}


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
        head |= {f"set.{key}": _cell(value) for key, value in one["settings"].items()}
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


def _mode(key: str, mode: Record) -> Record:
    """The figures of a mode that tables and plots show."""
    settings = {k: v for k, v in mode["settings"].items() if k != "lossless"}
    settings["title"] = mode_title(key, mode)
    settings["kind"] = key.partition("[")[0]
    if settings.get("top_k", 1) > 1:
        # a line of a plot over nodes
        settings["shape"] = f"{settings['kind']} d{settings['depth']}k{settings['top_k']}"
    else:
        settings["shape"] = settings["kind"]
    figures = ("tau", "tau_prompt_mean", "tokens", "rounds", "nodes_per_round", "utilisation", "tokens_per_second")
    speeds = {k: mode[k] for k in ("speedup_vs_plain", "speedup_vs_hf")}
    rates = [n / mode["rounds"] for n in mode["accepted_by_level"]] if mode["rounds"] else []
    return {
        **settings,
        **{key: mode[key] for key in figures},
        **speeds,
        "loop_share": mode["loops"]["share"],
        **{f"level.{k + 1}": rate for k, rate in enumerate(rates)},
    }


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
