"""`--plot`: every figure drawn is the report's, what has nothing to show is left out, and names stay legible."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from eagle3.errors import ConfigError
from eagle3_infer import plots
from eagle3_infer.cli import main
from eagle3_infer.compare import compare_modes
from eagle3_infer.plots import Mode, write_charts
from eagle3_infer.report import ModeRun, Output, build_report
from eagle3_infer.request import STAGES
from oracles.tiny import tiny_folder

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed: pip install '.[plot]'")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image


def output(mode, runs, id="a", seconds=1.0, prompt_tokens=10, **counts):
    spent = {"other": seconds} if mode.startswith("hf") else {"verify": 0.75 * seconds, "draft": 0.25 * seconds}
    spent = dict.fromkeys(STAGES, 0.0) | {"prefill": 0.5} | spent
    return Output(
        mode=mode, id=id, category="x", turn=0, prompt_tokens=prompt_tokens, token_ids=list(range(1 + sum(runs))),
        text="t", finish_reason="length", run_lengths=list(runs), seconds=spent, **counts,
    )  # fmt: skip


def run_of(key, runs, seconds=(1.0,), shape=None, **counts):
    settings: dict[str, Any] = {} if shape is None else dict(zip(("depth", "top_k", "nodes"), shape, strict=True))
    return ModeRun(key, settings, [[output(key, runs, seconds=s, **counts)] for s in seconds])


def report_of(*modes):
    return build_report({"argv": ["--plot", "\udcff"]}, modes, compare_modes(modes, None, sampled=False))


@pytest.fixture
def report():
    """60 tokens in rounds: plain in 60 s, a tree whose 20 rounds accept 20 drafts of level 1 and of level 2."""
    levels = {"offered_by_level": [40, 40], "accepted_by_level": [20, 20], "prompt_tokens": 100, "nodes": 80}
    few = {"offered_by_level": [1, 4], "accepted_by_level": [1, 0], "nodes": 5}
    return report_of(
        run_of("plain", [1] * 60, (6.0, 3.0, 5.0)),
        run_of("chain", [2], (0.5,), (2, 1, 2), **few),
        run_of("tree", [3] * 20, (1.0, 2.0, 4.0), (2, 2, 4), **levels),
        run_of("hf_generate", [1] * 60, (8.0,)),
    )


def modes_of(report):
    return [Mode(key, plots.mode_title(key, figures), figures) for key, figures in report["modes"].items()]


def widths(axes, label):
    return [bar.get_width() for bars in axes.containers if bars.get_label() == label for bar in bars]


def heights(line):
    return np.asarray(line.get_ydata()).tolist()


def test_files(report, tmp_path):
    files = write_charts(report, tmp_path / "charts")
    assert [file.name for file in files] == ["tau.png", "speedup.png", "acceptance.png", "cost.png", "context.png"]
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == sorted(file.name for file in files)
    for file in files:
        with Image.open(file) as image:
            assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1) and image.width == 1280
            assert image.info["Description"] == "eagle3-infer --plot '\\udcff'"
    # the same again over them
    assert write_charts(report, tmp_path / "charts") == files


def test_tau(report):
    figure = plots.tau_chart(modes_of(report))
    assert figure is not None
    assert widths(figure.axes[0], "all rounds pooled") == [1.0, 2.0, 3.0, 1.0]
    titles = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert titles == ["plain", "chain d2k1n2", "tree d2k2n4", "HF generate"]


def test_a_server_knows_no_tau_of_a_prompt(report):
    modes = modes_of(report)
    modes[0].figures["tau_prompt_mean"] = None
    figure = plots.tau_chart(modes)
    assert figure is not None
    (means,) = figure.axes[0].lines
    assert np.asarray(means.get_xdata()).tolist() == [2.0, 3.0, 1.0]
    assert np.asarray(means.get_ydata()).tolist() == [1, 2, 3]


def test_speedup_and_its_spread(report):
    figure = plots.speedup_chart(modes_of(report))
    assert figure is not None
    axes = figure.axes[0]
    # medians of 6/1, 3/2, 5/4; the chain shares its one turn with plain
    assert widths(axes, "vs plain decoding")[2] == pytest.approx(1.5)
    assert widths(axes, "vs HF generate")[3] == 1.0
    lines: Any = axes.collections[0]
    spread = lines.get_segments()
    assert spread[2][:, 0].tolist() == pytest.approx([1.25, 6.0])


def test_acceptance_conditional_and_not(report):
    figure = plots.acceptance_chart(modes_of(report))
    assert figure is not None
    given, overall = ([heights(line) for line in axes.lines] for axes in figure.axes)
    # chain, its hollow points, tree: all of whose 20 rounds went to level 2
    assert given == [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]] and overall == given
    faces = [to_hex(line.get_markerfacecolor()) for line in figure.axes[0].lines]
    assert faces[1] == "#ffffff" and "#ffffff" not in (faces[0], faces[2])
    assert figure.legends[0].get_title().get_text() == "hollow: fewer than 20 rounds"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["chain d2k1n2", "tree d2k2n4"]


def test_conditional_shares_by_hand():
    counts = {"offered_by_level": [90] * 3, "accepted_by_level": [24, 6, 0], "nodes": 270}
    figure = plots.acceptance_chart(modes_of(report_of(run_of("tree", [1] * 30, (1.0,), (3, 1, 3), **counts))))
    assert figure is not None
    given, overall = (heights(axes.lines[0]) for axes in figure.axes)
    assert given == [24 / 30, 6 / 24, 0.0] and overall == [24 / 30, 6 / 30, 0.0]


def test_cost(report):
    figure = plots.cost_chart(modes_of(report))
    assert figure is not None
    # the median repeat's: 5 s over 60 rounds, 2 s over 20
    assert widths(figure.axes[0], "verify")[::2] == pytest.approx([0.75 * 5000 / 60, 0.75 * 2000 / 20])
    assert widths(figure.axes[0], "draft")[::2] == pytest.approx([0.25 * 5000 / 60, 0.25 * 2000 / 20])
    # transformers' time is one part, and none of ours'
    assert widths(figure.axes[0], "rest") == []
    assert widths(figure.axes[0], "not timed by stage") == pytest.approx([0, 0, 0, 8000 / 60])
    assert figure.axes[0].texts[2].get_text().strip() == "100.0 / 3.00 = 33.3"


def test_context(report):
    figure = plots.context_chart(modes_of(report))
    assert figure is not None
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0-127", "128-255"]
    assert heights(figure.axes[0].lines[-1]) == [3.0, 3.0]


def test_context_has_every_mode_that_the_table_has(report):
    """Transformers' drafting, too, which has no tree; its plain decoding has but one tau."""
    lookup = run_of("hf_prompt_lookup", [2] * 30, prompt_tokens=100)
    drawn = report_of(run_of("plain", [1] * 60), run_of("tree", [3] * 20, shape=(2, 2, 4)), lookup)
    figure = plots.context_chart(modes_of(drawn))
    assert figure is not None
    assert {line.get_label() for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")} == {
        "tree d2k2n4",
        "HF prompt lookup",
    }


def test_what_has_nothing_to_show_is_left_out(report, tmp_path):
    """Nor does an earlier run's chart stay in its place."""
    write_charts(report, tmp_path)
    plain = report_of(run_of("plain", [1] * 5))
    assert [path.stem for path in write_charts(plain, tmp_path)] == ["tau", "cost"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["cost", "tau"]
    # replies that end with their first token: no round
    assert write_charts(report_of(run_of("plain", [])), tmp_path) == []
    assert write_charts(report_of(), tmp_path) == []


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("draw", [plots.tau_chart, plots.speedup_chart, plots.cost_chart])
def test_names_do_not_overlap(draw, count):
    trees = [run_of(f"tree[{n}]", [2] * 4, (1.0,), (4, 8, n), accepted_by_level=[4]) for n in range(100, 100 + count)]
    figure = draw(modes_of(report_of(run_of("plain", [1] * 8), *trees)))
    FigureCanvasAgg(figure).draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert len(boxes) == count + 1 and min(box.x0 for box in boxes) >= 0
    assert not any(above.overlaps(below) for above, below in pairwise(boxes))
    assert not any(figure.legends[0].get_window_extent().overlaps(box) for box in boxes)


def test_a_missing_matplotlib_is_told_before_anything_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[plot\]'"):
        write_charts(report_of(), tmp_path)
    assert main(["--target", "nowhere", "--plot", str(tmp_path / "charts")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err and not (tmp_path / "charts").exists()


def test_the_command_draws_what_it_reports(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "count"}) + "\n")
    flags = ["--draft", "random", "--prompts", str(prompts), "--max-new-tokens", "6", "--dtype", "float32"]
    charts = tmp_path / "charts"
    assert main(["--target", str(tiny_folder(tmp_path / "target")), *flags, "--plot", str(charts)]) == 0
    assert f"charts: {charts / 'tau.png'}" in capsys.readouterr().out
    assert {"tau.png", "speedup.png", "cost.png"} <= {path.name for path in charts.iterdir()}
