"""What people are shown of a mode's name: tables, charts, pages and sweeps alike. Reads the report's dict only."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eagle3_infer.config import RuleConfig, TreeConfig
from eagle3_infer.settings import HF, HF_ASSISTED, HF_PROMPT_LOOKUP, rule_name, shape_name

NAMES = {HF: "HF generate", HF_PROMPT_LOOKUP: "HF prompt lookup", HF_ASSISTED: "HF assisted"}


def key_name(key: str) -> str:
    """A mode's key as text; Hugging Face's modes have names of their own."""
    return NAMES.get(key, key)


def mode_title(key: str, mode: Mapping[str, Any]) -> str:
    """A mode in one phrase: kind, rule, shape. Two modes of a run never have the same.

    Args:
        key, mode: an entry of the report's `modes`.
    """
    return f"{mode_name(key, mode)} {mode_shape(mode)}".strip()


def mode_name(key: str, mode: Mapping[str, Any]) -> str:
    """Kind, rule and LOSSY where that is so."""
    parts = [key_name(key).split("[")[0]]
    if mode["settings"]:
        parts.append(rule_name(_config(RuleConfig, mode["settings"])))
    return " ".join([part for part in parts if part] + ["LOSSY"] * mode["lossy"])


def mode_shape(mode: Mapping[str, Any]) -> str:
    """`d4k4n16`, the level weight where it says something, `<=` where a round may take less; nothing without a tree."""
    return shape_name(_config(TreeConfig, mode["settings"])) if mode["settings"] else ""


def _config(kind: Any, settings: Mapping[str, Any]) -> Any:
    """Of the report's settings those that `kind` knows; one from before a setting existed had its default."""
    return kind(**{field.name: settings[field.name] for field in fields(kind) if field.name in settings})
