"""train_draft.py on data of other kinds: several forms, a vocabulary map of its own, a stream that is resumed."""

import json
import runpy
import shutil

import pytest
from safetensors.torch import load_file

from oracles.runs import arguments, check_equal, final, losses, train, weights
from oracles.script import ROOT, SCRIPT

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.fixture(scope="module")
def made(made):
    """A folder with `target`, `chats.jsonl` and `map.safetensors` of 90 tokens."""
    main = runpy.run_path(str(ROOT / "train/build_vocab_map.py"))["main"]
    flags = ["--target", made / "target", "--data.files", f"[{made / 'chats.jsonl'}]", "--data.eval_rows", 4]
    flags += ["--output", made / "map-run", "--map", made / "map.safetensors", "--head.draft_vocab_size", 90]
    assert main([str(flag) for flag in flags]) == 0
    return made


@pytest.fixture(scope="module")
def mapped(made, tmp_path_factory):
    """A run with the map of the file."""
    options = {"data.vocab_map": made / "map.safetensors", "head.draft_vocab_size": 90}
    return train(made, tmp_path_factory.mktemp("mapped") / "run", max_steps=4, eval__every=4, **options)


def test_the_map_of_a_file_is_used(made, mapped):
    stored, head = load_file(made / "map.safetensors"), weights(mapped)
    assert head["d2t"].tolist() == stored["d2t"].tolist()
    assert head["t2d"][: len(stored["t2d"])].tolist() == stored["t2d"].tolist()


def test_a_map_of_the_training_rows_is_the_same(made, mapped, tmp_path):
    """The script and the trainer count the same rows."""
    own = train(made, tmp_path / "run", max_steps=4, eval__every=4, head__draft_vocab_size=90)
    assert losses(own) == losses(mapped)


def test_a_stream_goes_on_where_it_stopped(made, tmp_path, capsys):
    """Catches: a resumed run that reads the stream from its beginning, or shuffles it otherwise."""
    options = {
        "data.vocab_map": made / "map.safetensors",
        "head.draft_vocab_size": 90,
        "data.streaming": True,
        "data.shuffle_buffer": 8,
        "max_steps": 12,
        "eval.every": 6,
        "save_every": 9,
    }
    whole = train(made, tmp_path / "whole", **options)
    stopped = train(made, tmp_path / "stopped", **options)
    shutil.rmtree(stopped / "checkpoints/step-00000012")
    capsys.readouterr()
    resumed = train(made, stopped, **options)
    assert "resumed at step 9" in capsys.readouterr().out
    assert losses(resumed) == losses(whole)
    check_equal(final(resumed), final(whole))


def test_the_form_of_the_data_changes_nothing(made, tmp_path):
    """The chats as ShareGPT in a JSON array: the same rows, the same losses."""
    chats = [json.loads(line) for line in (made / "chats.jsonl").read_text().splitlines()]
    for chat in chats:
        chat["reply_ids"] = chat["messages"][-1]["token_ids"]
        speakers = {"user": "human", "assistant": "gpt"}
        turns = [{"from": speakers[m["role"]], "value": m["content"]} for m in chat.pop("messages")]
        chat["conversations"] = turns
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    one = train(made, tmp_path / "one", max_steps=2, eval__every=2)
    other = train(made, tmp_path / "other", max_steps=2, eval__every=2, data__files=f"[{tmp_path / '*.json'}]")
    assert losses(one) == losses(other)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"data.streaming": True}, "give data.vocab_map"),
        ({"data.vocab_map": "{made}/map.safetensors"}, "head.draft_vocab_size is 100: set it to 90"),
        ({"data.vocab_map": "missing.safetensors"}, "missing.safetensors: cannot be read as a vocabulary map"),
        ({"data.files": "[hub:nobody/nothing]"}, "hub:nobody/nothing: cannot be loaded"),
    ],
)
def test_what_does_not_fit_is_one_line(made, tmp_path, capfd, options, told):
    options = {name: str(value).format(made=made) for name, value in options.items()}
    assert runpy.run_path(str(SCRIPT))["main"](arguments(made, tmp_path / "run", **options)) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert told in error[0]
