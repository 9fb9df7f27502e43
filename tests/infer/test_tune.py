"""`eagle3-infer tune` as a user meets it: its flags, its answer by measured speed, a whole run on a tiny target."""

import json
import shlex
from typing import Any

import pytest

from eagle3.errors import ConfigError
from eagle3_infer.cli import main, parse_settings
from eagle3_infer.config import TreeConfig
from eagle3_infer.notes import tuning_notes
from eagle3_infer.tune import answer_lines, fastest
from eagle3_infer.tune_flags import command_line, parse_tune_settings, tree_key
from oracles.tiny import tiny_folder

MOST = TreeConfig(6, 8, 64)
SMALL, LARGE, CHAIN = TreeConfig(3, 4, 8), TreeConfig(4, 4, 16), TreeConfig.chain(2)
ADAPTIVE = TreeConfig(6, 4, 32, adaptive=True)


def modes(**gains) -> dict[str, Any]:
    """A report's modes by name of the tree, with what they gained over plain decoding."""
    trees = {"small": SMALL, "large": LARGE, "chain": CHAIN, "adaptive": ADAPTIVE}
    found: dict[str, Any] = {"plain": {"tokens_per_second": 40.0, "speedup_vs_plain": 1.0}}
    for name, gain in gains.items():
        found[tree_key(trees[name])] = {
            "tokens_per_second": 40.0 * gain, "speedup_vs_plain": gain, "speedup_vs_plain_spread": [gain, gain],
            "tau": 2.0,
        }  # fmt: skip
    return found


@pytest.mark.parametrize(
    "gains, expected",
    [
        ({"small": 1.3, "large": 1.5, "chain": 1.2, "adaptive": 1.4}, LARGE),
        # as good as the fastest: a fixed one, and the smaller
        ({"small": 1.495, "large": 1.5, "chain": 1.2, "adaptive": 1.505}, SMALL),
        ({"small": 1.3, "large": 1.3, "chain": 1.2, "adaptive": 1.6}, ADAPTIVE),
        ({"small": 0.8, "large": 0.7, "chain": 0.99, "adaptive": 1.0}, None),
        # 1 % faster is faster, and what is as good must be faster, too
        ({"small": 0.995, "large": 1.004, "chain": 0.9, "adaptive": 0.9}, LARGE),
        # an interrupt came before the others
        ({"large": 1.2}, LARGE),
        ({}, None),
    ],
)
def test_the_fastest_by_measured_speedup(gains, expected):
    assert fastest(modes(**gains), (SMALL, LARGE, CHAIN, ADAPTIVE)) == expected


def test_answer_names_the_command_and_the_bounds():
    told = answer_lines(modes(large=1.5), [LARGE], TreeConfig(4, 8, 16), ["--threads", "2"])
    assert "use tree[d4k4n16]: 60.0 tokens/s, 1.50x plain decoding" in told
    assert "eagle3-infer --threads 2 --mode tree --tree-depth 4 --tree-top-k 4 --tree-nodes 16" in told
    assert "TreeConfig(depth=4, top_k=4, nodes=16)" in told
    assert "a larger --tree-depth, --tree-nodes may find" in told
    assert "larger" not in answer_lines(modes(large=1.5), [LARGE], MOST, [])


def test_plain_decoding_is_an_answer():
    told = answer_lines(modes(large=0.9), [LARGE], MOST, ["--batch", "8"])
    assert "no tree was faster" in told
    assert "eagle3-infer --batch 8 --mode plain" in told
    assert "trees to be timed" not in told
    assert answer_lines({}, [LARGE], MOST, []) == "nothing was measured"


def test_an_interrupt_before_the_trees_is_no_answer():
    """Of none that was timed nothing follows; of some, what they showed, with a word on the others."""
    told = answer_lines(modes(), [LARGE, SMALL], MOST, [])
    assert "no tree was timed" in told
    assert "eagle3-infer" not in told
    assert "use" not in told.split()
    unfinished = modes(large=1.5)
    unfinished[tree_key(SMALL)] = {"speedup_vs_plain": None}
    told = answer_lines(unfinished, [LARGE, SMALL, CHAIN], MOST, [])
    assert "use tree[d4k4n16]" in told
    assert "only 1 of the 3 trees" in told


@pytest.mark.parametrize("tree", [None, SMALL, CHAIN, ADAPTIVE])
def test_command_lines_are_read_as_they_were_meant(tree):
    """The user's flags of models, sampling and machine stay; those of the search go."""
    argv = ["--draft", "a b", "--limit", "3", "--json=x.json", "--stop", "it's", "--stop=END", "--temperature", "1"]
    argv += ["--logit-bias", "5=-2", "--repeats", "4", "--tree-depth", "9", "--draft-noise", "shared", "--batch=2"]
    settings = parse_settings(shlex.split(command_line(argv, tree))[1:])
    assert (settings.draft, settings.stop, settings.batch) == ("a b", ("it's", "END"), 2)
    assert (settings.sampling.temperature, settings.sampling.logit_bias) == (1.0, ((5, -2.0),))
    assert (settings.limit, settings.json, settings.repeats) == (None, None, 1)
    assert settings.draft_noise == ("shared",)
    (plan,) = settings.plans()
    assert plan.tree == tree


def test_settings_and_their_bounds():
    assert parse_tune_settings([]).most == MOST
    assert parse_tune_settings(["--tree-depth", "2", "--tree-top-k", "2"]).most == TreeConfig(2, 2, 6)
    assert parse_tune_settings(["--tree-nodes", "4"]).most == TreeConfig(4, 4, 4)
    given = parse_tune_settings(["--limit", "3", "--max-new-tokens", "9", "--bad-word", "no", "--top-p", "0.9"])
    assert (given.limit, given.max_new_tokens, given.bad_words) == (3, 9, ("no",))
    assert tuning_notes(given) == ["--top-p changes nothing at temperature 0"]
    assert [plan.key for plan in given.plans()] == ["plain"]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--tree-nodes", "0"], "--tree-nodes is 0"),
        (["--tree-depth", "-1"], "--tree-depth is -1"),
        (["--finalists", "0"], "--finalists is 0"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--tree-depth", "5000", "--tree-nodes", "5000"], "5000"),
        (["--draft-noise", "loud"], "draft_noise is 'loud'"),
        (["--mode", "tree"], "unknown argument '--mode'"),
        (["--json", "/nowhere/x.json"], "--json"),
        (["--dpeth", "3"], "unknown argument '--dpeth'"),
    ],
)
def test_wrong_flags(flags, said, capsys):
    with pytest.raises(ConfigError, match=said):
        parse_tune_settings(flags)
    assert main(["tune", *flags]) == 2
    assert said in capsys.readouterr().err


def test_whole_run(tmp_path, capsys):
    """A random head, which gives nothing: what is counted, measured, timed and answered."""
    target = tiny_folder(tmp_path / "target")
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("\n".join(json.dumps({"turns": [f"{i}", "more"]}) for i in range(3)))
    argv = ["--target", str(target), "--draft", "random", "--prompts", str(prompts), "--max-new-tokens", "8"]
    search = ["--tree-depth", "2", "--tree-top-k", "2", "--tree-nodes", "6", "--finalists", "2", "--repeats", "1"]
    assert main(["tune", *argv, *search, "--batch", "2", "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    told = json.loads(report.read_text())
    keys = [row["tree"] for row in told["tune"]["predicted"]]
    assert {"chain[d1k1n1]", "chain[d2k1n2]", "tree[d1k2n2]", "tree[d2k2n6]"} <= set(keys)
    speeds = [row["tokens_per_second"] for row in told["tune"]["predicted"]]
    assert speeds == sorted(speeds, reverse=True)
    assert set(told["tune"]["costs"]) == {"verify", "first", "level", "rest"}
    timed = list(told["modes"])
    assert timed[0] == "plain"
    assert timed[-1].startswith("auto[<=")
    assert keys[0] in timed
    assert any(key.startswith("chain") for key in timed)
    # first turns alone, the same replies in every mode
    assert len(told["outputs"]) == 3 * len(timed)
    assert all(pair["identical"] == pair["compared"] for pair in told["verify"]["pairs"])
    # what was counted is what the engine then took
    taus = {row["tree"]: row["tau"] for row in told["tune"]["predicted"]}
    for key in timed[1:-1]:
        assert told["modes"][key]["tau"] == pytest.approx(taus[key])
    command = told["tune"]["command"]
    assert f"  {command}\n" in f"{printed}\n"
    kept = shlex.split(command)[1:]
    assert kept[: len(argv)] == argv
    assert parse_settings(kept).batch == 2


def test_every_note_is_printed_and_in_the_report(tmp_path, capsys):
    """Those of the flags before the run, those of the prompts after it."""
    target = tiny_folder(tmp_path / "target", max_position_embeddings=128)
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text(json.dumps({"id": "long", "turns": ["a", "b" * 200]}))
    argv = ["--target", str(target), "--draft", "random", "--prompts", str(prompts), "--max-new-tokens", "4"]
    search = ["--tree-depth", "1", "--tree-top-k", "2", "--tree-nodes", "2", "--finalists", "1", "--repeats", "1"]
    flags = ["--max-turns", "2", "--top-p", "0.5", "--json", str(report)]
    assert main(["tune", *argv, *search, *flags]) == 0
    notes = json.loads(report.read_text())["run"]["notes"]
    assert [note.partition(",")[0] for note in notes] == [
        "--top-p changes nothing at temperature 0",
        "prompt long: turn 2 left out",
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("note: ")] == [f"note: {note}" for note in notes]
