"""`eagle3-infer --html` from end to end on a tiny target: what is decoded once more is what was measured."""

import json
import re

import pytest

from eagle3_infer import bench as bench_module
from eagle3_infer import retrace as retrace_module
from eagle3_infer.cli import main
from oracles.tiny import tiny_folder

FAST = ("--draft", "random", "--max-new-tokens", "10", "--tree-depth", "2", "--tree-top-k", "2", "--tree-nodes", "4")
PROMPTS = [
    {"id": "two", "category": "one", "turns": ["Hello", "Again"]},
    {"prompt": "مرحبا </script> 🙂", "category": "two"},
    {"prompt": "third"},
]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrace")
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)), "utf-8")
    target = tiny_folder(folder / "target")
    return ["--target", str(target), "--prompts", str(folder / "prompts.jsonl"), *FAST]


def run(arguments, folder, *more):
    """Exit code, the replies of the page, and the report."""
    code = main([*arguments, "--html", str(folder / "page.html"), "--json", str(folder / "report.json"), *more])
    page = (folder / "page.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return code, json.loads(data)["replies"], json.loads((folder / "report.json").read_text("utf-8")), page


@pytest.mark.parametrize(
    "more",
    [
        ("--mode", "plain,chain,tree,auto", "--html-replies", "3"),
        ("--batch", "3", "--temperature", "1", "--seed", "5", "--draft-noise", "none,shared", "--html-replies", "9"),
    ],
    ids=["greedy", "sampled in a batch"],
)
def test_the_page_shows_what_was_measured(arguments, tmp_path, more, capsys):
    code, replies, report, _ = run(arguments, tmp_path, "--dtype", "float32", *more)
    assert code == 0 and "page: " in capsys.readouterr().out
    # greedy: in the order of the run, a prompt's turns follow one another
    assert len(replies) == min(int(more[-1]), 4)
    assert "traces" not in report
    rows = {(row["mode"], row["id"], row["turn"] + 1): row for row in report["outputs"]}
    assert {key[0] for key in rows} == set(replies[0]["modes"])
    traced = 0
    for reply in replies:
        for mode, told in reply["modes"].items():
            row = rows[mode, reply["id"], reply["turn"]]
            assert len(told["pieces"]) == len(row["token_ids"])
            assert ("trees" in told) == bool(report["modes"][mode]["settings"])
            if "trees" in told:
                traced += 1
                assert told["apart"] is None
                assert sum(told["runs"]) == sum(row["run_lengths"])
                # adaptive trees follow the clock
                assert told["runs"] == row["run_lengths"] or mode.startswith("auto")
    assert traced == len(replies) * sum(bool(mode["settings"]) for mode in report["modes"].values())


def test_without_a_head(arguments, tmp_path):
    code, replies, _, page = run(arguments[:4], tmp_path, "--mode", "plain", "--hf", "none", "--max-new-tokens", "3")
    assert code == 0 and len(replies) == 4
    assert all("trees" not in told for reply in replies for told in reply["modes"].values())
    assert "acceptance-by-level" not in page


def test_replies_that_end_at_once(arguments, tmp_path):
    _, replies, _, page = run(arguments, tmp_path, "--max-new-tokens", "1", "--html-replies", "1")
    assert all(told["runs"] == [] and len(told["pieces"]) == 1 for told in replies[0]["modes"].values())
    assert 'id="cost"' not in page


def stop_at(monkeypatch, module, name, call):
    """Ctrl-C in the call-th call of a function."""
    original, calls = getattr(module, name), []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, interrupted)


def test_interrupted_while_measuring(arguments, tmp_path, monkeypatch):
    """Nothing is decoded again: who presses Ctrl-C wants to leave."""
    stop_at(monkeypatch, bench_module.Bench, "_run_group", 7)
    monkeypatch.setattr(retrace_module, "trace", lambda *_: pytest.fail("traced after an interrupt"))
    code, replies, report, page = run(arguments, tmp_path)
    assert code == 130 and report["run"]["interrupted"] and "was interrupted" in page
    assert [set(reply["modes"]) for reply in replies[:2]] == [{"plain", "chain"}] * 2
    assert all("trees" not in told for reply in replies for told in reply["modes"].values())


def test_interrupted_while_tracing(arguments, tmp_path, monkeypatch, capsys):
    """The measurement is whole; replies that were decoded again keep their trees."""
    stop_at(monkeypatch, retrace_module, "trace", 2)
    code, replies, report, page = run(arguments, tmp_path)
    assert code == 130 and "without their trees" in page and "interrupted" in capsys.readouterr().err
    assert not report["run"]["interrupted"]
    assert all("trees" in r["modes"]["chain"] and "trees" not in r["modes"]["tree"] for r in replies)
