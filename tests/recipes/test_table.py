"""Tables of a sweep: what is a group of seeds, and what a figure's notes say of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.errors import ConfigError
from eagle3_recipes.results import mode_rows, records, training_figures
from eagle3_recipes.table import ALONE, OTHER_REPLIES, SPREAD, inference_table, training_table
from oracles.sweeps import record, result_of


def trained(variant, steps, seed=0):
    figures = {"alpha": [0.5] * steps, "tau": 1.0 + steps / 2, "tokens": 100, "update_seconds": 60.0}
    return result_of(variant, seed, [], figures)


@pytest.mark.parametrize("setting", ["draft_sharpness", "level_weight"])
def test_settings_are_not_averaged_as_seeds(setting):
    """Two sharpnesses or level weights, shown as one row with a spread."""
    other: Any = {setting: 1.3}
    rows = [record("chain[a]", 1.5, seed, draft_noise="shared") for seed in (0, 1)]
    rows += [record("chain[b]", 2.5, seed, draft_noise="shared", **other) for seed in (0, 1)]
    groups = mode_rows(rows)
    assert [[r["tau"] for r in group] for _, group in groups] == [[1.5, 1.5], [2.5, 2.5]]
    assert len({name for name, _ in groups}) == 2
    table = inference_table(rows, idle=False)
    assert "1.500 ±0.000" in table
    assert "2.500 ±0.000" in table
    assert "1.3" in table


def test_taus_of_unlike_rollouts_are_not_compared():
    """A chain of one step, whose tau is at most 2, below one of three."""
    assert "held-out tau" not in training_table([trained("three", 3), trained("one", 1)], idle=False)
    assert "held-out tau" in training_table([trained("three", 3), trained("other", 3)], idle=False)


def test_one_seed_is_no_finding():
    one, both = [trained("a", 2)], [trained("a", 2), trained("a", 2, seed=1)]
    assert ALONE in training_table(one, idle=False)
    assert SPREAD not in training_table(one, idle=False)
    assert ALONE not in training_table(both, idle=False)
    assert SPREAD in training_table(both, idle=False)


def test_rules_that_answer_otherwise_are_told():
    """tau of a rule with other replies, beside that of match."""
    assert OTHER_REPLIES in inference_table([record("chain", 1.5, rule="rejection", draft_noise="none")], idle=False)
    assert OTHER_REPLIES not in inference_table([record("chain", 1.5)], idle=False)
    greedy = record("chain", 1.5, temperature=0.0, rule="rejection", draft_noise="none")
    assert OTHER_REPLIES not in inference_table([greedy], idle=False)


@pytest.fixture
def head(tmp_path):
    """Of a run that was killed once: logged 100 tokens at 2 a second, then 100 at 4."""
    (tmp_path / "last").mkdir()
    lines = [
        {"step": 1, "tokens": 100, "tokens_per_second": 2.0},
        {"step": 2, "tokens": 200, "tokens_per_second": 4.0},
        {"step": 2, "split": "eval", "tau": 1.5, "loss": 2.0, "alpha": [0.5], "accept": [], "accept_chain": []},
    ]
    lines[-1]["coverage"] = 0.9
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("told, expected", [({"train_seconds": 70.0}, 70.0), ({}, 75.0)])
def test_seconds_of_a_resumed_run(head, told, expected):
    """Minutes of the last part alone; records older than `train_seconds`."""
    parts = {"ended": "now", "seconds": 30.0, "previous": [{"ended": None}]}
    (head / "run.json").write_text(json.dumps({**parts, "step": 2, "tokens": 200, "parameters": 7, **told}))
    run: Any = SimpleNamespace(head=head)
    figures = training_figures(run)
    assert figures is not None
    assert (figures["update_seconds"], figures["wall_seconds"]) == (expected, None)
    result = {**trained("a", 1), "training": figures}
    assert f"{expected / 60:.1f}" in training_table([result], idle=False).splitlines()[2]
    assert records([result])[0]["train.update_seconds"] == expected


@pytest.mark.parametrize(
    "metrics, told",
    [
        ('{"step": 1}\n', r"metrics\.jsonl holds no evaluation"),
        ('{"split": "eval", "tau": 1.5}\n', r"run\.json or metrics\.jsonl is not as this version .*KeyError: 'loss'"),
        (None, r"run\.json or metrics\.jsonl is not as this version .*FileNotFoundError"),
    ],
)
def test_what_lacks_a_figure_is_named(head, metrics, told):
    """metrics.jsonl without an evaluation, told as a run.json with an IndexError."""
    record = {"ended": "now", "previous": [], "step": 2, "tokens": 9, "parameters": 7}
    (head / "run.json").write_text(json.dumps(record))
    if metrics is None:
        (head / "metrics.jsonl").unlink()
    else:
        (head / "metrics.jsonl").write_text(metrics)
    run: Any = SimpleNamespace(head=head)
    with pytest.raises(ConfigError, match=f"{told}.*; move {head} away"):
        training_figures(run)
