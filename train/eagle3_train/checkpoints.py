"""Checkpoints of a run: whole fp32 weights and optimiser states by parameter name, so that a run goes on under any
framework and any number of processes. Only the main process touches the files; a kill at any time leaves the last
whole one. Knows files, no models.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from eagle3.errors import CheckpointError, ConfigError
from eagle3_train.config import TrainConfig
from eagle3_train.parallel import Parallel, States
from eagle3_train.state import RunState
from eagle3_train.tracking import write_record

KEEP = 2
FORMAT = 2
PROGRESS = "progress.json"
# weights and buffers; what the optimiser keeps, as `<parameter>/<key>`; the average of the weights, if there is one
WEIGHTS, STATES, AVERAGE = "model.safetensors", "optimizer.safetensors", "average.safetensors"
# settings that a resumed run may change without being another run
FREE = {
    "output",
    "eval",
    "save_every",
    "log_every",
    "threads",
    "log_with",
    "project",
    "resume",
    "device",
}


class Resumed(NamedTuple):
    """What a checkpoint gave back: the state, averaged weights as processes hold them, settings that changed since."""

    state: RunState
    average: dict[str, Tensor] | None
    changes: list[str]


class Checkpoints:
    """`<run>/checkpoints/step-00000100`, the last two. Methods are collective."""

    def __init__(self, folder: Path, parallel: Parallel):
        self.folder, self.parallel = folder, parallel

    def latest(self) -> Path | None:
        """The newest whole checkpoint, as the main process sees it."""
        return self.parallel.on_main(lambda: _newest(self.folder))

    def save(
        self, state: RunState, config: TrainConfig, head_config: Any, average: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write a checkpoint; older ones but the last are removed.

        Args:
            average: averages of the weights, as the process holds them (`Parallel.local`).
        Raises:
            CheckpointError: it cannot be written, as on a full disk; earlier ones are as they were.
        """
        parallel = self.parallel
        files = {WEIGHTS: {**parallel.whole(), **parallel.buffers()}}
        states = parallel.states()
        files[STATES] = {f"{n}/{k}": v for n, s in states.items() for k, v in s.items() if isinstance(v, Tensor)}
        numbers = {n: {k: v for k, v in s.items() if not isinstance(v, Tensor)} for n, s in states.items()}
        if average is not None:
            files[AVERAGE] = parallel.whole(average)
        record = {"format": FORMAT, "state": state, "config": config, "head": head_config, "numbers": numbers}
        parallel.on_main(lambda: self._write(f"step-{state.step:08d}", files, record))

    def _write(self, name: str, files: Mapping[str, dict[str, Tensor]], record: dict[str, Any]) -> None:
        final, part = self.folder / name, self.folder / f".{name}.part"
        size = sum(x.nbytes for tensors in files.values() for x in tensors.values())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # what a kill left behind
            for hidden in self.folder.glob(".step-*"):
                shutil.rmtree(hidden)
            part.mkdir()
            if (free := shutil.disk_usage(part).free) < size:
                raise OSError(f"{size / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB free")
            sums = {file: _write_tensors(part / file, tensors) for file, tensors in files.items()}
            write_record(part / PROGRESS, {**record, "files": sums})
            _to_disk(part / PROGRESS)
            _to_disk(part)
            _replace(part, final)
            for old in sorted(self.folder.glob("step-*"))[:-KEEP]:
                _remove(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            newest = _newest(self.folder)
            last = f"the last one is {newest}" if newest else "there is none yet"
            raise CheckpointError(
                f"checkpoint {final} cannot be written ({error}); {last}: make room, and the same command goes on there"
            ) from error

    def load(self, path: Path, config: TrainConfig, head_config: Any) -> Resumed:
        """Restore a checkpoint, whatever framework and number of processes wrote it. The state of another optimiser
        than the run's now serves nothing: that begins anew.

        Raises:
            ConfigError: the head's architecture differs.
            CheckpointError: a file of it is missing or damaged.
        """
        files: dict[str, dict[str, Tensor]] = {}
        record = self.parallel.on_main(lambda: _read(path, _plain(head_config), files))
        same = record["config"]["optim"]["name"] == config.optim.name
        states = _states(files.get(STATES, {}), record["numbers"]) if same else {}
        self.parallel.load(files.get(WEIGHTS, {}), states)
        average = self.parallel.localize(files.get(AVERAGE, {})) if AVERAGE in record["files"] else None
        changes = _changes(record["config"], _plain(config))
        return Resumed(
            RunState(**record["state"]), average, changes + ([] if same else ["the optimiser's state is new"])
        )


def _newest(folder: Path, before: str = "~") -> Path | None:
    whole = [p for p in folder.glob("step-*") if (p / PROGRESS).is_file() and p.name < before]
    return max(whole, default=None, key=lambda p: p.name)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Its size and checksum."""
    save_file({name: x.contiguous() for name, x in tensors.items()}, file)
    _to_disk(file)
    return _sum(file)


def _sum(file: Path) -> dict[str, int]:
    checksum = 0
    with file.open("rb") as f:
        while block := f.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": file.stat().st_size, "crc32": checksum}


def _to_disk(path: Path) -> None:
    """A rename may reach the disk before what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(part: Path, final: Path) -> None:
    if final.exists():
        _remove(final)
    part.rename(final)
    _to_disk(final.parent)


def _remove(path: Path) -> None:
    """First out of sight: half of a checkpoint looks like a whole one."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _read(path: Path, head: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """The record of a checkpoint whose files are whole; their tensors go into `files`."""
    try:
        record = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        version = record.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise _damaged(path / PROGRESS, str(error)) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} is a checkpoint of another version of this trainer (format {version}, this one reads {FORMAT}); "
            f"give another output folder, and to start from its head --init_head {path.parent.parent / 'last'}"
        )
    differing = sorted(k for k, v in head.items() if record["head"].get(k) != v)
    if differing:
        raise ConfigError(
            f"{path} holds a head with other {', '.join(differing)}; give another output folder to start anew"
        )
    for name, written in record["files"].items():
        files[name] = _read_tensors(path / name, written)
    return record


def _read_tensors(file: Path, written: dict[str, int]) -> dict[str, Tensor]:
    try:
        # not mapped: the file is removed when newer ones are there
        data = file.read_bytes()
        if {"bytes": len(data), "crc32": zlib.crc32(data)} != written:
            raise _damaged(file, f"{len(data)} bytes of {written['bytes']}, or others than written")
        return load(data)
    except (OSError, SafetensorError) as error:
        raise _damaged(file, str(error)) from error


def _damaged(file: Path, detail: str) -> CheckpointError:
    folder = file.parent
    earlier = _newest(folder.parent, before=folder.name)
    rest = f"go on from {earlier.name}" if earlier else "start anew"
    detail = next(iter(detail.splitlines()), "")
    return CheckpointError(f"{file} is missing or damaged ({detail}); remove {folder} to {rest}")


def _states(tensors: Mapping[str, Tensor], numbers: Mapping[str, dict[str, Any]]) -> States:
    states: States = {name: dict(of_it) for name, of_it in numbers.items()} if tensors else {}
    for key, x in tensors.items():
        name, _, kind = key.rpartition("/")
        states[name][kind] = x
    return states


def _plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON would give it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _changes(old: Any, new: Any, name: str = "") -> list[str]:
    if name in FREE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        # a term that is gone from the loss is a change too
        inner = [_changes(old.get(k), new.get(k), f"{name}.{k}" if name else k) for k in {**old, **new}]
        return [change for part in inner for change in part]
    return [] if old == new else [f"{name}: {old} -> {new}"]
