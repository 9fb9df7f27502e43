"""What comes before a measurement on this machine, cheapest first: prompts, device, kernels, then the models."""

from typing import NamedTuple

import torch

from eagle3.errors import ConfigError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target, parse_dtype
from eagle3_infer.models import draft_folder, load_draft, load_target, pick_device
from eagle3_infer.prompt_sets import load_sets
from eagle3_infer.prompts import Prompt
from eagle3_infer.settings import RunSettings
from eagle3_kernels.dispatch import set_kernels, uses_triton


class Prepared(NamedTuple):
    """What is measured, and with what; no head where no mode drafts."""

    prompts: list[Prompt]
    target: Target
    head: Eagle3Head | None


def prepare(settings: RunSettings) -> Prepared:
    """Read the prompts and load the models; threads and kernels are set for this process.

    What is wrong with a flag is told before a model is loaded.

    Raises:
        ConfigError: a device, dtype, kernels or target that there is none of, or two prompt sets of one name.
        DataError: no such prompt set, or one that holds no prompts.
        CheckpointError: no such head, or not one for this target.
        UnsupportedTargetError: a target that cannot be driven.
    """
    prompts = load_sets(settings.prompts, settings.limit, settings.max_turns)
    device = pick_device(settings.device)
    parse_dtype(settings.dtype)
    if settings.needs_head:
        draft_folder(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    _choose_kernels(settings.kernels, device)
    target = load_target(settings, device)
    return Prepared(prompts, target, load_draft(settings, target) if settings.needs_head else None)


def _choose_kernels(name: str | None, device: torch.device) -> None:
    """Raises ConfigError for those that do not exist or cannot run on the device."""
    try:
        set_kernels(name)
        uses_triton(torch.empty(0, device=device))
    except ValueError as error:
        raise ConfigError(f"--kernels: {error}") from error
