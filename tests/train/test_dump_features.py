"""dump_features.py, and training from what it leaves: the same as online, whatever stopped it on its way."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.target import Target
from eagle3_train import features as features_module
from eagle3_train import store as store_module
from oracles.runs import arguments, check_equal, final, losses, metrics, train
from oracles.script import ENV, ROOT, SCRIPT
from oracles.tiny import tiny_chats, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
DUMP = ROOT / "train/dump_features.py"
# a chat has some 47 tokens, 36 KiB of them
ONE_EACH = {"data__max_length": 60, "tokens_per_batch": 60}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `target` and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    tiny_chats(folder / "chats.jsonl", folder / "target")
    return folder


def words(made, store, **changes):
    changes = {"features__store": store, "features__shard_mib": 0.1, "data__max_length": 60, **changes}
    return arguments(made, made / "data-of-dumps", **changes)


def dump(made, store, **changes):
    """Exit code of a run in this process."""
    return runpy.run_path(str(DUMP))["main"](words(made, store, **changes))


def files(store):
    return {path.name: path.read_bytes() for path in store.iterdir()}


def shards(store):
    return sorted(store.glob("shard-*"))


@pytest.fixture(scope="module")
def store(made, tmp_path_factory):
    """The uninterrupted store, of about three chats a shard."""
    folder = tmp_path_factory.mktemp("store") / "store"
    assert dump(made, folder) == 0
    assert 5 < len(shards(folder)) < 12
    return folder


@pytest.fixture
def no_target(monkeypatch):
    """The target's decoder must not run, nor its layers be there."""
    load, loaded = Target.load, []

    def loading(*args, **options):
        loaded.append(load(*args, **options))
        return loaded[-1]

    monkeypatch.setattr(Target, "load", loading)
    yield
    assert [len(target.layers) for target in loaded] == [1]


@pytest.mark.parametrize("packed", [False, True])
def test_offline_equals_online(made, store, tmp_path, packed, request):
    """Loss by loss and weight by weight: bit for bit where the target runs on one chat at a time, too; packed, against
    the memory, which is made one by one. Rows of another chat, states in another dtype, another product of lm_head."""
    settings = {"data__max_length": 60} if packed else ONE_EACH
    online = train(made, tmp_path / "online", features__source="memory" if packed else "online", **settings)
    request.getfixturevalue("no_target")
    offline = train(made, tmp_path / "offline", features__source="offline", features__store=store, **settings)
    assert losses(offline) == losses(online)
    check_equal(final(offline), final(online))


def test_hybrid_fills_and_reads(made, store, tmp_path, monkeypatch):
    """The first epoch learning from other values than the next; a store that holds less, or is not used."""
    settings = {"data__max_length": 60, "features__store": tmp_path / "store", "features__shard_mib": 0.1}
    memory = train(made, tmp_path / "memory", features__source="memory", data__max_length=60)
    first = train(made, tmp_path / "first", features__source="hybrid", **settings)
    assert losses(first) == losses(memory)
    check_equal(final(first), final(memory))
    # all that the run met is there: held-out chats, and those that were waiting for a full shard
    monkeypatch.setattr(features_module.TargetRun, "__call__", lambda *_: pytest.fail("the target ran again"))
    second = train(made, tmp_path / "second", features__source="hybrid", **settings)
    assert losses(second) == losses(memory)
    # and it is what dump_features.py makes
    offline = train(made, tmp_path / "offline", features__source="offline", **settings)
    assert losses(offline) == losses(memory)


def test_hybrid_is_resumed_bit_equal(made, tmp_path):
    """What was not yet written is made again, and is the same."""
    settings = {"features__source": "hybrid", "features__store": tmp_path / "store", "data__max_length": 60}
    whole = train(made, tmp_path / "whole", features__source="memory", data__max_length=60)
    part = train(made, tmp_path / "part", save_every=2, **settings)
    shutil.rmtree(part / "checkpoints/step-00000020")
    shards(tmp_path / "store")[0].unlink()
    train(made, part, save_every=2, **settings)
    assert losses(part) == losses(whole)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-3), ("float8", 2e-2)])
def test_smaller_stores_train_alike(made, store, tmp_path, dtype, tolerance):
    """20 steps from bf16 or fp8 lose what online loses within 0.2 % and 2 %."""
    assert dump(made, tmp_path / "store", features__dtype=dtype) == 0
    settings = {"features__store": tmp_path / "store", "features__dtype": dtype, "data__max_length": 60}
    online = train(made, tmp_path / "online", data__max_length=60)
    run = train(made, tmp_path / "run", features__source="offline", **settings)
    for split in (None, "eval"):
        for found, wanted in zip(metrics(run, split), metrics(online, split), strict=True):
            assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    assert metrics(run)[-1]["loss"] < metrics(run)[0]["loss"]
    share = len(b"".join(files(tmp_path / "store").values())) / len(b"".join(files(store).values()))
    assert share < {"bfloat16": 0.53, "float8": 0.36}[dtype]


@pytest.mark.parametrize("whole, byte", [(0, 0), (0, 7), (2, 100), (3, 0.5), (5, -1), (6, 1.0)])
def test_stopped_at_any_byte(made, store, tmp_path, whole, byte):
    """The state that a kill leaves: some shards, and a part of the next. The same command then makes the same store."""
    folder = tmp_path / "store"
    folder.mkdir()
    shutil.copy(store / "manifest.json", folder)
    order = shards(store)
    for path in order[:whole]:
        shutil.copy(path, folder)
    content = order[whole].read_bytes()
    part = content[: int(len(content) * byte) if isinstance(byte, float) else byte]
    (folder / f".{order[whole].name}.part-{2**30}-0").write_bytes(part)
    times = {path.name: path.stat().st_mtime_ns for path in shards(folder)}
    assert dump(made, folder) == 0
    assert files(folder) == files(store)
    assert {path.name: path.stat().st_mtime_ns for path in shards(folder) if path.name in times} == times


def start(made, folder, **changes):
    command = [sys.executable, DUMP, *words(made, folder, **changes)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals(made, tmp_path, sent):
    """A shard that is whole by name only; a code that looks like success; leftovers of a polite end."""
    small = {"features__shard_mib": 0.01}
    whole, folder = tmp_path / "whole", tmp_path / "store"
    process = start(made, folder, **small)
    try:
        deadline = time.monotonic() + 300
        while len(shards(folder)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(sent)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    before = {path.name: path.stat().st_mtime_ns for path in shards(folder)}
    assert len(before) < 20, "the signal came too late to test anything"
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[sent]
    if sent != signal.SIGKILL:
        assert "the same command goes on" in told
        assert "Traceback" not in told
        assert not list(folder.glob(".*"))
    assert dump(made, folder, **small) == 0
    assert dump(made, whole, **small) == 0
    assert files(folder) == files(whole)
    assert {path.name: path.stat().st_mtime_ns for path in shards(folder) if path.name in before} == before


def test_ranks_share_the_chats(made, store, tmp_path, monkeypatch, capsys):
    """A chat made twice or by nobody; shards that depend on how many made them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    made_by = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert dump(made, tmp_path / "store") == 0
        made_by.append(len(shards(tmp_path / "store")))
    assert made_by == [(len(shards(store)) + 1) // 2, len(shards(store))]
    assert files(tmp_path / "store") == files(store)
    monkeypatch.setenv("RANK", "0")
    assert dump(made, tmp_path / "store", repair="true") == 2
    assert "in one process" in capsys.readouterr().err


def test_more_chats_make_more_shards(made, store, tmp_path):
    """Data that grew: what is there stays, what is new is added."""
    half = tmp_path / "half.jsonl"
    half.write_text("".join((made / "chats.jsonl").read_text().splitlines(keepends=True)[:9]))
    assert dump(made, tmp_path / "store", data__files=f"[{half}]") == 0
    before = files(tmp_path / "store")
    assert dump(made, tmp_path / "store") == 0
    after = files(tmp_path / "store")
    assert before.items() <= after.items()
    assert train(made, tmp_path / "run", features__source="offline", features__store=tmp_path / "store", **ONE_EACH)


def test_damage_is_told_and_repaired(made, store, tmp_path, capsys):
    """NaN in a few features for weeks; a store of days made anew for one bad block."""
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    path = shards(folder)[3]
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    main = runpy.run_path(str(SCRIPT))["main"]
    settings = {"features.source": "offline", "features.store": folder, "data.max_length": 60}
    assert main(arguments(made, tmp_path / "run", **settings)) == 2
    told = capsys.readouterr().err
    assert f"{path} of the feature store is damaged" in told
    assert "--repair true" in told
    times = {p.name: p.stat().st_mtime_ns for p in shards(folder) if p != path}
    assert dump(made, folder, repair="true") == 0
    assert path.name in capsys.readouterr().out
    assert files(folder) == files(store)
    assert {p.name: p.stat().st_mtime_ns for p in shards(folder) if p != path} == times


@pytest.mark.parametrize(
    "change, told",
    [
        ({"head__capture_layers": "[0, 2, 4]"}, "capture_layers"),
        ({"data__max_length": 50}, "max_length 60 (this run: 50)"),
        ({"features__dtype": "bfloat16"}, "dtype float32 (this run: bfloat16)"),
        ({"dtype": "bfloat16"}, "target_dtype float32 (this run: bfloat16)"),
    ],
)
def test_a_store_of_other_settings(made, store, tmp_path, capsys, change, told):
    before = files(store)
    main = runpy.run_path(str(SCRIPT))["main"]
    settings = {"features__source": "offline", "features__store": store, "data__max_length": 60, **change}
    assert main(arguments(made, tmp_path / "run", **settings)) == 2
    assert told in capsys.readouterr().err
    assert dump(made, store, repair="true", **change) == 2
    assert told in capsys.readouterr().err
    assert files(store) == before


def test_chats_that_are_not_in_the_store(made, store, tmp_path, capsys):
    """Found after hours, at the first batch that holds one."""
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    shards(folder)[2].unlink()
    main = runpy.run_path(str(SCRIPT))["main"]
    settings = {"features__source": "offline", "features__store": folder, "data__max_length": 60}
    assert main(arguments(made, tmp_path / "run", **settings)) == 2
    told = capsys.readouterr().err
    assert "of 20 chats" in told
    assert "train/dump_features.py with the same settings" in told


def test_a_disk_too_small_is_refused_first(made, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    monkeypatch.setattr(features_module.TargetRun, "__call__", lambda *_: pytest.fail("something was computed"))
    assert dump(made, tmp_path / "store") == 2
    output = capsys.readouterr()
    assert "20 chats, 0 of them in" in output.out
    assert "take 0.001 GiB" in output.out
    assert "need 0.001 GiB in" in output.err
    assert "0.000 GiB are free" in output.err
    assert not shards(tmp_path / "store")


def test_a_disk_that_fills_up(made, store, tmp_path, monkeypatch, capsys):
    """Others fill it meanwhile: what is whole is kept, and after making room the same command ends what it began."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(store_module, "check_space", lambda *_: None)
            assert dump(made, disk / "store") == 2
        assert "shards are whole and stay usable" in capsys.readouterr().err
        half = files(disk / "store")
        assert 2 < len(half) < len(files(store))
        assert half.items() <= files(store).items()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert dump(made, disk / "store") == 0
        assert files(disk / "store") == files(store)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("source", ["online", "memory", "hybrid"])
def test_a_batch_of_nan_stops_the_run(made, tmp_path, monkeypatch, capsys, source):
    """Weights, checkpoints or a store spoilt by it; a message that leaves one searching a million chats."""
    settings = {"features__source": source, "features__store": tmp_path / "store", "max_steps": 4, **ONE_EACH}
    whole = train(made, tmp_path / "whole", max_steps=4, **ONE_EACH)
    hidden, calls = Target.hidden, []

    def broken(self, ids, *rest):
        calls.append(ids)
        # past the check of the first batch and the first two steps of four chats
        return hidden(self, ids, *rest) * (torch.nan if len(calls) == 11 else 1)

    run = tmp_path / "run"
    main = runpy.run_path(str(SCRIPT))["main"]
    with monkeypatch.context() as patch:
        patch.setattr(Target, "hidden", broken)
        assert main(arguments(made, run, save_every=1, **settings)) == 2
    told = capsys.readouterr().err
    assert "hidden states are not finite" in told or "logits are not finite" in told
    text = Target.load(made / "target").tokenizer.decode(calls[10][:10].tolist())
    assert repr(text)[1:-1] in told
    latest = max((run / "checkpoints").glob("step-*"))
    assert latest.name == "step-00000002"
    assert all(torch.isfinite(x).all() for x in final(run).values())
    # with the cause removed the same command goes on as if nothing had been
    train(made, run, save_every=1, **settings)
    assert losses(run) == losses(whole)
    check_equal(final(run), final(whole))


def test_settings_that_make_no_store(made, capsys):
    script = runpy.run_path(str(DUMP))["main"]
    assert script(arguments(made, made / "data-of-dumps")) == 2
    assert "give features.store" in capsys.readouterr().err
    assert script(words(made, made / "nowhere", data__streaming="true", data__vocab_map="x")) == 2
    assert "data read whole" in capsys.readouterr().err
    assert not (made / "nowhere").exists()


def test_target_with_another_later_layer(made, store, tmp_path, capsys):
    """A store made for a target that differs in layers which offline training does not load."""
    other = tmp_path / "target"
    shutil.copytree(made / "target", other)
    (path,) = other.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.5.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    settings = {"features__source": "offline", "features__store": store, "data__max_length": 60}
    command = arguments(made, tmp_path / "run", target=other, **settings)
    assert runpy.run_path(str(SCRIPT))["main"](command) == 2
    assert "target_weights" in capsys.readouterr().err
