"""Checkpoint files: written whole or not at all, damage noticed and named, taken up bit by bit."""

import json
import random
import shutil
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.errors import CheckpointError, ConfigError
from eagle3_train.checkpoints import Checkpoints
from eagle3_train.config import OptimConfig, TrainConfig
from eagle3_train.state import RunState
from oracles.saver import CONFIG, HEAD, latest, made, save, start_saving, step


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}])
def test_a_checkpoint_gives_back_all_it_took(tmp_path, optim):
    """A moment, a step counter, a buffer or the average that is not restored; a state that only looks restored."""
    parallel = made(**optim)
    step(parallel, 3)
    parallel.module.ids += 5
    average = {name: x + 1 for name, x in parallel.local().items()}
    path = save(tmp_path, parallel, 3, average)
    step(parallel, 2)
    other = made(seed=1, **optim)
    state, found, changes = Checkpoints(tmp_path, other).load(path, CONFIG, HEAD)
    assert state == RunState(step=3, best_tau=1 / 3, tracker={"run_id": "x"})
    assert changes == []
    assert found is not None
    assert all(torch.equal(found[name], x) for name, x in average.items())
    assert other.module.ids.tolist() == list(range(5, 13))
    step(other, 2)
    pairs: Any = (
        (other.whole(), parallel.whole()),
        *zip(other.states().values(), parallel.states().values(), strict=True),
    )
    for x, y in pairs:
        assert x.keys() == y.keys()
        assert all(torch.equal(torch.as_tensor(x[k]), torch.as_tensor(y[k])) for k in x)


def test_the_copy_for_evaluation_takes_the_checkpoints_buffers(tmp_path):
    """Averaged weights of the checkpoint's vocabulary, looked at with the map of today's data."""
    parallel = made()
    parallel.module.ids += 5
    path = save(tmp_path, parallel, 1)
    other = made(seed=1)
    Checkpoints(tmp_path, other).load(path, CONFIG, HEAD)
    assert other.plain(other.local()).get_buffer("ids").tolist() == list(range(5, 13))


def test_the_last_two_are_kept(tmp_path):
    parallel = made()
    step(parallel)
    for at in (2, 4, 6):
        save(tmp_path, parallel, at)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    assert {p.suffix for p in (tmp_path / "step-00000006").iterdir()} == {".json", ".safetensors"}


def truncated(file):
    file.write_bytes(file.read_bytes()[:-7])


def flipped(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def missing(file):
    file.unlink()


def garbage(file):
    file.write_text("{not json")


@pytest.mark.parametrize(
    "name, damage",
    [
        ("model.safetensors", truncated),
        ("model.safetensors", flipped),
        ("model.safetensors", missing),
        ("optimizer.safetensors", flipped),
        ("average.safetensors", missing),
        ("progress.json", garbage),
    ],
)
def test_damage_is_named_and_the_one_before_is_offered(tmp_path, name, damage):
    """A bit of a moment that flipped trains on, and nobody knows."""
    parallel = made()
    step(parallel)
    average = parallel.local()
    save(tmp_path, parallel, 2, average)
    path = save(tmp_path, parallel, 4, average)
    damage(path / name)
    checkpoints = Checkpoints(tmp_path, made(seed=1))
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(path, CONFIG, HEAD)
    assert str(path / name) in str(error.value)
    assert f"remove {path} to go on from step-00000002" in str(error.value)
    shutil.rmtree(path)
    assert checkpoints.load(latest(checkpoints.folder, checkpoints.parallel), CONFIG, HEAD).state.step == 2


def test_the_only_one_is_damaged(tmp_path):
    path = save(tmp_path, made(), 2)
    flipped(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"remove {path} to start anew"):
        Checkpoints(tmp_path, made()).load(path, CONFIG, HEAD)


def test_a_checkpoint_of_an_older_trainer(tmp_path):
    path = save(tmp_path, made(), 2)
    record = json.loads((path / "progress.json").read_text())
    del record["format"]
    (path / "progress.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"another version.*--init_head"):
        Checkpoints(tmp_path, made()).load(path, CONFIG, HEAD)


def test_another_head_and_other_settings(tmp_path):
    path = save(tmp_path, made(), 2)
    with pytest.raises(ConfigError, match="other beta1, lr"):
        Checkpoints(tmp_path, made()).load(path, CONFIG, OptimConfig(lr=3.0, beta1=0.3))
    changed = TrainConfig(max_steps=10, optim=OptimConfig(ema=0.5), save_every=3)
    changes = Checkpoints(tmp_path, made()).load(path, changed, HEAD).changes
    assert sorted(changes) == ["max_steps: 9 -> 10", "optim.ema: 0.0 -> 0.5"]


@pytest.fixture
def fast_disk(tmp_path):
    """Where waiting for the disk takes no time, so that a kill comes anywhere in the work."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


def test_killed_at_any_time(fast_disk):
    """Half of a checkpoint taken for a whole one; an old one removed before the new one is there."""
    parallel, draw = made(width=200), random.Random(0)
    step(parallel)
    began = time.monotonic()
    save(fast_disk, parallel, 0)
    took = time.monotonic() - began
    checkpoints, last = Checkpoints(fast_disk, parallel), 0
    for turn in range(15):
        child = start_saving(fast_disk, 200, last)
        # its first one is waited for, every other time until it is whole: on a busy machine none might be written else
        known, pattern = f"step-{last:08d}", "step-*" if turn % 2 else ".step-*"
        while not any(p.name.lstrip(".") > known for p in fast_disk.glob(pattern)):
            assert child.is_alive()
        time.sleep(draw.uniform(0.0, 3 * took))
        child.kill()
        child.join()
        state, _, _ = checkpoints.load(latest(fast_disk, parallel), CONFIG, HEAD)
        assert state.step >= last
        last = state.step
        assert last == 0 or all((x == last).all() for x in parallel.whole().values())
    assert last >= 7
    whole = sorted(p.name for p in fast_disk.glob("step-*"))
    save(fast_disk, parallel, last + 1)
    assert sorted(p.name for p in fast_disk.iterdir()) == [whole[-1], f"step-{last + 1:08d}"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk(small_disk, monkeypatch, foreseen):
    """Half a checkpoint that takes the room of the next one; the last good one gone; an error of a library."""
    parallel = made(width=200)
    step(parallel)
    save(small_disk / "checkpoints", parallel, 2)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 300_000))
    if not foreseen:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be written.*the last one is .*step-00000002"):
        save(small_disk / "checkpoints", parallel, 4)
    assert [p.name for p in (small_disk / "checkpoints").iterdir()] == ["step-00000002"]
    checkpoints = Checkpoints(small_disk / "checkpoints", made(width=200))
    assert checkpoints.load(latest(checkpoints.folder, checkpoints.parallel), CONFIG, HEAD).state.step == 2
    ballast.unlink()
    assert save(small_disk / "checkpoints", parallel, 4).name == "step-00000004"


def test_weights_are_whole_and_fp32(tmp_path):
    parallel = made()
    step(parallel)
    path = save(tmp_path, parallel, 1)
    weights = load_file(path / "model.safetensors")
    assert weights.keys() == {"layer.weight", "layer.bias", "ids"}
    assert weights["layer.weight"].dtype == torch.float32
    states = load_file(path / "optimizer.safetensors")
    assert states.keys() == {f"layer.{n}/{k}" for n in ("weight", "bias") for k in ("step", "exp_avg", "exp_avg_sq")}
