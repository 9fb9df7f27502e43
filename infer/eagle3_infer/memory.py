"""Free memory and a phase's peak: the CUDA allocator's on a GPU, the process's resident set on Linux, else unknown."""

from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
# "5" resets the resident set's high-water mark (proc_pid_clear_refs(5))
_RESET_HIGH_WATER = "5"


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_RESET_HIGH_WATER)
    except OSError:
        # not Linux, or not allowed: peak_bytes then gives the peak since the start
        return


def peak_bytes(device: torch.device) -> int | None:
    """Bytes, or None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else None


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated, or None where the system does not tell."""
    if device.type == "cuda":
        # what the allocator holds and does not use is free too
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return free[0] if free else None
