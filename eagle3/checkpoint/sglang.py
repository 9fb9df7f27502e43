"""Heads for SGLang: `--speculative-algorithm EAGLE3`, which drafts chains and trees.

Read in SGLang 0.5.23 (srt/models/llama_eagle3.py), not run: it needs a GPU. Its layer ids are ours: it adds the one
itself. Later layers of a head are not exported: its versions name their tensors in two ways, and drop unknown names.
"""

import shlex

from eagle3.checkpoint.serving import ROPES, Launch, ServingFormat


def _command(launch: Launch) -> str:
    settings = {
        "model-path": launch.target,
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": launch.folder,
        "speculative-num-steps": launch.drafts,
        "speculative-eagle-topk": 1,
        # the root included
        "speculative-num-draft-tokens": launch.drafts + 1,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return shlex.join(["python", "-m", "sglang.launch_server", *words])


FORMAT = ServingFormat(
    engine="SGLang (0.5.23 was read)",
    shift=0,
    options=frozenset({"fc_norm", "norm_output"}),
    ropes=ROPES,
    own_width=True,
    fc_by_width=True,
    reads_layers=True,
    command=_command,
)
