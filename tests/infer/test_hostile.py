"""Input that nobody meant well: whole runs on it end in a usable report, or in one line that says why."""

import gzip
import json
import signal

import pytest

from eagle3_infer import run as run_module
from eagle3_infer.cli import main
from eagle3_infer.table import align, render_report
from eagle3_infer.unseen import columns, name_unseen
from oracles.tiny import tiny_folder

FAST = ("--draft", "random", "--tree-depth", "2", "--tree-top-k", "2", "--tree-nodes", "4", "--dtype", "float32")
# a family joined by zero-width joiners, a flag, Arabic and Hebrew, and a mark that turns the rest of the line around
FAMILY, FLAG, ARABIC, HEBREW = "👩‍👩‍👧‍👦", "🇩🇪", "مرحبا بالعالم", "שלום"
HOSTILE = f"{FAMILY} {FLAG} {ARABIC} {HEBREW}\u202e\x1b[2J\x07<script>alert(1)</script>\nline two\t|"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target of few and narrow layers that may read long prompts."""
    place = tmp_path_factory.mktemp("target")
    return tiny_folder(place, num_hidden_layers=7, hidden_size=32, max_position_embeddings=11_000)


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Run the command on rows of a prompt file: (exit code, report or None, stdout, stderr)."""

    def command(rows, *flags):
        prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
        prompts.write_text("\n".join(map(json.dumps, rows)))
        code = main(["--target", str(folder), "--prompts", str(prompts), *FAST, "--json", str(report), *flags])
        said = capsys.readouterr()
        return code, json.loads(report.read_text()) if report.exists() else None, said.out, said.err

    return command


# mtime: without it the clock stands in the test's name, and the workers of pytest-xdist collect different tests
@pytest.mark.parametrize("content", [b"", b"\n  \n\n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_a_file_without_prompts(folder, tmp_path, capsys, content):
    path = tmp_path / ("empty.jsonl.gz" if content[:2] == b"\x1f\x8b" else "empty.jsonl")
    path.write_bytes(content)
    assert main(["--target", str(folder), "--prompts", str(path), *FAST]) == 2
    assert capsys.readouterr().err.strip() == f"error: {path} holds no prompt, expected one JSON object per line"


@pytest.mark.parametrize(
    "modes, told",
    [
        (["--mode", "chain", "--hf", "none"], "one mode only"),
        pytest.param(
            ["--mode", "plain,chain"], "chain == plain, plain == HF generate (1/1 replies)", marks=pytest.mark.full
        ),
    ],
    ids=["chain", "all"],
)
def test_a_prompt_of_ten_thousand_tokens(run, modes, told):
    code, report, out, _ = run([{"prompt": "ab " * 3334}], "--max-new-tokens", "4", *modes)
    assert code == 0 and report["outputs"][0]["prompt_tokens"] > 10_000
    assert len(report["outputs"][0]["token_ids"]) == 4 and told in out
    assert list(report["modes"]["chain"]["by_context"]) == ["8192+"]
    assert "characters ..." in out and len(out) < 5000


def test_a_prompt_of_more_tokens_than_the_target_reads(run):
    code, report, _, err = run([{"prompt": "fine"}, {"prompt": "x" * 12_000}])
    assert code == 2 and report is None and len(err.splitlines()) == 1
    assert "prompts.jsonl:2: the prompt has 12" in err and "more than the target's 11000 positions" in err


def test_emoji_text_from_right_to_left_and_terminal_codes(run):
    rows = [
        {"prompt": HOSTILE, "id": f"{FAMILY}\x1b[31m", "category": f"{ARABIC}\nrow"},
        {"prompt": "plain", "category": f"{FLAG}\u202e"},
    ]
    code, report, out, _ = run(rows, "--max-new-tokens", "8", "--hf", "generate,prompt_lookup")
    assert code == 0 and report["verify"]["bugs"] == []
    assert report["outputs"][0]["id"] == f"{FAMILY}\x1b[31m"
    # shown as they are, but for what acts on the terminal
    assert FAMILY in out and ARABIC in out and HEBREW in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out) and "[U+001B][2J[U+0007]" in out
    assert f"{ARABIC} row" in out


def test_a_reply_that_ends_at_once(run):
    """No round, so no tau and no speed, in any mode; and the report says so instead of dividing by nothing."""
    modes = ("--mode", "plain,chain,tree,auto", "--hf", "generate,prompt_lookup", "--repeats", "2")
    code, report, out, _ = run([{"turns": ["a", "b"]}, {"prompt": "c"}], *modes, "--logit-bias", "256=10000")
    assert code == 0
    for mode in report["modes"].values():
        assert (mode["tokens"], mode["rounds"], mode["tau"]) == (3, 0, None)
        assert mode["speedup_vs_plain"] is None and mode["by_context"] == {}
    assert {row["finish_reason"] for row in report["outputs"]} == {"eos"}
    assert "(3/3 replies)" in out and "nan" not in out and "inf" not in out


def test_five_hundred_prompts(run):
    rows = [{"prompt": f"{i}", "category": "abc"[i % 3]} for i in range(500)]
    code, report, out, _ = run(rows, "--max-new-tokens", "2", "--batch", "50", "--mode", "plain,chain", "--hf", "none")
    assert code == 0 and len(report["outputs"]) == 1000
    assert report["verify"]["compared"] == report["verify"]["identical"] == 500
    assert "500 prompts" in out and len(out.splitlines()) < 60


@pytest.mark.parametrize("batch", ["1", "4"])
def test_ctrl_c_in_the_middle(run, tmp_path, monkeypatch, batch):
    """A real SIGINT while the chain is at work: what was finished is written, compared and told. A second one, while
    that is done, changes nothing."""
    finished = []

    def show(self, text):
        if text.startswith("chain: turn"):
            finished.append(text)
            if len(finished) == 3:
                signal.raise_signal(signal.SIGINT)

    def impatient(report):
        signal.raise_signal(signal.SIGINT)
        return render_report(report)

    monkeypatch.setattr(run_module.Progress, "show", show)
    monkeypatch.setattr(run_module, "render_report", impatient)
    rows = [{"prompt": f"{i}"} for i in range(8)]
    page, charts = tmp_path / "page.html", tmp_path / "charts"
    outputs = ("--html", str(page), "--plot", str(charts)) if batch == "1" else ()
    code, report, out, err = run(rows, "--max-new-tokens", "6", "--batch", batch, *outputs)
    if outputs:
        assert "interrupted" in page.read_text() and list(charts.glob("*.png"))
    assert code == 130 and report["run"]["interrupted"]
    assert "interrupted: the figures above cover what was finished" in err
    assert list(report["modes"]) == ["plain", "chain"]
    counts = {mode: sum(row["mode"] == mode for row in report["outputs"]) for mode in report["modes"]}
    assert counts["plain"] == 8 and 3 <= counts["chain"] < 8
    # the chain's speed against plain's over the prompts that both answered
    assert report["modes"]["chain"]["speedup_vs_plain"] > 0 and report["modes"]["chain"]["tau"] >= 1
    assert f"chain == plain ({counts['chain']}/{counts['chain']} replies)" in out


def test_columns_of_a_table_line_up():
    lines = align([("name", "x"), ("日本語", "1"), (f"e\u0301{HEBREW}", "2"), ("a\nb\x1b", "3")])
    assert len({columns(line) for line in lines.split("\n")}) == 1
    assert lines.split("\n")[-1].startswith("a b[U+001B]")


@pytest.mark.parametrize("text", ["plain", "tab\tand\nline", FAMILY, ARABIC, "日本語"])
def test_what_can_be_seen_stays(text):
    assert name_unseen(text) == text
