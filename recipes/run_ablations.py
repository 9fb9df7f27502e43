"""Run a sweep: train and measure its variants under several seeds, and show them in one table.

    python recipes/run_ablations.py recipes/ablations/capture_layers
    python recipes/run_ablations.py recipes/ablations/loss --files chats.jsonl.gz --prompts mt_bench.jsonl --budget 5min
    python recipes/run_ablations.py recipes/ablations/tree_shape --dry-run

Every run is a process with a folder and a log of its own. What is done is not done again, by whatever sweep; what was
stopped goes on with the same command. A run that fails is told at the end, and the others go on.
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from eagle3.environment import usable_cores
from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_infer.command_line import Parser
from eagle3_infer.settings import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from eagle3_recipes.budget import parse_budget
from eagle3_recipes.execute import DONE, FAILED, Execution, Job, Stage
from eagle3_recipes.plan import Options, PlannedRun, plan
from eagle3_recipes.plots import check_plot
from eagle3_recipes.stages import note_settings, stages
from eagle3_recipes.summary import show
from eagle3_recipes.sweep import Sweep, check_seeds, read_sweep

EXIT_FAILED = 1
# of a process that a signal ended, plus the signal's number
EXIT_SIGNAL = 128


def build_parser() -> Parser:
    parser = Parser(
        description=__doc__,
        epilog="exit codes: 0 all done; 1 a run failed; 2 bad input; 130 interrupted, 143 terminated, 129 hung up",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("sweep", help="file of the sweep, with or without .yaml")
    add("--files", type=_words, default=(), metavar="LIST", help="chats to train on (default: the base recipe's)")
    add("--prompts", metavar="LIST", help="prompts to measure on (default: the sweep's)")
    add("--output", type=Path, default=Path("runs/ablations"), metavar="DIR", help="(default: %(default)s)")
    add("--budget", metavar="TEXT", help="of every training run: `200k tokens` or `5min` (default: the sweep's)")
    add("--seeds", metavar="LIST", help="(default: the sweep's)")
    add("--only", action="append", default=[], metavar="VARIANT", help="only this variant; may be repeated")
    add("--jobs", type=int, metavar="N", help="runs at once (default: 1, or the number of GPUs given)")
    add("--gpus", type=_words, default=(), metavar="LIST", help="GPUs, which the jobs take in turn, such as 0,1,2,3")
    add("--threads", type=int, metavar="N", help="of every run (default: the cores, divided among the jobs)")
    add("--store", type=Path, metavar="DIR", help="keep the target's features there, for all runs of the same layers")
    add("--log-with", type=_words, default=(), metavar="LIST", help="trackers; the sweep is one group of runs there")
    add("--dry-run", action="store_true", help="print the commands of what is not done, and run nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where a run failed, 2 on bad input (one line on stderr), 130 on ^C, 143 on SIGTERM, 129
    on SIGHUP."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup's children ignore it, and go on when the terminal closes
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _terminate)
    try:
        given = build_parser().parse_args(argv)
        sweep, options = read_sweep(given.sweep), _options(given)
        runs = plan(sweep, options, _tell_note)
        check_plot(sweep, runs)
        chosen = [run for run in runs if options.takes(run.variant)]
        jobs = [Job(run.name, run.folder, stages(run, sweep, options, _threads(options))) for run in chosen]
        if given.dry_run:
            return _print_commands(jobs)
        for run in chosen:
            note_settings(run)
        return _run(sweep, options, runs, jobs)
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run(sweep: Sweep, options: Options, runs: Sequence[PlannedRun], jobs: Sequence[Job]) -> int:
    """Run the jobs; show all runs of the sweep, also those that are no job of today."""
    print(f"{sweep.question}\n{len(jobs)} runs in {options.output / 'runs'}", flush=True)
    code = EXIT_OK
    try:
        Execution(jobs, options.places, tell=lambda text: print(text, flush=True)).run()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except SystemExit as end:
        code = int(end.code or EXIT_ERROR)
    try:
        show(sweep, options, runs)
    finally:
        # also where a full disk takes no table
        failed = _tell_unfinished(jobs)
    return code or (EXIT_FAILED if failed else EXIT_OK)


def _tell_unfinished(jobs: Sequence[Job]) -> bool:
    """Say what failed and what is left; whether any failed."""
    failed = [job for job in jobs if job.status == FAILED]
    for job in failed:
        print(f"\n{job.name}: {job.failure}", file=sys.stderr)
    if unfinished := sum(job.status != DONE for job in jobs):
        print(f"{unfinished} of {len(jobs)} runs are not done; the same command goes on", file=sys.stderr)
    return bool(failed)


def _tell_note(text: str) -> None:
    print(f"note: {' '.join(text.split())}", file=sys.stderr)


def _print_commands(jobs: Sequence[Job]) -> int:
    for job in jobs:
        left: list[Stage] = []
        why = ""
        try:
            for stage in job.stages:
                if not stage.done():
                    left.append(stage)
        # as in a run: its job ends there, and the others go on
        except (Eagle3Error, OSError) as error:
            why = one_line(error)
        print(f"# {job.name}{f': {why}' if why else '' if left else ': done'}")
        for stage in left:
            print(shlex.join(stage.command))
    return EXIT_OK


def _options(given: argparse.Namespace) -> Options:
    for name in ("jobs", "threads"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ConfigError(f"--{name} is {value}, expected at least 1")
    seeds = ()
    if given.seeds is not None:
        try:
            seeds = check_seeds(json.loads(f"[{given.seeds}]"), "--seeds")
        except ValueError:
            raise ConfigError(f"--seeds is {given.seeds!r}, expected whole numbers such as 0,1,2") from None
    return Options(
        output=given.output,
        files=given.files,
        prompts=given.prompts,
        budget=None if given.budget is None else parse_budget(given.budget),
        seeds=seeds,
        only=tuple(given.only),
        jobs=given.jobs or len(given.gpus) or 1,
        gpus=given.gpus,
        threads=given.threads,
        store=given.store,
        log_with=given.log_with,
    )


def _threads(options: Options) -> int:
    return options.threads or max(1, usable_cores() // options.jobs)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing, expected a comma list")
    return words


def _terminate(number: int, _frame: object) -> NoReturn:
    raise SystemExit(EXIT_SIGNAL + number)


if __name__ == "__main__":
    sys.exit(main())
