"""What stands on the terminal around a measurement: its header, its notes, the first prompt, a counter while it runs.

Knows settings and prompts; imports no torch, as servers are measured without it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from eagle3.environment import cpu_model, load_average, usable_cores
from eagle3_infer.config import SamplingConfig
from eagle3_infer.prompt_sets import sets_told
from eagle3_infer.prompts import Prompt
from eagle3_infer.settings import RunSettings
from eagle3_infer.unseen import cut_middle, name_unseen

# of the first prompt
SHOWN_CHARACTERS = 1200
# jobs per core before the run that make its speeds doubtful
BUSY = 0.5


def print_header(lines: Iterable[str], notes: Iterable[str]) -> None:
    """What is measured, and what is to be known before it is."""
    print(name_unseen("\n".join([*lines, *note_lines(notes)])), flush=True)


def note_lines(notes: Iterable[str]) -> list[str]:
    return [f"note: {text}" for text in notes]


def machine_line() -> str:
    """What the speeds are of; a load that other work may have is told."""
    cores, load = usable_cores(), load_average()
    told = "" if load is None else f", load {load:.1f}"
    if load is not None and load > BUSY * cores:
        told += " (of the last minute; while other work runs, speeds are off)"
    return f"machine  {cpu_model()}, {cores} cores{told}"


def prompts_line(settings: RunSettings, prompts: Sequence[Prompt]) -> str:
    turns = sum(len(prompt.turns) for prompt in prompts)
    at_once = f", {settings.batch} at once" if settings.batch > 1 else ""
    return (
        f"prompts  {sets_told(settings.prompts)}: {len(prompts)} prompts, {turns} turns{at_once}, "
        f"up to {settings.max_new_tokens} new tokens, {_how_drawn(settings)}"
    )


def _how_drawn(settings: RunSettings) -> str:
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


def print_first_prompt(text: str, templated: bool) -> None:
    """The first prompt as the target sees it: a wrong template is the commonest cause of a bad tau."""
    how = "" if templated else " (the tokenizer has no chat template: prompts are plain text)"
    body = "\n".join(f"  | {line}".rstrip() for line in cut_middle(text, SHOWN_CHARACTERS).split("\n"))
    print(name_unseen(f"first prompt as rendered{how}:\n{body}"), flush=True)


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
