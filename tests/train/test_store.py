"""The feature store's files: whole or absent, equal when made again, and never read damaged. No models."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3.errors import StoreError
from eagle3_train import store as store_module
from eagle3_train.shards import Codec, DocumentFeatures
from eagle3_train.store import (
    FeatureStore,
    Manifest,
    check_space,
    damaged_shards,
    document_keys,
    plan_shards,
)

HIDDEN = 16
MANIFEST = Manifest(
    target_fingerprint="f",
    target_weights="w",
    target_dtype="float32",
    tokenizer="t",
    template="c",
    capture_layers=[1, 3, 4],
    hidden_size=HIDDEN,
    vocab_size=100,
    max_length=64,
    dtype="float32",
)


def document(number):
    """(key, values) of a document of 5 + number tokens, some of them supervised; of number 0 none."""
    draw = torch.Generator().manual_seed(number)
    values = DocumentFeatures(
        features=torch.randn(5 + number, 3 * HIDDEN, generator=draw),
        hidden=torch.randn(number, HIDDEN, generator=draw),
        lse=torch.randn(number, generator=draw),
        argmax=torch.randint(0, 100, (number,), generator=draw),
    )
    return bytes([number]) * 16, values


def encoded(numbers, manifest=MANIFEST):
    return {key: manifest.codec.encode(values) for key, values in map(document, numbers)}


@pytest.fixture
def filled(tmp_path):
    """A store of documents 0..5 in two shards."""
    store = FeatureStore(tmp_path / "store", MANIFEST, (0, 1))
    for numbers in (range(3), range(3, 6)):
        store.write_shard(encoded(numbers))
    return tmp_path / "store"


def shards(folder):
    return sorted(folder.glob("shard-*"))


def shard_with(folder, number):
    """The shard that holds a document."""
    return next(path for path in shards(folder) if (bytes([number]) * 16).hex().encode() in path.read_bytes())


def same(found, wanted):
    assert found is not None
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name].view(torch.uint8), x.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8"])
def test_what_is_read_is_what_was_written(tmp_path, dtype):
    """Rows of a neighbour; a document of nothing supervised; order of reading; a reopened store."""
    manifest = replace(MANIFEST, dtype=dtype)
    store = FeatureStore(tmp_path / "store", manifest, (0, 1), shard_bytes=1000)
    wanted = encoded(range(8), manifest)
    for key, kept in wanted.items():
        store.add(key, kept)
        same(store.get(key), kept)
    assert store.get(b"x" * 16) is None
    store.flush()
    assert len(shards(tmp_path / "store")) > 2
    again = FeatureStore(tmp_path / "store", manifest)
    assert len(again) == 8
    for number in (5, 0, 7, 1, 2, 6, 4, 3):
        key, values = document(number)
        same(again.get(key), wanted[key])
        decoded = again.codec.decode(wanted[key], torch.float32, "cpu")
        assert torch.equal(decoded.argmax, values.argmax)
        assert torch.equal(decoded.lse, values.lse)
        if dtype == "float32":
            assert torch.equal(decoded.features, values.features)
            assert torch.equal(decoded.hidden, values.hidden)


def test_float8_keeps_three_bits_at_every_layers_size():
    """One scale for all captured layers: the small ones would be lost below the largest's grid."""
    _, values = document(9)
    sizes = torch.tensor([1e-3, 1.0, 3e4]).repeat_interleave(HIDDEN)
    features = values.features * sizes
    features[2] = 0
    codec = Codec("float8", 3)
    found = codec.decode(codec.encode(replace(values, features=features)), torch.float32, "cpu")
    large = features.abs() > sizes * 0.05
    assert ((found.features - features).abs()[large] <= features.abs()[large] / 16).all()
    assert not found.features[2].any()


def test_equal_documents_make_equal_files(tmp_path):
    """A store made again, or in parts, could not be compared."""
    for name in ("one", "two"):
        store = FeatureStore(tmp_path / name, MANIFEST, (0, 1))
        store.write_shard(encoded(range(3)))
    (one,), (two,) = shards(tmp_path / "one"), shards(tmp_path / "two")
    assert one.name == two.name
    assert one.read_bytes() == two.read_bytes()
    FeatureStore(tmp_path / "two", MANIFEST, (0, 1)).write_shard(encoded([4]))
    assert len(shards(tmp_path / "two")) == 2


@pytest.mark.parametrize("cut", [0, 4, 60, 0.5, -1])
def test_a_shard_cut_short_is_named(filled, cut):
    """Rows past its end read as anything; a size that nobody compares."""
    path = shard_with(filled, 4)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(StoreError, match=rf"{path.name} .*damaged.*--repair true.*remove that file"):
        FeatureStore(filled, MANIFEST)
    assert [p for p, _ in damaged_shards(filled, MANIFEST)] == [path]
    # without it the rest is there, and its documents are not
    path.unlink()
    left = FeatureStore(filled, MANIFEST)
    assert len(left) == 3
    assert left.get(document(4)[0]) is None
    same(left.get(document(1)[0]), encoded([1])[document(1)[0]])


def check_all(folder):
    """Documents that are read at all are what was written."""
    store = FeatureStore(folder, MANIFEST)
    for key, kept in encoded(range(6)).items():
        same(store.get(key), kept)


@pytest.mark.parametrize("place", range(0, 100, 7))
def test_a_flipped_bit_is_seen(filled, place):
    """Anywhere in the file: then the document, the index or the header is told to be damaged, never read."""
    path = shard_with(filled, 4)
    content = bytearray(path.read_bytes())
    content[len(content) * place // 100] ^= 16
    path.write_bytes(content)
    with pytest.raises(StoreError, match=path.name):
        check_all(filled)
    assert [p for p, _ in damaged_shards(filled, MANIFEST)] == [path]


def test_files_of_others_are_named(filled, tmp_path):
    """A shard of another target's store, a checkpoint, a shard under another's name."""
    other = FeatureStore(tmp_path / "other", replace(MANIFEST, target_fingerprint="g"), (0, 1))
    other.write_shard(encoded([7]))
    (foreign,) = shards(tmp_path / "other")
    for source, name, why in (
        (foreign, foreign.name, "another store"),
        (shard_with(filled, 1), "shard-0011223344556677.safetensors", "not that of its name"),
    ):
        shutil.copy(source, filled / name)
        with pytest.raises(StoreError, match=rf"{name} .*{why}"):
            FeatureStore(filled, MANIFEST)
        (filled / name).unlink()
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, filled / "model.safetensors")
    with pytest.raises(StoreError, match=r"model\.safetensors .*no shard"):
        FeatureStore(filled, MANIFEST)
    assert not list(damaged_shards(filled, MANIFEST)), "repairing would remove what is none of the store's"


@pytest.mark.parametrize(
    "field, value",
    [
        ("target_fingerprint", "g"),
        ("target_weights", None),
        ("target_dtype", "bfloat16"),
        ("tokenizer", "u"),
        ("template", "d"),
        ("capture_layers", [1, 3, 5]),
        ("vocab_size", 101),
        ("max_length", 32),
        ("dtype", "float8"),
        ("schema", 2),
    ],
)
def test_a_store_of_other_settings_is_refused(filled, field, value):
    """Features of another layer or target learned from: nothing crashes, tau is 1."""
    other = replace(MANIFEST, **{field: value})
    told = rf"other settings: {field} .*{getattr(MANIFEST, field)}.* \(this run: .*{value}.*\)".replace("[", r"\[")
    for writer in (None, (0, 1)):
        with pytest.raises(StoreError, match=told):
            FeatureStore(filled, other, writer)
    with pytest.raises(StoreError, match="other settings"):
        list(damaged_shards(filled, other))
    assert len(shards(filled)) == 2


def test_folders_that_are_no_store(tmp_path, filled):
    with pytest.raises(StoreError, match=r"no feature store \(no manifest.json\).*dump_features.py"):
        FeatureStore(tmp_path / "absent", MANIFEST)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is a file"):
        FeatureStore(tmp_path / "file", MANIFEST, (0, 1))
    # a manifest that was lost is not made up: whose shards are these
    (filled / "manifest.json").unlink()
    with pytest.raises(StoreError, match="no feature store"):
        FeatureStore(filled, MANIFEST, (0, 1))
    (filled / "manifest.json").write_text('{"schema": 1,')
    with pytest.raises(StoreError, match=r"manifest\.json cannot be read"):
        FeatureStore(filled, MANIFEST)


def test_what_a_kill_leaves_is_removed_by_its_owner(filled):
    """Parts add up; or one process removes what another is writing, of its own run or of another one."""
    beside = filled / f".shard-01.safetensors.part-{os.getpid()}-1"
    beside.write_bytes(b"half")
    # no process has so high a number
    parts = [filled / f".shard-00.safetensors.part-{2**30}-{rank}" for rank in range(5)]
    for part in parts:
        part.write_bytes(b"half")
    store = FeatureStore(filled, MANIFEST, (1, 2))
    assert [part.exists() for part in parts] == [True, False, True, False, True]
    assert beside.exists()
    FeatureStore(filled, MANIFEST)
    assert parts[0].exists()
    assert len(store) == 6


def test_processes_fill_one_store_together(tmp_path):
    """A shard of one rank that the others never see, or two of one name."""
    ranks = [FeatureStore(tmp_path / "store", MANIFEST, (rank, 2), shard_bytes=2**20) for rank in range(2)]
    wanted = encoded(range(6))
    for number, (key, kept) in enumerate(wanted.items()):
        ranks[number % 2].add(key, kept)
    assert ranks[1].get(document(0)[0]) is None
    for rank in ranks:
        rank.flush()
    for rank in ranks:
        for key, kept in wanted.items():
            same(rank.get(key), kept)
    assert len(shards(tmp_path / "store")) == 2


def test_a_document_in_two_shards(tmp_path):
    """Two ranks may meet one chat at once."""
    for rank, numbers in enumerate(([1, 2], [2, 3])):
        FeatureStore(tmp_path / "store", MANIFEST, (rank, 2)).write_shard(encoded(numbers))
    store = FeatureStore(tmp_path / "store", MANIFEST)
    assert len(store) == 3
    for key, kept in encoded([1, 2, 3]).items():
        same(store.get(key), kept)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB, and what makes it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing_that_was_written(small_disk):
    """A half shard under its final name; a part that fills the disk for ever; a message about errno."""
    folder, enlarge = small_disk
    store = FeatureStore(folder / "store", MANIFEST, (0, 1))
    store.write_shard(encoded(range(3)))
    with pytest.raises(StoreError, match=r"is full; 3 documents in 1 shards are whole.*the same command goes on"):
        store.write_shard(encoded(range(3, 60)))
    assert sorted(p.name for p in (folder / "store").iterdir()) == ["manifest.json", shards(folder / "store")[0].name]
    for number in range(3):
        same(store.get(document(number)[0]), encoded([number])[document(number)[0]])
    with pytest.raises(StoreError, match=r"need 1.000 GiB in .*, 0.000 GiB are free"):
        check_space(folder / "store", 2**30)
    enlarge()
    store.write_shard(encoded(range(3, 60)))
    assert len(FeatureStore(folder / "store", MANIFEST)) == 60


def test_space_is_checked_where_the_folder_will_be(tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return SimpleNamespace(free=2**29)

    monkeypatch.setattr(store_module.shutil, "disk_usage", usage)
    check_space(tmp_path / "a/b", 2**29)
    with pytest.raises(StoreError, match=r"need 2.000 GiB .*, 0.500 GiB are free"):
        check_space(tmp_path / "a/b", 2**31)
    assert asked == [tmp_path, tmp_path]


def test_plan_covers_all_in_order():
    sizes = [5, 5, 5, 30, 1, 1, 9, 10, 4]
    plan = plan_shards(sizes, 10)
    assert [i for shard in plan for i in shard] == list(range(9))
    # as full as they get, but a document that is larger alone
    assert [sum(sizes[i] for i in shard) for shard in plan] == [10, 5, 30, 2, 9, 10, 4]
    assert plan_shards([], 10) == []


def test_keys_tell_tokens_from_masks():
    """A document known by its length, or by a mask that another document has."""
    ids, other = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    first, second = torch.tensor([True, False, False]), torch.tensor([False, True, False])
    keys = document_keys([ids, other, ids, ids.int()], [first, first, second, first])
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


def test_manifest_is_told_in_words(filled):
    """Users read it."""
    told = json.loads((filled / "manifest.json").read_text())
    assert told["capture_layers"] == [1, 3, 4]
    assert told["dtype"] == "float32"
    assert told["schema"] == 1
