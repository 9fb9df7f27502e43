"""`train/prepare_data.py` as users run it."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "recipes/data/smollm2_selfgen_demo.jsonl.gz")


@pytest.fixture(scope="module")
def prepare_data():
    spec = importlib.util.spec_from_file_location("prepare_data", ROOT / "train/prepare_data.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_inspect_prints_supervised_text_counts_and_coverage(prepare_data, capsys):
    assert prepare_data.main([DEMO, "--max-length", "384", "--inspect", "2", "--eval-rows", "30"]) == 0
    out = capsys.readouterr().out
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
        (["missing.jsonl"], "missing.jsonl: no such file"),
        ([DEMO, "--target", "/nowhere"], "--target /nowhere: no such folder"),
        ([DEMO, "--max-length", "2"], "max_length is 2"),
        ([DEMO, "--max-length", "8"], "0 of 600 chats kept"),
        ([DEMO, "--eval-rows", "9999"], "eval_rows is 9999"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(prepare_data, capsys, arguments, message):
    assert prepare_data.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
