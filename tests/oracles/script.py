"""The trainer's script, and the environment to run it in as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train/train_draft.py"
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "infer", "train")),
}


def launch(*words: Any, **env: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch` with these words."""
    return subprocess.run(launch_command(*words), env={**ENV, **env}, capture_output=True, text=True, timeout=600)


def launch_command(*words: Any) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *map(str, words)]
