"""Load what a run needs: device, target, head. Raises errors that name the flag at fault."""

import os
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig

from eagle3.checkpoint.reference import load_head
from eagle3.config import HeadOptions
from eagle3.embedded import EMBEDDED
from eagle3.errors import CheckpointError, ConfigError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.loading import LOAD_ERRORS, load_model
from eagle3.target import Target, parse_device, resolve_path
from eagle3.vocab import build_vocab_map
from eagle3_infer.settings import RANDOM_DRAFT, RunSettings


def pick_device(name: str) -> torch.device:
    """Raises ConfigError for a device that torch does not know or this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return parse_device(name)


def load_target(settings: RunSettings, device: torch.device) -> Target:
    """Raises ConfigError for what cannot be loaded, UnsupportedTargetError for what cannot be driven."""
    transformers.utils.logging.disable_progress_bar()
    return Target.load(settings.target, dtype=settings.dtype, device=str(device))


def load_draft(settings: RunSettings, target: Target) -> Eagle3Head:
    """The head on the target's device, in its dtype.

    Raises:
        CheckpointError: no such folder, or not a head for this target.
    """
    folder = draft_folder(settings)
    return random_head(target) if folder is None else load_head(folder, target)


def random_head(target: Target) -> Eagle3Head:
    """An untrained head as large as a trained one would be; it proposes the tokenizer's lowest ids."""
    size = min(HeadOptions.draft_vocab_size or target.vocab_size, target.usable_vocab)
    lowest_first = torch.arange(target.vocab_size, 0, -1)
    vocab_map = build_vocab_map(lowest_first, size, target.eos_ids, target.usable_vocab)
    return Eagle3Head.for_target(target, vocab_map).to(target.dtype).eval()


class Assistant(NamedTuple):
    """The small model that drafts for `--hf assisted`, and its tokenizer."""

    model: Any
    tokenizer: Any


def load_assistant(name: str, target: Target) -> Assistant:
    """On the target's device and in its dtype, without the generation settings that it comes with.

    Raises:
        ConfigError: no such folder, or nothing that transformers loads.
    """
    try:
        folder = resolve_path(name)
        model, _ = load_model(folder, target.dtype, target.device)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (ConfigError, *LOAD_ERRORS) as error:
        raise ConfigError(f"--assistant {name} cannot be loaded: {' '.join(str(error).split())}") from error
    model.generation_config = GenerationConfig()
    return Assistant(model.eval(), tokenizer)


def draft_folder(settings: RunSettings) -> Path | None:
    """The folder that --draft names, or the shipped head's; None for an untrained head."""
    if settings.draft == RANDOM_DRAFT:
        return None
    if settings.draft is not None:
        folder = Path(os.path.expanduser(settings.draft))
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise CheckpointError(f"--draft {settings.draft} {what}, expected the folder of a head or {RANDOM_DRAFT!r}")
        return folder
    folder = Path(str(resources.files("eagle3_infer") / "assets" / "head"))
    if not folder.is_dir():
        raise CheckpointError(f"this installation ships no head: give --draft DIR, or --draft {RANDOM_DRAFT}")
    if settings.target != EMBEDDED:
        raise ConfigError(f"the shipped head drafts for {EMBEDDED} only: give --draft for {settings.target}")
    return folder


def draft_name(settings: RunSettings) -> str | None:
    """What the report calls the head; None when no mode needs one."""
    return (settings.draft or "shipped head") if settings.needs_head else None
