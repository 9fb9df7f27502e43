"""`train/prepare_data.py` as users run it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = f"--data.files=[{ROOT / 'recipes/data/smollm2_selfgen_demo.jsonl.gz'}]"


@pytest.fixture(scope="module")
def prepare_data():
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "train/prepare_data.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inspect_prints_supervised_text_counts_and_coverage(prepare_data, tmp_path, capsys):
    arguments = [DEMO, "--data.max_length", "384", "--inspect", "2", "--data.eval_rows", "30"]
    assert prepare_data.main([*arguments, "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "smollm2_selfgen_demo.jsonl.gz: 600 x messages; rows kept 600, dropped 0" in out
    assert "rows kept                          600" in out
    assert out.count("<|im_start|>assistant\n⟦") == 2
    assert out.count("⟧") == 2
    assert "4,096  train 0.9" in out


def test_marked_text_closes_spans_that_touch(prepare_data):
    class Letters:
        def decode(self, ids):
            return "".join(map(chr, ids))

    text = prepare_data.marked_text(Letters(), list(b"abcdef"), [0, 1, 1, 2, 0, 3])
    assert text == "a⟦bc⟧⟦d⟧e⟦f⟧"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data.files=[missing.jsonl]"], "missing.jsonl: no such file"),
        ([], "no data files given"),
        ([DEMO, "--target", "/nowhere"], "/nowhere"),
        ([DEMO, "--data.max_length", "2"], "data.max_length is 2"),
        ([DEMO, "--data.max_length", "8"], "0 of 600 chats kept"),
        ([DEMO, "--data.eval_rows", "9999"], "eval_rows is 9999"),
        ([DEMO, "--data.evalrows", "9"], "did you mean 'data.eval_rows'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(prepare_data, tmp_path, capsys, arguments, message):
    assert prepare_data.main([*arguments, "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_cannot_be_shown_and_an_interruption_are_told(prepare_data, tmp_path, capsys, monkeypatch):
    """A traceback, and no exit code that a script could tell from a bug's."""
    assert prepare_data.main([DEMO, "--output", str(tmp_path), "--inspect", "-1"]) == 2
    assert "inspect is -1; it must be 0 or more" in capsys.readouterr().err

    def interrupted(_config):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "inspect", interrupted)
    assert prepare_data.main([DEMO, "--output", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err
