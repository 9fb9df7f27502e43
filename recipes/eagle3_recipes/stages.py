"""The stages of a run: its training, if it has one, then its evaluations; and what is kept of each."""

import shutil
from collections.abc import Callable
from functools import partial as bind
from pathlib import Path

from eagle3.files import write_json
from eagle3_recipes.execute import Stage
from eagle3_recipes.plan import (
    Evaluation,
    Options,
    PlannedRun,
    evaluation_command,
    partial,
    training_command,
)
from eagle3_recipes.results import evaluated, result, trained
from eagle3_recipes.sweep import Sweep


def stages(run: PlannedRun, sweep: Sweep, options: Options, threads: int) -> list[Stage]:
    """Their commands; a stage whose result lies there is done."""
    found: list[Stage] = []
    if run.training is not None:
        command = training_command(run, sweep, options, threads)
        log = run.folder / "train.log"
        found.append(Stage("train", command, log, bind(trained, run), _after(run, bind(_forget_checkpoints, run))))
    for evaluation in run.evaluations:
        report = run.report(evaluation)
        command = evaluation_command(run, evaluation, threads)
        name = f"evaluate T={evaluation.temperature:g}" if len(run.evaluations) > 1 else "evaluate"
        keep = _after(run, bind(_keep_report, run, evaluation))
        found.append(Stage(name, command, report.with_suffix(".log"), bind(evaluated, run, evaluation), keep))
    return found


def note_settings(run: PlannedRun) -> None:
    """What the run's identity is, beside it, before it starts."""
    identity = run.evaluations[0].without_temperature if run.training is None else run.training.identity
    run.folder.mkdir(parents=True, exist_ok=True)
    write_json(run.folder / "settings.json", identity.full)
    for evaluation in run.evaluations:
        write_json(run.settings(evaluation), evaluation.identity.full)


def _after(run: PlannedRun, first: Callable[[], None]) -> Callable[[], None]:
    def work() -> None:
        first()
        write_json(run.folder / "result.json", result(run))

    return work


def _forget_checkpoints(run: PlannedRun) -> None:
    """A training that has ended needs none, and they are large."""
    shutil.rmtree(run.head / "checkpoints", ignore_errors=True)


def _keep_report(run: PlannedRun, evaluation: Evaluation) -> None:
    report: Path = run.report(evaluation)
    part = partial(report)
    if part.is_file():
        part.replace(report)
