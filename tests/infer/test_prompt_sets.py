"""`--prompts`: files and sets by name, one or several; what is not there is told with what is."""

import gzip
import json

import pytest

from eagle3.errors import ConfigError, DataError
from eagle3_infer.prompt_sets import find_set, load_sets, sets_told
from eagle3_infer.prompts import load_prompts, shipped_prompts_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """$EAGLE3_PROMPTS with two sets of three prompts each, one of them compressed."""
    sets = tmp_path / "sets"
    sets.mkdir()
    lines = "\n".join(json.dumps({"turns": [f"{i}", "more"], "id": i}) for i in range(3))
    (sets / "chat.jsonl").write_text(lines)
    with gzip.open(sets / "code.jsonl.gz", "wt") as file:
        file.write(lines)
    (sets / "notes.txt").write_text("no set")
    monkeypatch.setenv("EAGLE3_PROMPTS", str(sets))
    return sets


def test_one_set_keeps_its_ids(folder):
    assert [(p.id, p.prompt_set) for p in load_sets(["chat"])] == [("0", ""), ("1", ""), ("2", "")]


def test_several_sets_are_told_by_their_ids(folder, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps({"prompt": "Hi"}))
    prompts = load_sets(["code", str(mine), "shipped"], limit=2, max_turns=1)
    assert [p.id for p in prompts[:3]] == ["code/0", "code/1", "mine/1"]
    assert [p.prompt_set for p in prompts] == ["code", "code", "mine", "shipped", "shipped"]
    assert all(len(p.turns) == 1 for p in prompts)
    assert sets_told(["code", str(mine), "shipped"]) == "code.jsonl.gz, mine.jsonl, prompts.jsonl"


def test_the_shipped_set():
    assert load_sets(["shipped"]) == load_prompts(shipped_prompts_path())


def test_a_file_goes_before_a_set(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chat").write_text(json.dumps({"prompt": "here"}))
    assert load_sets(["chat"])[0].turns == ("here",)


def test_an_unknown_name_is_told_with_the_known_ones(folder):
    with pytest.raises(DataError, match=r"--prompts chatt: no such file, and no set of .* shipped, chat, code$"):
        find_set("chatt")


def test_no_folder_of_sets(monkeypatch):
    monkeypatch.delenv("EAGLE3_PROMPTS", raising=False)
    with pytest.raises(DataError, match=r"--prompts chat: no such file, and \$EAGLE3_PROMPTS, .* is not set"):
        sets_told(["chat"])


@pytest.mark.parametrize("word", ["sub/chat", "chat.jsonl", "chat.jsonl.gz"])
def test_what_looks_like_a_path_is_one(folder, word):
    with pytest.raises(DataError, match=f"{word}: no such file"):
        load_sets([word])


def test_two_sets_of_one_name(folder, tmp_path):
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "Hi"}))
    with pytest.raises(ConfigError, match="names 'chat' twice"):
        load_sets(["chat", str(tmp_path / "chat.jsonl")])
