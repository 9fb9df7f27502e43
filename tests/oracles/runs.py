"""Short runs of train_draft.py on a tiny target, and what they leave on disk.

`made` is a folder with `target` and `chats.jsonl` (oracles.tiny).
"""

import json
import runpy
from pathlib import Path

import torch
from safetensors.torch import load_file

from oracles.script import SCRIPT


def arguments(made, output, **changes):
    """Flags of a short run on `made`; a change named a__b sets a.b."""
    settings = {
        "target": made / "target",
        "output": output,
        "data.files": f"[{made / 'chats.jsonl'}]",
        "data.eval_rows": 4,
        "head.draft_vocab_size": 100,
        "ttt.steps": 3,
        "optim.lr": 3e-3,
        "autocast": "float32",
        "rows_per_step": 4,
        "max_steps": 20,
        "eval.every": 10,
        "save_every": 5,
        "log_every": 1,
        "threads": 1,
        "device": "cpu",
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train(made, output, **changes):
    """Run in this process; the folder of the run."""
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(arguments(made, output, **changes)) == 0
    return Path(output)


def metrics(run, split=None):
    """Records of the training steps, or of a split."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r.get("split") == split]


def losses(run):
    """Every figure of every record but what depends on the machine."""
    machine = {"tokens_per_second", "peak_memory_bytes"}
    records = [r for split in (None, "eval", "engine") for r in metrics(run, split)]
    return [{k: v for k, v in r.items() if k not in machine} for r in records]


def weights(run, name="last"):
    """Of an exported head."""
    return load_file(run / name / "model.safetensors")


def final(run):
    """fp32 weights of the last checkpoint."""
    return load_file(max((run / "checkpoints").glob("step-*")) / "model.safetensors")


def check_equal(found, wanted, tolerance=0.0):
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
