"""Write a head's folder so that it is there whole or not at all. Knows files, not what is in them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3.errors import CheckpointError

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_folder(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], texts: dict[str, str]) -> Path:
    """Write tensors, config.json and `texts` (by file name); the folder appears complete or not at all.

    It takes the place of an earlier one.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True, exist_ok=True)
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        for name, text in {CONFIG: json.dumps(config, indent=2) + "\n", **texts}.items():
            (part / name).write_text(text)
        # safetensors writes 0600 whatever the umask
        (part / WEIGHTS).chmod((part / CONFIG).stat().st_mode)
        replace_folder(part, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"head folder {str(folder)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def replace_folder(part: Path, folder: Path) -> None:
    """Rename `part` to `folder`; an earlier one is moved aside first, and removed once the new one stands."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    try:
        part.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
