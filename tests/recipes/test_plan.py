"""Runs of a sweep: their commands, and when two are the same."""

import argparse
import json

import pytest
import yaml

from eagle3.errors import ConfigError
from eagle3_infer.cli import parse_settings
from eagle3_infer.flags import build_parser
from eagle3_recipes.budget import Budget
from eagle3_recipes.plan import REPEATED, Options, evaluation_command, plan, training_command
from eagle3_recipes.stages import note_settings
from eagle3_recipes.sweep import read_sweep
from oracles.sweeps import flags_of


def planned(sweep, **options):
    return plan(read_sweep(sweep), Options(sweep.parent / "out", **options))


def test_commands(sweep):
    """A budget that does not reach the trainer, a head that is not the one trained."""
    for name in ("a.jsonl", "b.jsonl", "p.jsonl"):
        (sweep.parent / name).touch()
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
    assert [run.name for run in planned(sweep, seeds=(7,))] == [f"{v} s7" for v in ("usual", "more steps", "deep")]
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


def head(folder, weights="w", config="{}"):
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "config.json").write_text(config)
    return folder


@pytest.mark.parametrize("named", ["chats", "chats/*.jsonl"])
def test_folders_and_patterns_are_known_by_their_files(sweep, named):
    """Yesterday's table over today's chats: `data.files` that are no single file were known by their name."""
    folder = sweep.parent / "chats"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}\n")
    sweep.write_text(sweep.read_text().replace("{optim.lr: 0.002}", f"{{data.files: ['{named}']}}"))
    first = planned(sweep)[0].digest
    # one file by its own name is the same data
    assert planned(sweep, files=("chats/a.jsonl",))[0].digest == first
    (folder / "a.jsonl").write_text("{} \n")
    changed = planned(sweep)[0].digest
    (folder / "b.jsonl").write_text("{}\n")
    assert len({first, changed, planned(sweep)[0].digest}) == 3


def test_saved_data_sets_are_known_by_their_files(sweep):
    """A folder of save_to_disk; what `datasets` caches there is no part of it."""
    folder = sweep.parent / "saved"
    folder.mkdir()
    for name in ("state.json", "dataset_info.json", "data-0.arrow"):
        (folder / name).write_text("{}")
    first = planned(sweep, files=("saved",))[0].digest
    (folder / "cache-1.arrow").write_text("{}")
    assert planned(sweep, files=("saved",))[0].digest == first
    (folder / "data-0.arrow").write_text("{ }")
    assert planned(sweep, files=("saved",))[0].digest != first


def test_data_of_the_hub_is_known_by_its_name(sweep):
    [one, other] = [planned(sweep, files=(f"hub:org/{name}",))[0].digest for name in "ab"]
    assert one != other


@pytest.mark.parametrize("key", ["init_head", "data.vocab_map"])
def test_what_a_training_starts_from_is_known_by_its_contents(sweep, key):
    """Another head behind the path of a warm start, another map: the runs of the first one, taken for theirs."""
    head(sweep.parent / "head")
    (sweep.parent / "map").write_text("m")
    path = "head" if key == "init_head" else "map"
    before = planned(sweep)[0].digest
    sweep.write_text(sweep.read_text().replace("{optim.lr: 0.002}", f"{{optim.lr: 0.002, {key}: {path}}}"))
    found = {before, planned(sweep)[0].digest}
    head(sweep.parent / "head", weights="other")
    (sweep.parent / "map").write_text("other")
    found.add(planned(sweep)[0].digest)
    if key == "init_head":
        head(sweep.parent / "head", weights="other", config='{"layers": 1}')
        found.add(planned(sweep)[0].digest)
    assert len(found) == (4 if key == "init_head" else 3)
    # the same under another path
    (sweep.parent / path).rename(sweep.parent / "moved")
    sweep.write_text(sweep.read_text().replace(f"{key}: {path}", f"{key}: moved"))
    assert planned(sweep)[0].digest in found
    sweep.write_text(sweep.read_text().replace(f"{key}: moved", f"{key}: gone"))
    with pytest.raises(ConfigError, match=r"gone.*no such file"):
        planned(sweep)


def test_a_measured_head_is_known_by_weights_and_settings(sweep):
    """An edited config.json, as of other capture layers, is another head."""
    folder = head(sweep.parent / "head")
    sweep.write_text("variants: {a: {}}\nevaluate: {mode: chain, hf: none, draft: head}\n")
    digests = [planned(sweep)[0].digest]
    head(folder, config='{"layers": 1}')
    digests.append(planned(sweep)[0].digest)
    head(folder, weights="other")
    digests.append(planned(sweep)[0].digest)
    sweep.write_text(sweep.read_text().replace("draft: head", "draft: random"))
    assert len({*digests, planned(sweep)[0].digest}) == 4


def test_repeatable_flags_are_repeated(sweep, monkeypatch):
    """Two stop strings as one that holds a comma, which never occurs; a text that begins with a dash."""
    monkeypatch.setattr("eagle3_infer.settings.check_destinations", lambda *_: None)
    texts = {"stop": ["\n\n", "User:", "---"], "bad_word": ["a, b", "c"], "logit_bias": ["5=-1.5", "6=2"]}
    for key, values in texts.items():
        sweep.write_text(json.dumps({"variants": {"a": {}}, "evaluate": {"mode": "chain", "hf": "none", key: values}}))
        [run] = planned(sweep)
        settings = parse_settings(evaluation_command(run, run.evaluations[0], 1)[3:])
        found = {"stop": settings.stop, "bad_word": settings.bad_words, "logit_bias": settings.sampling.logit_bias}
        assert found[key] == (((5, -1.5), (6, 2.0)) if key == "logit_bias" else tuple(values))
    sweep.write_text("variants: {a: {}}\nevaluate: {mode: chain, hf: none, stop: 'User:'}\n")
    assert parse_settings(planned(sweep)[0].evaluations[0].words).stop == ("User:",)


def template_options_of(run):
    text = flags_of(evaluation_command(run, run.evaluations[0], 1)).get("template-options", "{}")
    return parse_settings(["--template-options", text]).template_options


def test_a_head_is_measured_with_its_own_template_options(sweep):
    """A head that was trained with thinking off, measured on prompts that turn it on."""
    before = [evaluation.identity.digest for run in planned(sweep) for evaluation in run.evaluations]
    assert not any("--template-options" in evaluation_command(run, run.evaluations[0], 1) for run in planned(sweep))
    text = sweep.read_text()
    off = "{data.template_options: {enable_thinking: false}"
    sweep.write_text(text.replace("{ttt.steps: 3}", f"{off}, ttt.steps: 3}}"))
    runs = planned(sweep, seeds=(0,))
    assert [template_options_of(run) for run in runs] == [{}, {"enable_thinking": False}, {}]
    assert [run.evaluations[0].identity.digest in before for run in runs] == [True, False, True]
    # what the sweep says itself stays
    sweep.write_text(
        sweep.read_text()
        .replace("hf: none", "hf: none, template_options: {style: short}")
        .replace("{evaluate.tree_depth: 3}", f"{off}, evaluate.template_options: {{}}}}")
    )
    assert [template_options_of(run) for run in planned(sweep, seeds=(0,))] == [{"style": "short"}] * 2 + [{}]


@pytest.mark.parametrize(
    "options",
    [
        {"a": None, "b": "x\ny"},
        {"n": 1e20, "small": 1e-7, "s": "1e3"},
        {"e": "\U0001f600 \x7f", "l": [True, {"k": "no"}]},
    ],
)
def test_mappings_reach_eagle3_infer_as_they_are(sweep, options):
    """null as the text "None", a line break as a backslash and an n, an emoji as two halves."""
    flags = {"mode": "chain", "hf": "none", "template_options": options}
    sweep.write_text(yaml.safe_dump({"variants": {"a": {}}, "evaluate": flags}))
    assert template_options_of(planned(sweep)[0]) == options


def test_every_repeatable_flag_is_known():
    actions = build_parser()._actions
    assert {action.dest for action in actions if isinstance(action, argparse._AppendAction)} == REPEATED


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
