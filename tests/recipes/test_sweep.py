"""Sweep files: what is refused before anything runs, grids, budgets."""

from pathlib import Path

import pytest

from eagle3.errors import ConfigError
from eagle3_recipes import budget
from eagle3_recipes.budget import Budget, parse_budget
from eagle3_recipes.plan import Options, plan
from eagle3_recipes.sweep import read_sweep


@pytest.mark.parametrize(
    "text, expected",
    [
        ("200k tokens", Budget(200_000)),
        ("1.5M tokens", Budget(1_500_000)),
        ("80_000 tokens", Budget(80_000)),
        ("5min", Budget(minutes=5)),
        ("1.5 h", Budget(minutes=90)),
        ("90s", Budget(minutes=1.5)),
    ],
)
def test_budgets(text, expected):
    assert parse_budget(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "5", "200k", "5 parsecs", "0min", "-1min", "0 tokens", "1.2.3min", "5min tokens"]
    + ["9" * 400 + unit for unit in (" tokens", "m tokens", "min", "h")],
)
def test_what_is_no_budget(text):
    """A number without a unit: tokens or minutes?"""
    with pytest.raises(ConfigError, match="200k tokens"):
        parse_budget(text)


def test_budgets_without_assertions():
    """`python -O` leaves them out."""
    names = {}
    exec(compile(Path(budget.__file__).read_text(), "budget", "exec", optimize=2), names)
    for text in ("7", "0min"):
        with pytest.raises(ConfigError, match="200k tokens"):
            names["parse_budget"](text)


@pytest.mark.parametrize(
    "change, message",
    [
        (("variants:", "variant:"), "unknown setting 'variant'; did you mean 'variants'"),
        (("{ttt.steps: 3}", "{ttt.step: 3}"), "variant more steps: .*ttt.step"),
        (("{ttt.steps: 3}", "{ttt.steps: 0}"), "variant more steps: ttt.steps is 0"),
        (("{ttt.steps: 3}", "3"), "variant more steps is 3"),
        (("hf: none", "prompts: gone.jsonl"), "prompts 'gone.jsonl': no such file"),
        (("tree_depth: 3", "tree_deph: 3"), "variant deep: .*--tree-deph.*--tree-depth"),
        (("{ttt.steps: 3}", "{ttt.steps: 2}"), "more steps s0 is the same run as usual s0"),
        (("[0, 1]", "[0, 0]"), "seeds is"),
        (("[0, 1]", "1"), "seeds is 1"),
        (("2k tokens", "2k"), "budget is '2k'"),
        (
            ("variants:\n  usual: {}\n  more steps: {ttt.steps: 3}\n  deep: {evaluate.tree_depth: 3}", ""),
            "variants or grid",
        ),
        (("extends: base.yaml", "extends: bass.yaml"), "bass.yaml' does not exist"),
        (("extends: base.yaml", ""), "set and budget are of training"),
        (("budget:", "grid: {ttt.steps: [1]}\nbudget:"), "either variants or grid"),
        (("budget:", "plot: {y: tau}\nbudget:"), "plot.y"),
        (("budget:", "plot: {line: rule}\nbudget:"), "plot.x is None"),
        (("budget:", "plot: {x: [rule]}\nbudget:"), r"plot.x is \['rule'\]"),
        (("budget:", "plot: {x: depth, panel: 1}\nbudget:"), "plot.panel is 1"),
        (("extends: base.yaml", "extends: [base.yaml]"), "extends is"),
        (("budget:", "idle: 'no'\nbudget:"), "idle is 'no'"),
        (("hf: none", "hf: none, temperature: []"), r"temperature is \[\]"),
        (("hf: none", "hf: none, temperature: [0, 0.0]"), r"temperature is \[0, 0.0\]"),
        (("{optim.lr: 0.002}", "{data.files: [gone.jsonl]}"), "gone.jsonl: no such file"),
    ],
)
def test_a_wrong_sweep_is_named(sweep, change, message):
    """A typo in the last variant that shows after hours."""
    text = sweep.read_text()
    assert change[0] in text
    sweep.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=message):
        plan(read_sweep(sweep), Options(sweep.parent / "out"))


def test_grid_is_every_combination(sweep):
    sweep.write_text("grid: {tree_depth: [2, 3], tree_top_k: [4, 5]}\nevaluate: {mode: tree, hf: none}\n")
    found = read_sweep(sweep)
    assert list(found.variants) == [f"tree_depth={d},tree_top_k={k}" for d in (2, 3) for k in (4, 5)]
    words = [run.evaluations[0].words for run in plan(found, Options(sweep.parent))]
    assert [w[w.index("--tree-depth") + 1] + w[w.index("--tree-top-k") + 1] for w in words] == ["24", "25", "34", "35"]


def test_the_name_needs_no_ending(sweep):
    assert read_sweep(sweep.with_suffix("")).name == "sweep"
    assert read_sweep(sweep).question == "does it matter?"


def test_flags_of_a_file(sweep):
    """What several sweeps measure alike stands once."""
    flags = "{mode: [plain, chain], hf: none, max_turns: 1}"
    whole = read_sweep(sweep)
    (sweep.parent / "measure.yaml").write_text(flags)
    sweep.write_text(sweep.read_text().replace(flags, "measure.yaml"))
    assert read_sweep(sweep).evaluate == whole.evaluate != {}
