"""Where rows are stored: every kind of file, folders, patterns, saved data sets, the hub; faults name their place."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3.errors import DataError
from eagle3_train import sources
from eagle3_train.sources import HubSource, open_sources

ROWS = [{"a": "é"}, {"a": {"b": [1, {"c": "x" * 50}]}}, {"a": None}]
TABLE = [{"a": "é", "b": 1}, {"a": "f"}]


def rows(*names):
    return [row for source in open_sources([str(name) for name in names]) for _, row in source.rows()]


def json_lines(items):
    return "".join(json.dumps(item) + "\n" for item in items).encode()


@pytest.fixture(params=["plain", "gz"])
def put(tmp_path, request):
    """Write a file, its name given without .gz."""

    def write(name, content):
        if request.param == "gz":
            name, content = f"{name}.gz", gzip.compress(content)
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def test_lines_and_arrays_hold_the_same(put):
    lines, array = json_lines(ROWS), json.dumps(ROWS, indent=1).encode()
    assert rows(put("a.jsonl", lines)) == rows(put("a.json", b"\xef\xbb\xbf \n" + array)) == ROWS
    # what many data sets call .json
    assert rows(put("b.json", lines)) == ROWS
    assert rows(put("c.json", b"[]")) == rows(put("d.json", b" [ ] ")) == rows(put("e.json", b"")) == []


@pytest.mark.parametrize("block", [1, 2, 7, 100])
def test_an_array_is_cut_anywhere(put, monkeypatch, block):
    """Catches: a value, a comma or a multi-byte character split between two blocks that are read."""
    monkeypatch.setattr(sources, "_BLOCK", block)
    file = put("a.json", json.dumps(ROWS * 3, ensure_ascii=False, indent=2).encode())
    assert rows(file) == ROWS * 3


@pytest.mark.parametrize(
    "content, found",
    [
        (b'[{"a": 1}, {"a": ]', ":2: not valid JSON"),
        (b'[{"a": 1} {"a": 2}]', ":2: not valid JSON .expected ',' or ']'"),
        (b'[{"a": 1}', ":2: not valid JSON .*the end"),
        (b'[{"a": 1},', ":2: not valid JSON"),
        (b'[{"a": 1}, 2]', ":2: expected a JSON object, found int"),
        (b'[{"a": "\xe9"}]', ":1: cannot be read .'utf-8'"),
        (b"[" * 200_000, ":1: not valid JSON"),
        (b'[{"a": 1}]' + b" " * 200_000 + b'[{"a": 2}]', ":2: not valid JSON .a file holds one array"),
    ],
)
def test_a_broken_array_names_its_item(put, content, found):
    with pytest.raises(DataError, match=rf"a\.json(\.gz)?{found}"):
        rows(put("a.json", content))


def test_parquet_has_no_missing_keys(tmp_path):
    """Catches: nulls that only other rows' keys brought in, handed to a template."""
    pq.write_table(
        pa.Table.from_pylist([{"m": [{"x": 1}, {"y": {"z": None, "w": 2}}]}, {"m": None}]), tmp_path / "a.parquet"
    )
    assert rows(tmp_path / "a.parquet") == [{"m": [{"x": 1}, {"y": {"w": 2}}]}, {}]
    (place, _), *_ = open_sources([str(tmp_path / "a.parquet")])[0].rows()
    assert place == f"{tmp_path}/a.parquet:1"


def test_damaged_files_are_named(tmp_path):
    pq.write_table(pa.Table.from_pylist(TABLE), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "spoiled.parquet").write_bytes(whole[:20] + b"\xff" * 40 + whole[60:])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(ROWS * 500).encode())[:-9])
    for name in ("cut.parquet", "spoiled.parquet", "empty.parquet", "cut.json.gz"):
        with pytest.raises(DataError, match=rf"{name}:\d+: cannot be read"):
            rows(tmp_path / name)


def test_patterns_and_folders_are_sorted(tmp_path):
    for name in ("b.jsonl", "a/c.json", "a/d.jsonl.gz", ".hidden.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = json_lines([{"from": name}])
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = [{"from": name} for name in ("a/c.json", "a/d.jsonl.gz", "b.jsonl")]
    assert rows(tmp_path) == rows(tmp_path / "**/*[lnz]") == found
    assert rows(tmp_path / "a", tmp_path / "*.jsonl") == found


def test_a_name_that_looks_like_a_pattern(tmp_path):
    (tmp_path / "chats[1].jsonl").write_bytes(json_lines(TABLE))
    assert rows(tmp_path / "chats[1].jsonl") == TABLE


@pytest.mark.parametrize(
    "name, told",
    [
        ("missing.jsonl", r"missing\.jsonl: no such file"),
        ("*.jsonl", r"\*\.jsonl: no file matches this pattern"),
        (".", "no file of this folder ends in"),
        ("notes.txt", r"notes\.txt: not a kind of file that is read: use \.jsonl"),
    ],
)
def test_what_is_not_there(tmp_path, name, told):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=told):
        open_sources([str(tmp_path / name)])


def test_nothing_named():
    with pytest.raises(DataError, match="no data files given"):
        open_sources([])


def test_a_saved_data_set(tmp_path):
    data = datasets.Dataset.from_list(TABLE)
    data.save_to_disk(tmp_path / "saved")
    assert rows(tmp_path / "saved") == TABLE
    (before,) = (source.stamp() for source in open_sources([str(tmp_path / "saved")]))
    datasets.Dataset.from_list(TABLE[:1]).save_to_disk(tmp_path / "saved")
    (after,) = (source.stamp() for source in open_sources([str(tmp_path / "saved")]))
    assert before != after, "a stream over other data would pass for the same one"
    datasets.DatasetDict({"one": data, "two": data}).save_to_disk(tmp_path / "both")
    assert rows(tmp_path / "both/two") == TABLE
    with pytest.raises(DataError, match=r"several splits; name one of .*both/one, .*both/two"):
        open_sources([str(tmp_path / "both")])
    for file in (tmp_path / "saved").glob("*.arrow"):
        file.write_bytes(b"spoiled")
    with pytest.raises(DataError, match=r"saved: cannot be read as a saved data set"):
        rows(tmp_path / "saved")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that `datasets` takes for a data set's repository."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(json_lines(TABLE))
    (folder / "test.jsonl").write_bytes(json_lines(TABLE[1:]))
    return folder


def test_a_data_set_of_the_hub(hub):
    (source,) = open_sources([f"hub:{hub}"])
    assert [(place, row) for place, row in source.rows()] == [(f"hub:{hub}:{n}", r) for n, r in enumerate(TABLE, 1)]
    assert [row for _, row in source.rows(streaming=True)] == TABLE
    assert rows(f"hub:{hub}@test") == TABLE[1:]
    assert source.digest() == open_sources([f"hub:{hub}"])[0].digest() != open_sources([f"hub:{hub}@test"])[0].digest()
    with pytest.raises(DataError, match="@validation: cannot be loaded"):
        rows(f"hub:{hub}@validation")


def test_names_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **how: asked.append((*names, how["split"])) or [])
    for name in ("hub:org/name", "hub:org/name@test[:5%]", "hub:org/name:config", "hub:org/name:config@dev"):
        rows(name)
    assert asked == [
        ("org/name", None, "train"),
        ("org/name", None, "test[:5%]"),
        ("org/name", "config", "train"),
        ("org/name", "config", "dev"),
    ]
    with pytest.raises(DataError, match="write hub:org/name"):
        HubSource("hub:@x")


def test_no_way_to_the_hub():
    """Runs offline, as the tests do."""
    with pytest.raises(DataError, match=r"hub:nobody/nothing: cannot be loaded .*name their folder"):
        rows("hub:nobody/nothing")


def test_a_digest_is_of_the_contents(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(json_lines(TABLE))
    one, other = open_sources([str(tmp_path)])
    assert one.digest() == other.digest()
    (tmp_path / "b.jsonl").write_bytes(json_lines([{"a": "é", "b": 2}, {"a": "f"}]))
    assert one.digest() != other.digest()
    assert one.stamp() != other.stamp()
