"""The trainer's script, and the environment to run it in as a process of its own."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "train/train_draft.py"
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(str(ROOT / p) for p in (".", "kernels", "infer", "train")),
}
