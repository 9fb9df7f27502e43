"""What a measurement on this machine is of: its header on the terminal, and the report's `run` block."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from eagle3.environment import cpu_model, git_revision, hardware, versions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3_infer.bench import Bench
from eagle3_infer.models import draft_name
from eagle3_infer.prepare import Prepared
from eagle3_infer.prompts import has_template
from eagle3_infer.settings import RunSettings
from eagle3_infer.terminal import machine_line, prompts_line
from eagle3_kernels.dispatch import kernels

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")


def header_lines(settings: RunSettings, prepared: Prepared) -> list[str]:
    prompts, target, head = prepared
    dtype = str(target.dtype).removeprefix("torch.")
    size = f" ({_parameters(head):.1f} M parameters)" if head else ""
    return [
        machine_line(),
        f"target   {settings.target} ({dtype}, {target.device}, {torch.get_num_threads()} threads)",
        f"head     {draft_name(settings) or 'none'}{size}",
        prompts_line(settings, prompts),
    ]


def _parameters(head: Eagle3Head) -> float:
    return sum(p.numel() for p in head.parameters()) / 1e6


def describe_run(bench: Bench, argv: Sequence[str], notes: Sequence[str]) -> dict[str, Any]:
    """The report's `run` block.

    Args:
        notes: those that were printed before the run; the bench's own come after them.
    """
    settings, target = bench.settings, bench.target
    return {
        "argv": list(argv),
        "versions": versions(PACKAGES),
        "git": git_revision(),
        "environment": hardware() | {"load_average": bench.load_before},
        "target": settings.target,
        "target_fingerprint": target.fingerprint,
        "draft": draft_name(settings),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": _device_name(target.device),
        "threads": torch.get_num_threads(),
        "kernels": kernels(),
        "seed": settings.sampling.seed,
        "settings": asdict(settings),
        "chat_template": has_template(target.tokenizer),
        "first_prompt": bench.first_text,
        "notes": [*notes, *bench.notes],
        "interrupted": bench.interrupted,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_model()})"
