"""Fill a feature store: run the target once over every chat, to train from it without running the target again.

    python train/dump_features.py --config recipes/base/smollm2-135m.yaml --features.store features/smollm2
    torchrun --nproc_per_node 2 train/dump_features.py ... --features.dtype float8
    python train/train_draft.py --config ... --features.source offline --features.store features/smollm2

The settings are the trainer's own. Several processes share the chats out. The size is told first, and refused where the
disk is too small. Stopped at any moment, the same command goes on after the last whole shard.
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.config import load_config
from eagle3.errors import ConfigError, Eagle3Error, one_line
from eagle3_train.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from eagle3.target import Target
    from eagle3_train.shards import Encoded
    from eagle3_train.store import Manifest


@dataclass(frozen=True)
class DumpConfig(TrainConfig):
    """The trainer's settings, and what to do with a store that is there.

    Args:
        repair: read the whole store first, and make the shards anew that are damaged.
    """

    repair: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.features.store is None:
            raise ConfigError("give features.store, the folder to fill")
        if self.target_placement == "tensor_parallel":
            raise ConfigError(
                "target_placement is tensor_parallel, but each process fills its own part of a store here; use "
                "device_map, or train with features.source: hybrid, which fills it in the first epoch"
            )
        if self.data.streaming:
            raise ConfigError("data.streaming is read without end; a store is filled from data read whole")


class Terminated(BaseException):
    """SIGTERM came."""


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, 2 on bad input or a full disk (one line on stderr), 130 when interrupted, 143 when terminated."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        config = load_config(DumpConfig, argv, description=__doc__)
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # torch and transformers are loaded only once the settings are known to be right
        if config.threads is not None:
            os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
        dump(config, *(int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK")))
    except (Eagle3Error, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Terminated) as stop:
        print("\nstopped; whole shards are kept, and the same command goes on from them", file=sys.stderr)
        return 130 if isinstance(stop, KeyboardInterrupt) else 143
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def dump(config: DumpConfig, rank: int = 0, local_rank: int = 0) -> None:
    """Make what the store lacks: this process's share of it."""
    from eagle3_train.features import TargetRun
    from eagle3_train.progress import Progress
    from eagle3_train.shelf import capture_layers, make_manifest
    from eagle3_train.store import FeatureStore, check_space, plan_shards

    folder, world = Path(str(config.features.store)), int(os.environ.get("WORLD_SIZE", "1"))
    if config.repair and world > 1:
        raise ConfigError("repair reads the whole store and removes shards: run it in one process, the rest in several")
    splits, target = _load(config, local_rank)
    layers = capture_layers(config, target)
    manifest = make_manifest(config, target, layers)
    if config.repair:
        _remove_damaged(folder, manifest)
    store = FeatureStore(folder, manifest, (rank, world))
    chats = _chats(splits, manifest)
    keys, lacking = list(chats), [chat for key, chat in chats.items() if key not in store]
    needed = sum(chat.size for chat in lacking)
    if rank == 0:
        print(f"{len(chats):,} chats, {len(chats) - len(lacking):,} of them in {folder}; the rest are", end=" ")
        print(f"{sum(c.tokens for c in lacking):,} tokens and take {needed / 2**30:.3f} GiB ({manifest.dtype})")
    check_space(folder, needed)

    # the plan is of all chats, whatever is there and whoever makes them: a store made in parts is that made at once
    plan = plan_shards([chat.size for chat in chats.values()], int(config.features.shard_mib * 2**20))
    shards = [[(keys[i], chats[keys[i]]) for i in shard if keys[i] not in store] for shard in plan[rank::world]]
    total, run = sum(map(len, shards)), TargetRun(target, layers, config.data.max_length)
    progress = Progress(total, every=max(1, total // 20), enabled=rank == 0, unit="chat")
    done = 0
    for shard in filter(None, shards):
        made: dict[bytes, Encoded] = {}
        for key, chat in shard:
            made[key] = store.codec.encode(run(*chat.inputs(target.device)))
            progress.update(done := done + 1, chat.tokens)
        store.write_shard(made)
    progress.close()
    if rank == 0:
        print(f"{folder}: {len(store):,} chats" + (" and what the other processes make" if world > 1 else ""))


@dataclass(frozen=True)
class Chat:
    """A row of a split, read when it is needed; `size` in bytes."""

    split: Any
    row: int
    tokens: int
    size: int

    def inputs(self, device: Any) -> "tuple[Tensor, list[int], Tensor]":
        """Of a TargetRun: the chat alone."""
        from eagle3_train.batches import pack, supervised

        batch = pack([self.split[self.row]]).to(device)
        return batch.ids, batch.lengths, supervised(batch.span_ids, 0)


def _chats(splits: list[Any], manifest: "Manifest") -> dict[bytes, Chat]:
    """Every chat that training and evaluation ask for, by key, in order."""
    from eagle3_train.shelf import document_size

    chats = {}
    for split in splits:
        for number, row in enumerate(split):
            key, size = document_size(row, manifest)
            chats.setdefault(key, Chat(split, number, len(row["input_ids"]), size))
    return chats


def _load(config: DumpConfig, local_rank: int) -> "tuple[list[Any], Target]":
    """The rows to train on and those held out; the target."""
    import torch

    from eagle3.target import Target
    from eagle3_train.prepared import prepare_rows
    from eagle3_train.tokenizer import load_tokenizer

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rows = prepare_rows(config, *load_tokenizer(config.target), Path(config.output) / "data")
    device = config.device
    if device == "auto":
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    target = Target.load(config.target, config.dtype, device, placement=config.target_placement)
    if config.data.max_length > target.max_positions:
        raise ConfigError(
            f"data.max_length {config.data.max_length} exceeds the target's {target.max_positions} positions"
        )
    return [rows.train, rows.held_out], target


def _remove_damaged(folder: Path, manifest: "Manifest") -> None:
    from eagle3_train.store import damaged_shards

    for path, why in damaged_shards(folder, manifest):
        print(f"removed, to be made anew: {why.partition('; run')[0]}")
        path.unlink()


def _terminate(*_signal: Any) -> None:
    raise Terminated


if __name__ == "__main__":
    sys.exit(main())
