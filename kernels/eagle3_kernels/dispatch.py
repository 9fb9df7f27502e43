"""Which implementation an op runs: Triton on CUDA and ROCm, the torch reference elsewhere.

Each op's `__init__` asks `uses_triton` and nothing else decides. `EAGLE3_KERNELS=torch|triton|auto` (or `set_kernels`)
forces one; Triton on a CPU tensor runs in its interpreter, which needs TRITON_INTERPRET=1 before triton is imported.
"""

import os
from functools import lru_cache
from importlib.util import find_spec

from torch import Tensor

KERNELS = ("auto", "triton", "torch")
VARIABLE = "EAGLE3_KERNELS"
_chosen: str | None = None


def set_kernels(name: str | None) -> None:
    """Force an implementation for this process; None = what the environment says, else auto.

    Raises:
        ValueError: an unknown name, or Triton where it cannot run.
    """
    global _chosen
    if name is not None:
        _check(name, "kernels")
    _chosen = name


def kernels() -> str:
    """auto, triton or torch, as chosen for this process."""
    if _chosen is not None:
        return _chosen
    name = os.environ.get(VARIABLE, "auto")
    _check(name, VARIABLE)
    return name


def uses_triton(tensor: Tensor) -> bool:
    """Whether an op on this tensor runs its Triton kernel."""
    name = kernels()
    if name == "torch":
        return False
    if tensor.is_cuda:
        return name == "triton" or has_triton()
    if name == "triton" and not interpreted():
        raise ValueError(
            f"kernels triton on a {tensor.device.type} tensor: Triton compiles for CUDA and ROCm only; set "
            "TRITON_INTERPRET=1 to run its interpreter, or choose auto or torch"
        )
    return name == "triton"


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _check(name: str, what: str) -> None:
    if name not in KERNELS:
        raise ValueError(f"{what} is {name!r}; it must be one of {', '.join(KERNELS)}")
    if name == "triton" and not has_triton():
        raise ValueError(f"{what} is triton, which is not installed: pip install triton, or choose auto or torch")
