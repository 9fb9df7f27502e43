"""The HTML report as text: figures by hand, every kind of run, and nothing of a user's text that becomes markup."""

import json
import random
import re
import shlex
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

import pytest

from eagle3_infer.figures import SERIES, Bar, Line, bars, lines, text
from eagle3_infer.html import headline, render_html, write_html
from eagle3_infer.html_charts import acceptance_figures, cost_figures
from eagle3_infer.levels import Point, shares_given, shares_overall
from eagle3_infer.parts import seconds_by_part
from eagle3_infer.replies import Told, tell_tree
from eagle3_infer.report import ModeRun
from eagle3_infer.trace import TracedTree
from oracles.reports import AUTO, HOSTILE, LOSSY, TREE, drafting_modes, output, report_of, told_of, traced_output


class Page(HTMLParser):
    """Elements, attributes and texts of a page; void and SVG elements included."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.attributes, self.texts, self.scripts = [], [], [], []
        self._stack: list[str] = []
        self.sections: dict[str, str] = {}
        self._section = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._stack.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.sections[self._section] = ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop() != tag:
            pass
        if tag == "section":
            self._section = ""

    def handle_data(self, data):
        if self._stack and self._stack[-1] == "script":
            self.scripts[-1] += data
        elif self._stack and self._stack[-1] != "style":
            self.texts.append(data)
            if self._section:
                self.sections[self._section] += data


RUNS = {
    "everything": (drafting_modes(), {}),
    "no head": ([ModeRun("plain", {}, [[output("plain", [1, 1, 1])]])], {"draft": None}),
    "no round": ([ModeRun("plain", {}, [[output("plain", [])]]), ModeRun("tree", TREE, [[output("tree", [])]])], {}),
    "one drafting mode": ([ModeRun("tree", TREE, [[traced_output("tree")]])], {}),
    "nothing accepted": ([ModeRun("tree", TREE, [[output("tree", [1, 1], offered_by_level=[4, 4])]])], {}),
    "lossy": ([*drafting_modes()[:1], ModeRun("tree[threshold]", LOSSY, [[traced_output("tree[threshold]")]])], {}),
    "interrupted": (drafting_modes(), {"interrupted": True}),
    "nothing": ([], {"interrupted": True}),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run(name):
    """No empty panel, no figure without its drawing and its table, no Python value in the text."""
    modes, run = RUNS[name]
    page = Page(render_html(report_of(modes, **run), told_of(modes) if modes else Told()))
    assert all(body.strip() for body in page.sections.values())
    assert page.tags.count("figure") == page.tags.count("figcaption")
    assert page.tags.count("svg") >= page.tags.count("figure")
    shown = " ".join(page.texts)
    assert not any(word in shown for word in ("None", "nan", "NaN", "{", "Infinity"))
    assert ("LOSSY" in shown) == (name == "lossy")
    assert ("interrupted" in shown) == (name == "interrupted") and ("Nothing was measured" in shown) == (
        name == "nothing"
    )
    assert ("acceptance-by-level" in page.sections) == (
        name in ("everything", "one drafting mode", "nothing accepted", "lossy", "interrupted")
    )
    assert ("cost" in page.sections) == (name not in ("no round", "nothing"))
    assert ("replies" in page.sections) == bool(modes)


def test_a_report_without_replies_or_run():
    """A server's report has neither; of its run little is known."""
    report = report_of(drafting_modes()) | {"run": {"argv": []}}
    page = Page(render_html(report, Told()))
    assert "replies" not in page.sections and "summary" in page.sections
    assert "a server" in Page(render_html(report, Told(notes=["a server"]))).sections["replies"]


def test_nothing_becomes_markup():
    modes = drafting_modes(id=HOSTILE, category=HOSTILE)
    report = report_of(modes, argv=[HOSTILE], target=HOSTILE, draft=HOSTILE, notes=[HOSTILE], first_prompt=HOSTILE)
    page = Page(render_html(report, told_of(modes, asked=HOSTILE)))
    clean = Page(render_html(report_of(drafting_modes()), told_of(drafting_modes())))
    assert page.tags.count("script") == 2 and "img" not in page.tags
    assert set(page.tags) <= {*clean.tags, "pre", "li", "h3"}
    assert not any(name.startswith("on") for name, _ in page.attributes)
    shown = " ".join(page.texts)
    assert "<img src=x onerror=hacked=1>[U+202E][U+0000]&amp;" in shown and "\u202e" not in shown
    data = json.loads(page.scripts[0])
    assert data["replies"][0]["asked"] == HOSTILE and HOSTILE in data["words"].values()


def test_lone_surrogates_are_written(tmp_path):
    """Arguments may hold bytes that are no text."""
    modes = drafting_modes(id="\udcff")
    write_html(report_of(modes, argv=["\udcff"]), told_of(modes, asked="\udcff"), tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert "[U+DCFF]" in " ".join(page.texts) and json.loads(page.scripts[0])["replies"][0]["asked"] == "\udcff"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_nothing_is_loaded_and_only_its_own_script_runs():
    page = Page(render_html(report_of(drafting_modes()), told_of(drafting_modes())))
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not any(name in ("src", "href", "action") for name, _ in page.attributes)
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    digest = b64encode(sha256(page.scripts[1].encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy


def test_bars_by_hand():
    drawn = bars([Bar("a", 2.0, "2.00", [1.0, 4.0]), Bar("<b>", 1.0, "1.00")], "Tau", mark=1.0)
    # the largest value, here a whisker's end, stands at 1 / 1.04 of the width
    assert 'height="10" width="48.08%"' in drawn and 'x1="24.04%" x2="96.15%"' in drawn
    assert 'aria-label="Tau: a 2.00; &lt;b&gt; 1.00"' in drawn and "<b>" not in drawn
    assert "0.00%" in bars([Bar("a", 0.0, "0")], "x")


def test_lines_by_hand():
    """Levels that no round reached have no point; points of few rounds are hollow; there are so many colours."""
    points = [Point(0.75, 100), Point(0.5, 19), Point(None, 0), Point(0.0, 40)]
    drawn = lines([Line("a", points)], "Acceptance")
    assert 'points="12.50,25.00 37.50,50.00 87.50,100.00"' in drawn
    assert drawn.count("<path") == 3 and drawn.count("hollow") == 1
    assert "level 1, 2, ...: a 75 %, 50 %, -, 0 %" in drawn
    assert lines([Line(str(i), points) for i in range(SERIES + 3)], "x").count("<polyline") == SERIES


def test_acceptance_by_hand():
    assert [p.share for p in shares_given([6, 3, 0, 0], 8)] == [0.75, 0.5, 0.0, None]
    assert [p.share for p in shares_overall([6, 3, 0], 8)] == [0.75, 0.375, 0.0]


def test_cost_by_hand():
    """Eight tokens in five rounds of 1.5 s; Hugging Face's time is one part."""
    modes = report_of(drafting_modes())["modes"]
    shown = Page(cost_figures({key: modes[key] for key in ("tree", "hf_generate")})).texts
    assert "187.5 ms" in shown and "300.00" in shown and "1.60" in shown
    assert "not timed by stage" in shown


def test_parts_are_the_tables():
    """Draft is the head's forwards; building the tree is of the rest, as in the summary."""
    tree = report_of(drafting_modes())["modes"]["tree"]
    tree["seconds_by_stage"] |= {"draft": 0.1, "tree_build": 0.2, "verify": 1.0, "accept": 0.05, "other": 0.25}
    assert seconds_by_part(tree) == pytest.approx({"verify": 1.0, "draft": 0.1, "rest": 0.5})
    drawn = cost_figures({"tree": tree})
    widths = [
        float(part) for part in re.findall(r'class="part [a-z]+" .* width="([0-9.]+)%"', drawn.replace("><", ">\n<"))
    ]
    assert widths == pytest.approx([100 / 1.6, 10 / 1.6, 50 / 1.6], abs=0.01)


def test_tokens_per_round_of_all_that_draft():
    """Transformers' drafting, too; also where no head was run. Plain decoding has one token each round."""
    lookup = ModeRun("hf_prompt_lookup", {}, [[output("hf_prompt_lookup", [4, 1])]])
    for modes in ([*drafting_modes(), lookup], [drafting_modes()[-1], lookup]):
        shown = Page(acceptance_figures(report_of(modes)["modes"])).texts
        assert "Tokens per round" in shown and "HF prompt lookup" in shown
        assert "HF generate" not in shown and "plain" not in shown


def test_the_command_can_be_pasted():
    argv = ["--stop", "\n\nUser:", "--json", "my report.json"]
    (command,) = re.findall(
        "<pre>(eagle3-infer.*?)</pre>", render_html(report_of(drafting_modes(), argv=argv), Told()), re.S
    )
    assert shlex.split(unescape(command)) == ["eagle3-infer", *argv]


def test_the_headline_names_the_fastest_lossless_mode():
    seconds = {"prefill": 0.0, "draft": 0.1, "tree_build": 0.0, "verify": 0.2, "accept": 0, "relocate": 0, "other": 0.1}
    fast = traced_output("tree[threshold]", seconds=seconds)
    modes = [*drafting_modes(), ModeRun("tree[threshold]", LOSSY, [[fast]])]
    (said,) = headline(report_of(modes)["modes"])
    assert "threshold" not in said and "1.00 times plain decoding's" in said and "1.60 tokens per round" in said
    assert headline(report_of(drafting_modes()[:1])["modes"]) == []


def test_slower_is_said():
    slow = traced_output("tree", seconds=drafting_modes()[0].outputs[0].seconds | {"verify": 9.0})
    (said,) = headline(report_of([*drafting_modes()[:1], ModeRun("tree", TREE, [[slow]])])["modes"])
    assert said.endswith("Drafting did not pay here: plain decoding was faster.")


def test_drafts_without_a_head_that_are_faster_are_said():
    """Prompt lookup needs no training: what it gains is part of the answer."""
    seconds = drafting_modes()[0].outputs[0].seconds
    modes = [*drafting_modes()[:1], ModeRun("tree", TREE, [[traced_output("tree", seconds=seconds | {"verify": 0.4})]])]
    for verify, expected in ((0.01, True), (9.0, False)):
        lookup = ModeRun("hf_prompt_lookup", {}, [[output("hf_prompt_lookup", [4, 4], seconds={
            **seconds, "verify": verify})]])  # fmt: skip
        (said,) = headline(report_of([*modes, lookup])["modes"])
        assert said.endswith("But HF prompt lookup was faster.") == expected
        assert ("lookup" in said) == expected


def test_the_fastest_of_an_interrupted_run_is_so_over_shared_replies():
    """An interrupted mode's own rate may be of easier replies than the others'."""
    report = report_of(drafting_modes())["modes"]
    chain, tree = report["chain"], report["tree"]
    chain |= {"tokens_per_second": 99.0, "speedup_vs_plain": 1.1}
    tree |= {"tokens_per_second": 50.0, "speedup_vs_plain": 1.5}
    (said,) = headline({"plain": report["plain"], "chain": chain, "tree": tree})
    assert said.startswith("Fastest draft: tree")


def test_what_has_no_glyph_is_named():
    assert text("a\u202eb\x1b\n&") == "a[U+202E]b[U+001B]\n&amp;"


def test_four_replies_are_below_a_megabyte():
    """Chain, tree and auto of 256 tokens, 32 nodes a round, two tokens per round."""
    rng = random.Random(0)
    parents = [-1, *(rng.randrange(row) for row in range(1, 33))]
    edges, scores = [0.0] + [-3 * rng.random() for _ in range(32)], [0.0]
    for row in range(1, 33):
        scores.append(scores[parents[row]] + edges[row])
    tree = TracedTree([rng.randrange(49_152) for _ in scores], parents, scores, edges)
    modes = drafting_modes()
    told = told_of(modes)
    (reply,) = told.replies
    for mode in (reply["modes"][key] for key in ("chain", "tree", "auto")):
        mode |= {"trees": [tell_tree(tree)] * 128, "runs": [2] * 128, "pieces": [" word"] * 257}
    told.replies = [reply] * 4
    assert 300_000 < len(render_html(report_of(modes), told).encode()) < 1_000_000


def test_many_prompts_make_no_larger_page():
    def page(count):
        rows = [traced_output("tree", id=str(i)) for i in range(count)]
        modes = [ModeRun("tree", AUTO, [rows])]
        return render_html(report_of(modes), Told())

    assert len(page(500)) < len(page(1)) + 200 and "500 to 500 prompts" in page(500)
