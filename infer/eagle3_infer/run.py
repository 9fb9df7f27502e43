"""One measurement: load, warm up, run every mode over the same prompts, compare, report.

`bench.py` does the timing; this module decides the order of things.
"""

import sys
from collections.abc import Sequence

import torch

from eagle3_infer.bench import Bench
from eagle3_infer.compare import compare_modes
from eagle3_infer.describe import describe_run, header_lines
from eagle3_infer.explain import replay_explainer
from eagle3_infer.models import load_assistant
from eagle3_infer.notes import run_notes
from eagle3_infer.outputs import deliver, ignoring_ctrl_c
from eagle3_infer.plots import check_matplotlib
from eagle3_infer.prepare import prepare
from eagle3_infer.prompts import has_template
from eagle3_infer.replies import Told
from eagle3_infer.report import Comparison, build_report
from eagle3_infer.retrace import trace_replies
from eagle3_infer.settings import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, RunSettings
from eagle3_infer.table import render_report
from eagle3_infer.terminal import Progress, note_lines, print_first_prompt, print_header


@torch.inference_mode()
def run(settings: RunSettings, argv: Sequence[str]) -> int:
    """Run and print everything; returns the exit code."""
    if settings.plot is not None:
        check_matplotlib()
    prepared = prepare(settings)
    prompts, target, head = prepared
    assistant = load_assistant(settings.assistant, target) if settings.assistant and settings.drafts_assisted else None
    bench = Bench(settings, target, head, prompts, Progress(), assistant)
    notes = run_notes(settings)
    print_header(header_lines(settings, prepared), notes)
    bench.prepare()
    print_first_prompt(bench.first_text, has_template(target.tokenizer))
    bench.run()
    return conclude(bench, argv, notes)


def conclude(bench: Bench, argv: Sequence[str], notes: Sequence[str]) -> int:
    """Compare, write the report, print its tables.

    Args:
        notes: those that were printed before the run.
    """

    def tell(interrupted: bool) -> Told:
        bench.interrupted = bench.interrupted or interrupted
        return trace_replies(bench)

    with ignoring_ctrl_c(bench.interrupted):
        comparison = compare(bench)
        report = build_report(describe_run(bench, argv, notes), bench.modes, comparison)
        text = "\n".join([*note_lines(bench.notes), "", render_report(report)]).lstrip()
        if deliver(bench.settings, report, text, tell):
            bench.interrupted = True
    if bench.interrupted:
        print("interrupted: the figures above cover what was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_BUG if comparison.of_kind("bug") else EXIT_OK


def compare(bench: Bench) -> Comparison:
    """Compare all modes that must emit the same."""
    sampled = bench.settings.sampling.temperature > 0
    explain = replay_explainer(bench.target, bench) if bench.settings.verify and not bench.interrupted else None
    try:
        return compare_modes(bench.modes, explain, sampled)
    except KeyboardInterrupt:
        # the replays are slow; without them the measurements still stand
        bench.interrupted = True
        return compare_modes(bench.modes, None, sampled)
    finally:
        bench.progress.clear()
