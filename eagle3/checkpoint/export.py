"""Write a head's folder for a serving engine. Knows files; what an engine reads stands in the engine's own file."""

from pathlib import Path

import torch

from eagle3.checkpoint import sglang, tensorrt_llm, vllm
from eagle3.checkpoint.folder import write_folder
from eagle3.checkpoint.reference import stored_tensors
from eagle3.checkpoint.serving import Launch, ServingFormat
from eagle3.errors import CheckpointError
from eagle3.heads.eagle3 import Eagle3Head

ENGINES: dict[str, ServingFormat] = {
    "vllm": vllm.FORMAT,
    "sglang": sglang.FORMAT,
    "tensorrt-llm": tensorrt_llm.FORMAT,
}


def export_head(head: Eagle3Head, engine: str, launch: Launch, dtype: torch.dtype) -> Path:
    """Write `launch.folder`, of floating weights in `dtype`, as ENGINES[engine] reads it.

    load_head reads it, too: the names are the reference's, and our block is kept.

    Raises:
        CheckpointError: the engine would read something else than the head, the folder exists, or is not writable.
    """
    folder, form = Path(launch.folder), ENGINES[engine]
    form.check(head.config)
    if folder.exists():
        raise CheckpointError(f"{launch.folder!r} exists; it is not overwritten: remove it, or give another --output")
    tensors = stored_tensors(head, dtype)
    if head.config.draft_vocab_size == head.config.vocab_size:
        # vLLM refuses a map where none is needed; the order that it tells goes into the rows
        rows = tensors.pop("d2t") + torch.arange(head.config.vocab_size)
        del tensors["t2d"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][rows.argsort()]
    return write_folder(folder, tensors, form.config_json(head.config, dtype), form.texts(head.config, launch))
