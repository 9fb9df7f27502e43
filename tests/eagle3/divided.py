"""What one rank does in the tests of tensor-parallel targets (its own module: spawned processes import it)."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from eagle3.attention import DenseCausal
from eagle3.capture import Capture
from eagle3.errors import Eagle3Error
from eagle3.target import Target

WORLD = 2
LENGTHS = [15, 25]


@torch.no_grad()
def features_and_logits(target: Target, ids: torch.Tensor) -> dict[str, Any]:
    """What training takes from a target, for documents of LENGTHS tokens."""
    capture = Capture(target, (1, 3, 6), len(ids))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with capture.rows(len(ids)):
        hidden = target.hidden(ids, positions, DenseCausal(LENGTHS))
    rows = torch.arange(0, target.vocab_size, 3)
    return {
        "features": capture.features.clone(),
        "hidden": hidden,
        "logits": target.logits(hidden),
        "draft logits": target.logits_of(rows)(hidden),
        "embeddings": target.embed(ids),
    }


def rank_of(rank: int, folder: Path, families: tuple[str, ...], ids: torch.Tensor) -> None:
    """Load each family divided among the ranks; write what it gives, or why it does not load, to `folder`/rank.pt."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'sync'}", rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    for family in families:
        try:
            target = Target.load(folder / family, tokenizer=False, placement="tensor_parallel")
        except Eagle3Error as error:
            found[family] = str(error)
            continue
        local = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in target.model.parameters())
        found[family] = {
            **features_and_logits(target, ids),
            "collective": target.collective,
            "fingerprint": target.fingerprint,
            "numbers": local,
        }
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
