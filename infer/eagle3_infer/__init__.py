"""Run an EAGLE-3 head: the engine, its command line and its report. Knows nothing of training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_infer.hf import generator
    from eagle3_infer.processors import pure

__all__ = ["generator", "pure"]

# imported when asked for: the command answers --help without torch
_HOMES = {"generator": "eagle3_infer.hf", "pure": "eagle3_infer.processors"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
