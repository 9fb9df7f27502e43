"""Runs of a sweep: their commands, and when two are the same."""

import json

import pytest

from eagle3.errors import ConfigError
from eagle3_recipes.budget import Budget
from eagle3_recipes.plan import Options, evaluation_command, plan, training_command
from eagle3_recipes.stages import note_settings
from eagle3_recipes.sweep import read_sweep
from oracles.sweeps import flags_of


def planned(sweep, **options):
    return plan(read_sweep(sweep), Options(sweep.parent / "out", **options))


def test_commands(sweep):
    """A budget that does not reach the trainer, a head that is not the one trained."""
    (sweep.parent / "p.jsonl").touch()
    options = Options(sweep.parent / "out", files=("a.jsonl", "b.jsonl"), prompts="p.jsonl", log_with=("wandb",))
    found = read_sweep(sweep)
    run = plan(found, options)[1]
    flags = flags_of(training_command(run, found, options, threads=3))
    assert flags["config"] == str(sweep.parent / "base.yaml")
    assert (flags["optim.lr"], flags["ttt.steps"], flags["seed"], flags["threads"]) == ("0.002", "3", "0", "3")
    assert (flags["max_steps"], flags["max_tokens"], flags["max_minutes"]) == ("null", "2000", "null")
    assert json.loads(flags["data.files"]) == ["a.jsonl", "b.jsonl"]
    assert (flags["group"], flags["run_name"]) == ("sweep", "more steps-s0")
    shown = flags_of(evaluation_command(run, run.evaluations[0], threads=3))
    assert (shown["mode"], shown["hf"], shown["prompts"]) == ("plain,chain", "none", "p.jsonl")
    assert (shown["target"], shown["draft"]) == ("tiny", f"{flags['output']}/last")


def test_a_budget_of_the_command_line_wins(sweep):
    training = planned(sweep, budget=Budget(minutes=5))[0].training
    assert training is not None
    config = training.config
    assert (config.max_steps, config.max_tokens, config.max_minutes) == (None, None, 5)


def test_seeds_first_then_variants(sweep):
    """A sweep that is stopped half-way has one seed of all, not two of one."""
    assert [run.name for run in planned(sweep)] == [
        f"{v} s{s}" for s in (0, 1) for v in ("usual", "more steps", "deep")
    ]
    assert [run.name for run in planned(sweep, seeds=(7,), only=("deep",))] == ["deep s7"]
    with pytest.raises(ConfigError, match=r"--only names shallow; .* has usual, more steps, deep"):
        planned(sweep, only=("shallow",))


def test_one_head_may_be_measured_in_two_ways(sweep):
    """`deep` differs in its evaluation alone: its training is the first variant's."""
    usual, _, deep = planned(sweep, seeds=(0,))
    assert usual.folder == deep.folder
    assert usual.report(usual.evaluations[0]) != deep.report(deep.evaluations[0])


def test_what_makes_two_runs_the_same(sweep):
    """A run that is done again for another output or thread count, or not again for other data."""
    digests = [run.digest for run in planned(sweep)]
    assert len(set(digests)) == 4
    assert [run.digest for run in planned(sweep, threads=9, log_with=("wandb",))] == digests
    (sweep.parent / "copy.jsonl").write_text("{}\n")
    assert [run.digest for run in planned(sweep, files=("copy.jsonl",))] == digests
    (sweep.parent / "chats.jsonl").write_text("{} \n")
    assert not set(digests) & {run.digest for run in planned(sweep)}


def test_a_run_of_other_defaults_is_told(sweep):
    """Results of an older default, taken for today's."""
    run = planned(sweep)[0]
    note_settings(run)
    assert planned(sweep)[0].folder == run.folder
    kept = run.folder / "settings.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"optim.beta2": 0.5}))
    with pytest.raises(ConfigError, match=r"optim\.beta2 was 0\.5, is 0\.95"):
        planned(sweep)
    kept.write_text("{")
    with pytest.raises(ConfigError, match=r"settings\.json cannot be read"):
        planned(sweep)


def test_a_run_of_another_sweep_is_found(sweep):
    """The same head, trained once per sweep."""
    run = planned(sweep)[0]
    note_settings(run)
    other = sweep.with_name("other.yaml")
    other.write_text(sweep.read_text().replace("usual", "standard"))
    assert planned(other)[0].folder == run.folder


def test_temperatures_are_runs_of_their_own(sweep):
    sweep.write_text("variants: {a: {}}\nseeds: [3, 4]\nevaluate: {mode: chain, hf: none, temperature: [0, 1]}\n")
    runs = planned(sweep)
    flags = [[flags_of(evaluation_command(r, e, 1)) for e in r.evaluations] for r in runs]
    assert [[(f["temperature"], f["seed"]) for f in row] for row in flags] == [
        [("0", "3"), ("1", "3")],
        # at T=0 another seed is the same run
        [("1", "4")],
    ]
    assert all("draft" not in f for row in flags for f in row)
    with pytest.raises(ConfigError, match="trains nothing"):
        planned(sweep, budget=Budget(5))


def test_seeds_that_draw_nothing_are_left_out(sweep):
    """One greedy run, shown as three that agree to the last digit."""
    sweep.write_text("variants: {a: {}}\nseeds: [3, 4]\nevaluate: {mode: chain, hf: none}\n")
    assert [run.name for run in planned(sweep)] == ["a s3"]
    assert [run.name for run in planned(sweep, seeds=(4,))] == ["a s4"]


def test_a_report_of_other_defaults_is_told(sweep):
    """An evaluation from before a default of eagle3-infer changed; one that left no report is free to start anew."""
    run = planned(sweep)[0]
    note_settings(run)
    [evaluation] = run.evaluations
    kept = run.settings(evaluation)
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"batch": 77}))
    assert planned(sweep)
    run.report(evaluation).write_text("{}")
    with pytest.raises(ConfigError, match=r"evaluate-\w+\.json was made under other defaults \(batch was 77, is \d+\)"):
        planned(sweep)
    # reports from before the settings were kept
    kept.unlink()
    assert planned(sweep)


def test_stores_are_shared_by_layers(sweep):
    sweep.write_text(sweep.read_text().replace("{ttt.steps: 3}", "{head.capture_layers: [2]}"))
    found, options = read_sweep(sweep), Options(sweep.parent / "out", store=sweep.parent / "store")
    flags = [flags_of(training_command(run, found, options, 1)) for run in plan(found, options)]
    assert all(f["features.source"] == "hybrid" for f in flags)
    stores = [f["features.store"] for f in flags]
    assert stores[0] == stores[2] == stores[3] != stores[1] == stores[4]
