"""Write a trained head as a serving engine loads it.

    python train/export_draft.py --draft runs/mine/best --target MODEL --engine vllm --output exported
    python train/export_draft.py --draft runs/mine/best --target MODEL --engine sglang --output exported
    python train/export_draft.py --draft runs/mine/best --target MODEL --engine tensorrt-llm --output exported

What the engine would not read as it is meant is refused by name: its loader would not say so, only accept less. The
command that serves the head is printed, and with it what to compare the engine's acceptance with. Of the target the
first layer alone is loaded. eagle3-infer runs the written folder, too.
"""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error, one_line


@dataclass(frozen=True)
class ExportConfig:
    """What to export, and for whom.

    Args:
        draft: the head's folder.
        target: folder or hub id of the model that it drafts for.
        engine: that is to load it: vllm, sglang or tensorrt-llm.
        output: folder to write; it must not exist.
        dtype: of the written weights; auto = as they are stored.
        drafts: tokens drafted per round, in the printed command.
    """

    draft: str
    target: str
    engine: Literal["vllm", "sglang", "tensorrt-llm"]
    output: str
    dtype: str = "auto"
    drafts: int = 3

    def __post_init__(self):
        if self.drafts < 1:
            raise ConfigError(f"drafts is {self.drafts}; it must be 1 or more")
        for name in ("draft", "output"):
            object.__setattr__(self, name, os.path.abspath(os.path.expanduser(getattr(self, name))))


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input or a full disk (one line on stderr), 130 when interrupted."""
    try:
        export(load_config(ExportConfig, argv, description=__doc__))
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def export(config: ExportConfig) -> None:
    """Load the head for its target, write it for the engine, and say what the engine will do with it."""
    import torch

    from eagle3.checkpoint.export import ENGINES, Launch, export_head
    from eagle3.checkpoint.reference import load_head, stored_dtype
    from eagle3.target import Target, parse_dtype, resolve_path

    asked = parse_dtype(config.dtype)
    # enough to know the target's sizes and its fingerprint
    target = Target.load(config.target, tokenizer=False, layers=1)
    head = load_head(config.draft, target, torch.float32)
    dtype = stored_dtype(Path(config.draft)) if asked is None else asked
    launch = Launch(config.output, resolve_path(config.target), config.drafts)
    form = ENGINES[config.engine]
    export_head(head, config.engine, launch, dtype)
    ours = list(head.config.capture_layers)
    print(f"wrote {config.output} for {form.engine}, weights in {str(dtype).removeprefix('torch.')}")
    print(f"  captured streams: {form.layer_ids(head.config)} in its numbers, the outputs of layers {ours} (from 0)")
    print(f"  drafts: chains of {config.drafts}; serve it with\n    {form.command(launch)}")
    compared = ["--target", config.target, "--draft", config.output, "--mode", "chain"]
    print(
        "  its loader reports no mistake, acceptance does: compare its accepted tokens by position with\n"
        f"    {shlex.join(['eagle3-infer', *compared, '--chain-depth', str(config.drafts)])}"
    )


if __name__ == "__main__":
    sys.exit(main())
