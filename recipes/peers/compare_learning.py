"""Who learns more from the same rows, in the same order, in as many steps: our trainer or speculators' own?

    python recipes/peers/compare_learning.py --peer PEER_PYTHON --files '[chats.jsonl]' --prompts mt_bench.jsonl

Both start from the same architecture, vocabulary map and target features, each with its trainer's defaults but for the
optimizer, AdamW (our default) and Muon (theirs); they freeze lm_head. The heads are compared by chain tau in our
runtime, fp32. A stage whose output lies in the folder is not run again, and outputs of other settings are refused;
without --peer only ours is trained.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3.config import load_config
from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError, Eagle3Error, one_line

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class LearningConfig:
    """What is compared.

    Args:
        files: chats to train on, as data.files of the trainer.
        prompts: prompts to compare on.
        peer: python of an environment with speculators; None = ours alone.
        output: folder of all that is made.
        target: folder, hub id, or the embedded default.
        steps: optimizer steps of each trainer, one epoch at most.
        rows_per_step: chats of a step.
        max_length: tokens of a row.
        draft_vocab_size: of both heads.
        ttt_steps: of both trainers, and the depth of the chains.
        lr: peak learning rate of both trainers (1e-3 is the default of both).
        new_tokens: generated for each prompt.
        threads: of every process.
    """

    files: tuple[str, ...]
    prompts: str
    peer: str | None = None
    output: str = "runs/learning"
    target: str = EMBEDDED
    steps: int = 300
    rows_per_step: int = 4
    max_length: int = 256
    draft_vocab_size: int = 8192
    ttt_steps: int = 3
    lr: float = 1e-3
    new_tokens: int = 64
    threads: int = 1


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input (one line on stderr)."""
    try:
        config = load_config(LearningConfig, argv, description=__doc__)
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        _check_settings(config, folder / "settings.json")
        heads = {f"ours, {name}": folder / f"ours-{name}" / "last" for name in OPTIMIZERS}
        for name in OPTIMIZERS:
            if not (folder / f"ours-{name}" / "last").is_dir():
                _run(sys.executable, ROOT / "train/train_draft.py", *_settings(config, folder, name))
        if config.peer is not None:
            if not (folder / "plan.json").is_file():
                _dump(config, folder)
            for name in OPTIMIZERS:
                heads[f"speculators, {name}"] = folder / name / "0"
                if not (folder / name / "learning.json").is_file():
                    _train_theirs(config, folder, name)
        _table(config, folder, heads)
    except Eagle3Error as error:
        print(one_line(error), file=sys.stderr)
        return 2
    return 0


def _check_settings(config: LearningConfig, file: Path) -> None:
    """Note what is compared; ConfigError where the folder holds another comparison."""
    mine = json.loads(json.dumps({**asdict(config), "peer": None, "output": None, "threads": None}))
    if file.is_file() and (found := json.loads(file.read_text())) != mine:
        differing = ", ".join(name for name in mine if found.get(name) != mine[name])
        raise ConfigError(f"{file.parent} holds a comparison with other {differing}; give another --output")
    file.write_text(json.dumps(mine))


def _settings(config: LearningConfig, folder: Path, optimizer: str = OPTIMIZERS[0]) -> list[str]:
    """The trainer's flags: its defaults but for what both sides must share."""
    given = {
        "target": config.target,
        "output": folder / f"ours-{optimizer}",
        "data.files": json.dumps(config.files),
        "data.max_length": config.max_length,
        "head.draft_vocab_size": config.draft_vocab_size,
        "ttt.steps": config.ttt_steps,
        "optim.name": optimizer,
        "optim.lr": config.lr,
        "rows_per_step": config.rows_per_step,
        "max_steps": config.steps,
        "threads": config.threads,
        "save_every": config.steps,
        "log_every": 20,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _train_theirs(config: LearningConfig, folder: Path, name: str) -> None:
    worker = ROOT / "recipes/peers/train_speculators.py"
    _run(config.peer, worker, folder, "--output", folder / name, "--optimizer", name, "--lr", config.lr)


def _dump(config: LearningConfig, folder: Path) -> None:
    """Rows, vocabulary map, batches and the target's states in the peer's offline format."""
    import torch
    from safetensors.torch import save_file

    from eagle3.capture import Capture
    from eagle3.checkpoint.reference import load_head
    from eagle3.target import Target, resolve_path
    from eagle3_train.batches import ShuffledRows
    from eagle3_train.config import TrainConfig
    from eagle3_train.prepared import prepare_rows

    torch.set_num_threads(config.threads)
    trainer = load_config(TrainConfig, _settings(config, folder))
    target = Target.load(config.target, "auto")
    rows = prepare_rows(trainer, target.tokenizer, target.eos_ids, Path(trainer.output) / "data").train
    stream = ShuffledRows(range(len(rows)), trainer.seed)
    order: list[Any] = stream.take(0, config.steps * config.rows_per_step)
    if len(set(order)) < len(order):
        raise ConfigError(f"{config.steps} steps of {config.rows_per_step} rows are more than the {len(rows)} rows")
    head = load_head(Path(trainer.output) / "last", target)
    vocab_map = {"d2t": head.d2t.cpu(), "t2d": head.t2d.cpu()}
    save_file(vocab_map, folder / "map.safetensors")
    # the stream before the final norm comes last
    capture = Capture(target, (*head.capture_layers, target.num_layers - 1), config.max_length)
    states = folder / "hidden_states"
    states.mkdir(exist_ok=True)
    for place, index in enumerate(order):
        save_file(_states(target, capture, rows[index]["input_ids"]), states / f"hs_{place}.safetensors")
    chosen = [rows[index] for index in order]
    _save_rows(chosen, folder / "rows")
    places = range(0, len(order), config.rows_per_step)
    batches = [list(range(first, first + config.rows_per_step)) for first in places]
    plan = {
        "target": str(resolve_path(config.target)),
        "threads": config.threads,
        "ttt_steps": config.ttt_steps,
        "capture_layers": head.capture_layers,
        "hidden_size": target.hidden_size,
        "max_tokens": max(sum(len(chosen[i]["input_ids"]) for i in batch) for batch in batches),
        "batches": batches,
    }
    (folder / "plan.json").write_text(json.dumps(plan))


def _states(target: Any, capture: Any, ids: list[int]) -> dict[str, Any]:
    """token_ids [S] and hidden_states [S, layers, H] of one row."""
    import torch

    from eagle3.attention import DenseCausal

    tokens = torch.tensor(ids)
    with torch.no_grad(), capture.rows(len(ids)):
        target.hidden(tokens, torch.arange(len(ids)), DenseCausal([len(ids)]))
    hidden = capture.features.unflatten(1, (-1, target.hidden_size))
    return {"token_ids": tokens, "hidden_states": hidden.contiguous()}


def _save_rows(rows: list[dict[str, Any]], folder: Path) -> None:
    import datasets

    columns = {
        "input_ids": [row["input_ids"] for row in rows],
        "loss_mask": [[span != 0 for span in row["span_ids"]] for row in rows],
        "seq_len": [len(row["input_ids"]) for row in rows],
    }
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(str(folder))


def _table(config: LearningConfig, folder: Path, heads: dict[str, Path]) -> None:
    print(f"{'trainer':<22}{'tau':>7}{'by level':>24}")
    for name, head in heads.items():
        report = folder / f"{head.parent.name}.json"
        if not report.is_file():
            _run(sys.executable, "-m", "eagle3_infer.cli", *_evaluation(config, head, report))
        mode = next(iter(json.loads(report.read_text())["modes"].values()))
        levels = " ".join(f"{n / mode['rounds']:.3f}" for n in mode["accepted_by_level"])
        print(f"{name:<22}{mode['tau']:>7.3f}{levels:>24}")


def _evaluation(config: LearningConfig, head: Path, report: Path) -> list[str]:
    given = {
        "target": config.target,
        "draft": head,
        "prompts": config.prompts,
        "mode": "chain",
        "chain-depth": config.ttt_steps,
        "max-turns": 1,
        "max-new-tokens": config.new_tokens,
        "dtype": "float32",
        "batch": 8,
        "threads": config.threads,
        "json": report,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _run(*command: Any) -> None:
    words = [str(word) for word in command]
    if code := subprocess.run(words).returncode:
        raise ConfigError(f"{' '.join(words[:2])} ended with code {code}")


if __name__ == "__main__":
    sys.exit(main())
