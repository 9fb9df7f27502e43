"""Pictures of a sweep: every point drawn is the records', seeds are averaged and nothing else."""

from pathlib import Path

import numpy as np
import pytest

from eagle3.errors import ConfigError
from eagle3_recipes.plan import Options, plan
from eagle3_recipes.plots import check_plot, figure_of
from eagle3_recipes.results import mode_figures, records
from eagle3_recipes.sweep import Sweep, read_sweep
from oracles.sweeps import mode, record, result_of

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed: pip install '.[plot]'")
from matplotlib.backends.backend_agg import FigureCanvasAgg


@pytest.fixture
def draw(tmp_path):
    """The figure of records, laid out; `settings` are the sweep's."""
    (tmp_path / "sweep.yaml").write_text("# Question: why?\n")

    def drawn(rows, **settings):
        figure = figure_of(Sweep(tmp_path / "sweep.yaml", **settings), rows)
        assert figure is not None
        FigureCanvasAgg(figure).draw()
        assert figure.get_suptitle() == "why?"
        return figure

    return drawn


def points(line):
    pairs = zip(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist(), strict=True)
    return [pytest.approx(pair) for pair in pairs]


def lines(axes):
    """Labelled lines by their label; what has none are the seeds' dots."""
    return {str(line.get_label()): points(line) for line in axes.lines if not str(line.get_label()).startswith("_")}


def dots(axes):
    return [point for line in axes.lines if str(line.get_label()).startswith("_") for point in points(line)]


RULES = {"chain": {"rule": "match"}, "chain[rejection]": {"rule": "rejection"}}


def test_lines(draw):
    """A line's points by x, whatever the order of the records; a panel for each kind; a dot for each seed."""
    taus = {("chain", 1.0): 2.0, ("chain", 0.5): 1.5, ("chain[rejection]", 1.0): 1.2, ("chain[rejection]", 0.5): 1.1}
    rows = [record("plain", 1.0)]
    rows += [record(key, tau + 0.1 * seed, seed, t, **RULES[key]) for (key, t), tau in taus.items() for seed in (0, 1)]
    rows += [record("tree", 3.0, 0, 0.5, depth=4, top_k=4, nodes=16)]
    figure = draw(rows, plot={"x": "temperature", "line": ["rule", "draft_noise"], "panel": "kind"})
    chain, tree = figure.axes
    assert (chain.get_title(), tree.get_title()) == ("chain", "tree")
    assert chain.get_xlabel() == "temperature"
    match, rejection = "match, none", "rejection, none"
    assert lines(chain) == {match: [(0.5, 1.55), (1.0, 2.05)], rejection: [(0.5, 1.15), (1.0, 1.25)]}
    assert dots(chain) == [(0.5, 1.5), (0.5, 1.6), (1, 2.0), (1, 2.1), (0.5, 1.1), (0.5, 1.2), (1, 1.2), (1, 1.3)]
    assert lines(tree) == {match: [(0.5, 3.0)], rejection: []}
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [match, rejection]
    assert legend.get_title().get_text() == "rule, draft_noise"


@pytest.mark.parametrize(
    "setting, values",
    [
        ("draft_sharpness", (1.0, 1.2)),
        ("rule", ("target_only", "rejection")),
        ("level_weight", (1, 2)),
        ("variant", "ab"),
    ],
)
def test_what_is_no_seed_is_not_averaged(draw, setting, values):
    """Two sharpnesses, rules, depths or variants, drawn as one line between them."""
    noise = {"draft_noise": "shared"} if setting == "draft_sharpness" else {}
    rows = [record(f"chain[{v}]", 1.5 + i, **noise, **{setting: v}) for i, v in enumerate(values)]
    with pytest.raises(ConfigError, match=rf"two modes at top_k 1 differ in {setting}, .*add it to plot.line"):
        draw(rows, plot={"x": "top_k", "line": "kind"})
    figure = draw(rows, plot={"x": "top_k", "line": ["kind", setting]})
    assert lines(figure.axes[0]) == {f"chain, {v}": [(1, 1.5 + i)] for i, v in enumerate(values)}


def test_a_shape_has_its_level_weight(draw):
    """Trees of two level weights on one line over their nodes."""
    shapes = {"tree": {}, "tree[w]": {"level_weight": 1.3}, "tree[n]": {"nodes": 8}}
    tree = {"depth": 3, "top_k": 4, "nodes": 16, "level_weight": 1.0}
    rows = [record(key, 2.0 + i, **{**tree, **more}) for i, (key, more) in enumerate(shapes.items())]
    figure = draw([*rows, record("chain", 1.5)], plot={"x": "nodes", "line": "shape"})
    found = lines(figure.axes[0])
    assert found == {"tree d3k4": [(8, 4.0), (16, 2.0)], "tree d3k4w1.3": [(16, 3.0)], "chain": [(2, 1.5)]}


def test_modes_without_x_are_named(draw):
    """Reports from before a setting existed; and what has no order at all."""
    rows = [record("chain", 1.5, level_weight=1.0), record("tree", 2.5, depth=3, top_k=4, nodes=8)]
    figure = draw(rows, plot={"x": "level_weight", "line": "kind"})
    assert lines(figure.axes[0]) == {"chain": [(1, 1.5)]}
    assert figure.get_supxlabel() == "without level_weight, not shown: tree d3k4n8"
    words = [{**row, "set.a": value} for row, value in zip(rows, (8, "auto"), strict=True)]
    with pytest.raises(ConfigError, match=r"set\.a holds numbers and words"):
        draw(words, plot={"x": "set.a"})


@pytest.mark.parametrize("plot", [{}, {"x": "depth"}])
def test_nothing_to_show(tmp_path, plot):
    """A sweep whose first run failed; one of modes that draft nothing."""
    sweep = Sweep(tmp_path / "sweep.yaml", plot=plot)
    assert figure_of(sweep, []) is None
    assert figure_of(sweep, records([result_of("a", 0, [])])) is None
    assert plot == {} or figure_of(sweep, [record("plain", 1.0)]) is None


@pytest.mark.parametrize("name", ["tree_shape", "draft_noise"])
def test_shipped_plots(name, tmp_path):
    """Hours of a sweep whose plot cannot be drawn."""
    sweep = read_sweep(Path(__file__).parents[2] / "recipes/ablations" / name)
    assert sweep.plot
    check_plot(sweep, plan(sweep, Options(tmp_path)))


def test_dots(draw):
    """A row per mode, by name: a dot for each seed, their mean."""
    rows = [record("chain", tau, seed) for seed, tau in enumerate((1.5, 1.7))] + [record("plain", 1.0)]
    [axes] = draw(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["chain d2k1n2", "plain"]
    assert dots(axes) == [(1.5, 0), (1.7, 0), (1.6, 0), (1.0, 1), (1.0, 1)]


def test_training(draw):
    """tau by variant, a panel per mode, and alpha by step with its range."""
    results = []
    for variant, seed, tau in (("a", 0, 1.5), ("a", 1, 1.7), ("b", 0, 2.5)):
        modes = {key: mode_figures(key, mode(key, tau)) for key in ("plain", "chain")}
        training = {"alpha": [tau / 2, tau / 4], "tau": tau}
        results.append(result_of(variant, seed, [{"temperature": 0.0, "modes": modes}], training))
    plain, chain, alpha = draw(records(results), extends="base.yaml").axes
    assert [axes.get_title() for axes in (plain, chain, alpha)] == ["plain", "chain", "held-out alpha"]
    assert [label.get_text() for label in plain.get_yticklabels()] == ["a", "b"]
    assert dots(chain) == [(1.5, 0), (1.7, 0), (1.6, 0), (2.5, 1), (2.5, 1)]
    assert dots(plain) == [(1, 0), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert [points(line) for line in alpha.lines] == [[(0, 0.8), (1, 0.4)], [(0, 1.25), (1, 0.625)]]
    ranges = [np.unique(area.get_paths()[0].vertices[:, 1]).tolist() for area in alpha.collections]
    assert ranges == [pytest.approx([0.375, 0.425, 0.75, 0.85]), pytest.approx([0.625, 1.25])]
