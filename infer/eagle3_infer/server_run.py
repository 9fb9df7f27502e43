"""`eagle3-infer --server URL`: measure a server instead of the engine of this package, and report alike.

Imports no torch: a server is measured from outside.
"""

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import eagle3
from eagle3_infer.endpoint import Endpoint
from eagle3_infer.notes import server_notes
from eagle3_infer.outputs import deliver, ignoring_ctrl_c
from eagle3_infer.plots import check_matplotlib
from eagle3_infer.prompt_sets import load_sets
from eagle3_infer.server import ServerBench
from eagle3_infer.server_report import SERVER, build_server_report, server_lines
from eagle3_infer.settings import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, RunSettings
from eagle3_infer.table import render_report
from eagle3_infer.terminal import Progress, note_lines, print_header, prompts_line


def run_server(settings: RunSettings, argv: Sequence[str]) -> int:
    """Run and print everything; returns the exit code: that of an error where a request failed.

    Raises:
        ConfigError: an address that is none, no model, two prompt sets of one name, or no matplotlib for `plot`.
        DataError: no such prompt set, or one that holds no prompts.
        ServerError: the server does not answer.
    """
    if settings.plot is not None:
        check_matplotlib()
    prompts = load_sets(settings.prompts, settings.limit, settings.max_turns)
    endpoint = Endpoint(settings.server or "")
    model = settings.server_model or endpoint.model()
    bench = ServerBench(settings, endpoint, model, prompts, Progress())
    notes = server_notes(settings)
    print_header([f"server   {endpoint.url}, model {model}", prompts_line(settings, prompts)], notes)
    bench.run()
    return conclude(settings, argv, bench, notes)


def conclude(settings: RunSettings, argv: Sequence[str], bench: ServerBench, notes: Sequence[str]) -> int:
    """Write the report, print its tables; `notes` are those that were printed before the run."""
    with ignoring_ctrl_c(bench.interrupted):
        report = build_server_report(describe(settings, argv, bench, notes), bench.repeats, describe_server(bench))
        said = ["\n".join(note_lines(bench.notes)), render_report(report)]
        if SERVER in report["modes"]:
            said.append(server_lines(report["modes"][SERVER]))
        if deliver(settings, report, "\n\n".join(part for part in said if part)):
            bench.interrupted = True
    if bench.interrupted:
        print("interrupted: the figures above cover what was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_ERROR if any(repeat.failures for repeat in bench.repeats) else EXIT_OK


def describe_server(bench: ServerBench) -> dict[str, Any]:
    return {"url": bench.endpoint.url, "model": bench.model, "metrics": bench.metrics_path}


def describe(settings: RunSettings, argv: Sequence[str], bench: ServerBench, notes: Sequence[str]) -> dict[str, Any]:
    """The report's `run` block; what only the server knows of itself is null."""
    unknown = ("target_fingerprint", "draft", "dtype", "threads", "kernels", "chat_template", "first_prompt")
    return {
        "argv": list(argv),
        "versions": {"eagle3": eagle3.__version__, "python": platform.python_version()},
        "target": bench.model,
        "device": bench.endpoint.url,
        "seed": settings.sampling.seed,
        "settings": asdict(settings),
        "notes": [*notes, *bench.notes],
        "interrupted": bench.interrupted,
        **dict.fromkeys(unknown),
    }
