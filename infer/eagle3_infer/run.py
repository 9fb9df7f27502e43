"""One measurement: load, warm up, run every mode over the same prompts, compare, report.

`bench.py` does the timing; this module decides the order of things and what is printed.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from eagle3.environment import cpu_model, git_revision, hardware, load_average, usable_cores, versions
from eagle3.errors import ConfigError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target, parse_dtype
from eagle3_infer.bench import Bench
from eagle3_infer.compare import compare_modes
from eagle3_infer.config import SamplingConfig
from eagle3_infer.explain import replay_explainer
from eagle3_infer.models import draft_folder, draft_name, load_assistant, load_draft, load_target, pick_device
from eagle3_infer.notes import run_notes
from eagle3_infer.outputs import deliver, ignoring_ctrl_c
from eagle3_infer.plots import check_matplotlib
from eagle3_infer.prompt_sets import load_sets, sets_told
from eagle3_infer.prompts import Prompt, has_template
from eagle3_infer.replies import Told
from eagle3_infer.report import Comparison, build_report
from eagle3_infer.retrace import trace_replies
from eagle3_infer.settings import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, RunSettings
from eagle3_infer.table import render_report
from eagle3_infer.unseen import name_unseen
from eagle3_kernels.dispatch import kernels, set_kernels, uses_triton

SHOWN_CHARACTERS = 1200
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")
# jobs per core before the run that make its speeds doubtful
BUSY = 0.5


@torch.inference_mode()
def run(settings: RunSettings, argv: Sequence[str]) -> int:
    """Run and print everything; returns the exit code."""
    check_built(settings)
    prompts = load_sets(settings.prompts, settings.limit, settings.max_turns)
    device = pick_device(settings.device)
    parse_dtype(settings.dtype)
    if settings.needs_head:
        # a wrong path is told before the target is loaded
        draft_folder(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    choose_kernels(settings.kernels, device)
    target = load_target(settings, device)
    head = load_draft(settings, target) if settings.needs_head else None
    assistant = load_assistant(settings.assistant, target) if settings.assistant and settings.drafts_assisted else None
    bench = Bench(settings, target, head, prompts, Progress(), assistant)
    notes = run_notes(settings)
    print(name_unseen("\n".join([*header_lines(settings, target, head, prompts), *(f"note: {t}" for t in notes)])))
    bench.prepare()
    print(name_unseen(first_prompt_lines(bench.first_text, has_template(target.tokenizer))), flush=True)
    bench.run()
    return conclude(settings, argv, target, bench, notes)


def check_built(settings: RunSettings) -> None:
    """Raises ConfigError for a flag whose part is missing."""
    if settings.plot is not None:
        check_matplotlib()


def choose_kernels(name: str | None, device: torch.device) -> None:
    """Set them for this process; raises ConfigError for those that do not exist or cannot run on the device."""
    try:
        set_kernels(name)
        uses_triton(torch.empty(0, device=device))
    except ValueError as error:
        raise ConfigError(f"--kernels: {error}") from error


def conclude(settings: RunSettings, argv: Sequence[str], target: Target, bench: Bench, notes: Sequence[str]) -> int:
    """Compare, write the report, print its tables.

    Args:
        notes: those that were printed before the run.
    """

    def tell(interrupted: bool) -> Told:
        bench.interrupted = bench.interrupted or interrupted
        return trace_replies(bench)

    with ignoring_ctrl_c(bench.interrupted):
        said = [f"note: {note}" for note in bench.notes]
        bench.notes[:0] = notes
        comparison = compare(settings, target, bench)
        report = build_report(describe_run(settings, argv, target, bench), bench.modes, comparison)
        if deliver(settings, report, "\n".join([*said, "", render_report(report)]).lstrip(), tell):
            bench.interrupted = True
    if bench.interrupted:
        print("interrupted: the figures above cover what was finished", file=sys.stderr)
        return EXIT_INTERRUPTED
    return EXIT_BUG if comparison.of_kind("bug") else EXIT_OK


def compare(settings: RunSettings, target: Target, bench: Bench) -> Comparison:
    """Compare all modes that must emit the same."""
    sampled = settings.sampling.temperature > 0
    explain = replay_explainer(target, bench) if settings.verify and not bench.interrupted else None
    try:
        return compare_modes(bench.modes, explain, sampled)
    except KeyboardInterrupt:
        # the replays are slow; without them the measurements still stand
        bench.interrupted = True
        return compare_modes(bench.modes, None, sampled)
    finally:
        bench.progress.clear()


def header_lines(
    settings: RunSettings, target: Target, head: Eagle3Head | None, prompts: Sequence[Prompt]
) -> list[str]:
    turns = sum(len(prompt.turns) for prompt in prompts)
    dtype = str(target.dtype).removeprefix("torch.")
    at_once = f", {settings.batch} at once" if settings.batch > 1 else ""
    return [
        machine_line(),
        f"target   {settings.target} ({dtype}, {target.device}, {torch.get_num_threads()} threads)",
        f"head     {draft_name(settings) or 'none'}" + (f" ({_parameters(head):.1f} M parameters)" if head else ""),
        f"prompts  {sets_told(settings.prompts)}: {len(prompts)} prompts, {turns} turns{at_once}, "
        f"up to {settings.max_new_tokens} new tokens, {how_drawn(settings)}",
    ]


def how_drawn(settings: RunSettings) -> str:
    """Greedy or sampled, and every setting of it that is not its default."""
    given, default = asdict(settings.sampling), asdict(SamplingConfig())
    shown = {name: value for name, value in given.items() if value != default[name]}
    if settings.bad_words:
        shown["bad_words"] = list(settings.bad_words)
    if settings.sampling.temperature > 0:
        shown["seed"] = settings.sampling.seed
    pairs = ", ".join(f"{name} {value}" for name, value in shown.items())
    how = "sampled" if settings.sampling.temperature > 0 else "greedy"
    return f"{how}: {pairs}" if pairs else how


def _parameters(head: Eagle3Head) -> float:
    return sum(p.numel() for p in head.parameters()) / 1e6


def first_prompt_lines(text: str, templated: bool) -> str:
    """The first prompt as the target sees it: a wrong template is the commonest cause of a bad tau."""
    how = "" if templated else " (the tokenizer has no chat template: prompts are plain text)"
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    body = "\n".join(f"  | {line}".rstrip() for line in text.split("\n"))
    return f"first prompt as rendered{how}:\n{body}"


def describe_run(settings: RunSettings, argv: Sequence[str], target: Target, bench: Bench) -> dict[str, Any]:
    """The report's `run` block."""
    return {
        "argv": list(argv),
        "versions": versions(PACKAGES),
        "git": git_revision(),
        "environment": hardware() | {"load_average": bench.load_before},
        "target": settings.target,
        "target_fingerprint": target.fingerprint,
        "draft": draft_name(settings),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "seed": settings.sampling.seed,
        "settings": asdict(settings),
        "chat_template": has_template(target.tokenizer),
        "first_prompt": bench.first_text,
        "notes": list(bench.notes),
        "interrupted": bench.interrupted,
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_model()})"


def machine_line() -> str:
    """What the speeds are of; a machine that has other things to do is said to be busy."""
    cores, load = usable_cores(), load_average()
    told = "" if load is None else f", load {load:.1f}"
    busy = " (busy: speeds will be off)" if load is not None and load > BUSY * cores else ""
    return f"machine  {cpu_model()}, {cores} cores{told}{busy}"


class Progress:
    """A counter on stderr while a mode runs; silent unless that is a terminal."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        if self.shown:
            sys.stderr.write(f"\r\033[K{name_unseen(text)}")
            sys.stderr.flush()

    def clear(self) -> None:
        self.show("")
