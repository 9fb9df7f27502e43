"""A vocabulary map in its file, and `train/build_vocab_map.py` as users run it."""

import importlib.util
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle3.errors import ConfigError, VocabMapError
from eagle3.vocab import build_vocab_map
from eagle3_train.vocab_file import load_vocab_map, save_vocab_map
from oracles.tiny import tiny_folder, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
ROOT = Path(__file__).parents[2]
SIZE, USABLE, PADDED = 100, 259, 300
END = 256


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def chosen():
    return build_vocab_map(torch.arange(USABLE), SIZE, [END], USABLE)


@pytest.fixture
def file(tmp_path, tokenizer, chosen):
    save_vocab_map(tmp_path / "folder/map.safetensors", chosen, tokenizer, {"coverage_train": "0.5"})
    return str(tmp_path / "folder/map.safetensors")


def test_a_map_survives_its_file(file, tokenizer, chosen):
    """Also in an lm_head that has more rows than the tokenizer has ids."""
    for vocab_size in (USABLE, PADDED):
        loaded = load_vocab_map(file, tokenizer, vocab_size, SIZE, [END])
        assert torch.equal(loaded.d2t, chosen.d2t)
        assert torch.equal(loaded.t2d[:USABLE], chosen.t2d)
        assert loaded.t2d.shape == (vocab_size,)
        assert int(loaded.t2d.sum()) == SIZE
    with safe_open(file, framework="pt") as stored:
        assert stored.metadata()["coverage_train"] == "0.5"
        assert stored.get_tensor("d2t").dtype == torch.int64
        assert stored.get_tensor("t2d").dtype == torch.bool
    assert [path.name for path in Path(file).parent.iterdir()] == ["map.safetensors"]


@pytest.mark.parametrize("size", [SIZE + 1, None])
def test_another_size_is_a_config_error(file, tokenizer, size):
    with pytest.raises(ConfigError, match=rf"maps 100 draft tokens, but head.draft_vocab_size is {size or PADDED}"):
        load_vocab_map(file, tokenizer, PADDED, size)


def test_a_map_of_another_tokenizer(file):
    other = tiny_tokenizer()
    other.add_tokens(["word"])
    with pytest.raises(VocabMapError, match=r"map\.safetensors was made for another tokenizer"):
        load_vocab_map(file, other, PADDED, SIZE)


def test_a_map_without_an_end_of_turn_is_warned_of(file, tokenizer):
    with pytest.warns(UserWarning, match=r"lacks the ids \[0, 400\] that end a turn"):
        load_vocab_map(file, tokenizer, PADDED, SIZE, [0, END, 400])


def test_files_of_others(tmp_path, tokenizer, chosen):
    """Other tools write d2t with t2d and say nothing of a tokenizer."""
    file = str(tmp_path / "other.safetensors")
    save_file({"d2t": chosen.d2t, "t2d": chosen.t2d}, file)
    assert torch.equal(load_vocab_map(file, tokenizer, PADDED, SIZE).d2t, chosen.d2t)
    save_file({"d2t": chosen.target_ids, "t2d": chosen.t2d}, file)
    with pytest.raises(VocabMapError, match=r"other\.safetensors: d2t.*saved as absolute ids"):
        load_vocab_map(file, tokenizer, PADDED, SIZE)
    save_file({"d2t": chosen.d2t, "t2d": ~chosen.t2d}, file)
    with pytest.raises(VocabMapError, match="disagree"):
        load_vocab_map(file, tokenizer, PADDED, SIZE)
    # of a larger vocabulary, whose tokens this target lacks
    with pytest.raises(VocabMapError, match="outside"):
        load_vocab_map(file, tokenizer, 200, SIZE)
    save_file({"weight": chosen.d2t}, file)
    with pytest.raises(VocabMapError, match=r"holds \['weight'\]; a vocabulary map holds d2t"):
        load_vocab_map(file, tokenizer, PADDED, SIZE)
    for content in (b"", b"spoiled" * 9):
        Path(file).write_bytes(content)
        with pytest.raises(VocabMapError, match="cannot be read as a vocabulary map"):
            load_vocab_map(file, tokenizer, PADDED, SIZE)
    with pytest.raises(VocabMapError, match="missing"):
        load_vocab_map(str(tmp_path / "missing.safetensors"), tokenizer, PADDED, SIZE)


def test_what_cannot_be_written_leaves_the_old_file(file, tokenizer, chosen):
    before = Path(file).read_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_vocab_map(Path(file), chosen, tokenizer, {"coverage_train": "0.6"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert Path(file).read_bytes() == before
    assert [path.name for path in Path(file).parent.iterdir()] == ["map.safetensors"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("build_vocab_map", ROOT / "train/build_vocab_map.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Flags of a target and chats whose replies are of the letters a to t."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    chats = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": chr(97 + i) * 9}]}
        for i in range(20)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return ["--target", str(folder / "target"), "--data.files", f"[{folder / 'chats.jsonl'}]", "--data.eval_rows", "5"]


def test_the_script_prints_coverage_and_writes_the_map(script, made, tmp_path, capsys):
    file = tmp_path / "map.safetensors"
    flags = ["--output", str(tmp_path / "run"), "--map", str(file), "--head.draft_vocab_size", "10"]
    assert script.main([*made, *flags, "--sizes", "[4, 10, 300]"]) == 0
    out = capsys.readouterr().out
    # each of 15 replies has 8 letters behind its root, and an end
    assert "16 distinct supervised tokens" in out
    assert f"       4  train {(15 + 3 * 8) / 135:.4f}  held-out" in out
    assert f"      10  train {(15 + 9 * 8) / 135:.4f}  held-out {5 / 45:.4f}" in out
    loaded = load_vocab_map(str(file), tiny_tokenizer(), PADDED, 10, [END])
    assert int(loaded.t2d.sum()) == 10
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    assert metadata["counted"].startswith("135 supervised tokens of ")
    assert float(metadata["coverage_train"]) == pytest.approx(87 / 135, abs=1e-6)
    assert float(metadata["coverage_held_out"]) == pytest.approx(5 / 45, abs=1e-6)


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--sizes", "[0]"], "sizes is [0]"),
        (["--map", "x", "--head.draft_vocab_size", "null"], "needs no map"),
        (["--data.files", "[missing.jsonl]"], "missing.jsonl: no such file"),
        (["--map", "/dev/null/x", "--head.draft_vocab_size", "10"], "/dev/null"),
        (["--map", "x", "--head.draft_vocab_size", "1000"], "draft_vocab_size 1000 must be in"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(script, made, tmp_path, capsys, flags, told):
    assert script.main([*made, "--output", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
