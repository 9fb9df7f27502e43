"""Train speculators' EAGLE-3 draft with its own Trainer on what compare_learning.py wrote. Knows nothing of our code.

    PEER_PYTHON recipes/peers/train_speculators.py FOLDER --optimizer muon

Runs in an environment of its own (`pip install torch==2.13.0 speculators==0.9.0`, then remove torchvision). Its
trainer expects an accelerator: on a CPU the device's name is put in its place, nothing else is changed.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train import trainer as peer
from speculators.train.data import ArrowDataset, CollateFn
from torch.utils.data import DataLoader
from transformers import AutoConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="rows/, hidden_states/, map.safetensors and plan.json")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--optimizer", default="muon", choices=["muon", "adamw"], help="muon is its default")
    parser.add_argument("--lr", type=float, default=1e-3, help="1e-3 is its default, for both optimizers")
    args = parser.parse_args()
    plan = json.loads((args.folder / "plan.json").read_text())
    torch.set_num_threads(plan["threads"])
    torch.manual_seed(0)
    _stand_on_cpu()
    model = _model(args.folder, plan)
    config = peer.TrainerConfig(
        lr=args.lr,
        muon_lr=args.lr,
        optimizer=args.optimizer,
        num_epochs=1,
        save_path=str(args.output),
        train_call_kwargs=Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="eager", ttt_steps=plan["ttt_steps"], ttt_step_loss_decay=1.0
        )[0],
        log_freq=10**9,
    )
    began = time.monotonic()
    peer.Trainer(model, config, _loader(args.folder, plan)).run_training()
    seconds = time.monotonic() - began
    (args.output / "learning.json").write_text(json.dumps({"seconds": seconds, "steps": len(plan["batches"])}))


def _stand_on_cpu() -> None:
    if torch.accelerator.is_available():
        return
    peer.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_args: None
    setup = peer.Trainer.setup_trainer

    def setup_trainer(self):
        setup(self)
        self.device_type = "cpu"

    peer.Trainer.setup_trainer = setup_trainer


def _model(folder: Path, plan: dict) -> Eagle3DraftModel:
    """Of our head's architecture: one layer that attends to everything, no norms but EAGLE-3's."""
    layer = AutoConfig.from_pretrained(plan["target"])
    layer.num_hidden_layers, layer.tie_word_embeddings = 1, False
    vocab_map = load_file(folder / "map.safetensors")
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=vocab_map["t2d"],
        d2t=vocab_map["d2t"],
        draft_vocab_size=len(vocab_map["d2t"]),
        norm_before_residual=False,
        ttt_steps=plan["ttt_steps"],
        verifier_name_or_path=plan["target"],
        target_layer_ids=[i + 1 for i in plan["capture_layers"]],
        draft_attn_impl="eager",
    ).float()


def _loader(folder: Path, plan: dict) -> DataLoader:
    """Its own data set and collation, over our batches in our order."""
    rows = ArrowDataset(plan["max_tokens"], str(folder / "rows"), on_missing="raise")
    rows.transfer = type(rows.transfer)(folder / "hidden_states")
    collate = CollateFn(plan["max_tokens"], plan["hidden_size"], len(plan["capture_layers"]), preprocess=shift_batch)
    return DataLoader(rows, batch_sampler=plan["batches"], collate_fn=collate)


if __name__ == "__main__":
    main()
