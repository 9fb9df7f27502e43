"""Where a run took place: package versions, git revision, hardware, load. Knows nothing of models; torch comes late."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3 import __version__


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Of Python, this package and those named; None = not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["eagle3"] = __version__
    return found


def git_revision(file: Path | str = __file__) -> dict[str, Any] | None:
    """`revision` of the checkout that holds `file`, and whether tracked files are `modified`; None outside one.

    Either is None where git does not tell, or takes longer than ten seconds.
    """
    folder = str(Path(file).resolve().parent)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # a file that git does not track belongs to a package installed inside somebody else's checkout
    if not git("ls-files", "--error-unmatch", str(Path(file).resolve())):
        return None
    changes = git("status", "--porcelain", "-uno")
    return {"revision": git("rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """CPU model, cores, memory, load, torch threads, GPUs.

    Returns:
        `memory_bytes` of the machine, and `load_average` of the last minute: jobs that wanted a core, those of other
        processes too. Both None where the system does not tell.
    """
    import torch

    cuda = torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_bytes": _memory(),
        "load_average": load_average(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Those that this process may run on, where the system tells; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None
