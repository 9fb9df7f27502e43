"""Heads for TensorRT-LLM: `decoding_type: Eagle3` of its PyTorch backend.

Its documentation names the reference code's checkpoints, so those are what is exported; its sources of 2026 were read
(_torch/models/modeling_speculative.py), not run. Its layer ids are ours, and it takes them from its own settings alone:
they stand in the settings file written beside the weights.
"""

import json
import shlex

from eagle3.checkpoint.serving import ROPES, Launch, ServingFormat
from eagle3.config import HeadConfig

SETTINGS = "speculative.yaml"


def _texts(config: HeadConfig, launch: Launch) -> dict[str, str]:
    lines = [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {launch.drafts}",
        f"  speculative_model: {json.dumps(launch.folder)}",
        f"  eagle3_layers_to_capture: {list(config.capture_layers)}",
    ]
    return {SETTINGS: "\n".join(lines) + "\n"}


def _command(launch: Launch) -> str:
    return shlex.join(["trtllm-serve", launch.target, "--config", f"{launch.folder}/{SETTINGS}"])


FORMAT = ServingFormat(
    engine="TensorRT-LLM (its sources of 2026 were read)",
    shift=0,
    options=frozenset(),
    ropes={"default": ROPES["default"], "llama3": ROPES["llama3"]},
    own_width=False,
    fc_by_width=True,
    reads_layers=False,
    command=_command,
    texts=_texts,
)
