"""The report counts what was emitted: invariants of the schema, figures by hand, and the printed table."""

import json

import pytest

from eagle3_infer.compare import compare_modes, first_difference
from eagle3_infer.names import mode_title
from eagle3_infer.report import Divergence, ModeRun, Output, build_report, speedup, tau
from eagle3_infer.request import STAGES
from eagle3_infer.table import align, render_report

SCHEMA_MODE_KEYS = {
    "tokens", "rounds", "tau", "tau_prompt_mean", "seconds", "tokens_per_second", "end_to_end_tokens_per_second",
    "speedup_vs_plain", "speedup_vs_hf", "seconds_by_stage", "offered_by_level", "accepted_by_level",
    "nodes_per_round", "utilisation", "path_conflict", "run_length_hist", "by_set", "by_category", "by_context",
    "peak_memory_bytes", "settings", "lossy", "loops", "mean_logprob", "tokens_per_second_spread",
    "speedup_vs_plain_spread", "speedup_vs_hf_spread",
}  # fmt: skip


def output(mode, runs, *, id="a", turn=0, category="x", prefill=0.5, draft=0.25, verify=1.0, other=0.25, **rest):
    """An output of 1 + sum(runs) tokens 0, 1, 2, ...; one and a half seconds of decoding."""
    seconds = dict.fromkeys(STAGES, 0.0) | {"prefill": prefill, "draft": draft, "verify": verify, "other": other}
    return Output(
        mode=mode, id=id, category=category, turn=turn, prompt_tokens=rest.pop("prompt_tokens", 10),
        token_ids=list(range(1 + sum(runs))), text="t", finish_reason="length", run_lengths=list(runs),
        seconds=seconds, **rest,
    )  # fmt: skip


def mode_run(key, outputs, settings=None, more_repeats=()):
    return ModeRun(key, settings or {}, [outputs, *more_repeats])


def test_sets_are_told_apart():
    """Tau, speed and speedups of each, as if it had been run alone."""

    def both(key, first, second, **seconds):
        each = [output(key, first, id="one/a", prompt_set="one", **seconds)]
        return mode_run(key, [*each, output(key, second, id="two/a", prompt_set="two", **seconds)])

    modes = [both("plain", [1] * 6, [1] * 2), both("tree", [3, 3], [1, 1], verify=0.25)]
    report = build_report({"argv": []}, modes, compare_modes(modes, None, sampled=False))
    sets = report["modes"]["tree"]["by_set"]
    assert {name: figures["tau"] for name, figures in sets.items()} == {"one": 3.0, "two": 1.0}
    assert sets["one"]["tokens"] == 7 and sets["two"]["rounds"] == 2
    # the same tokens in half the time
    assert sets["one"]["speedup_vs_plain"] == pytest.approx(2.0) and sets["one"]["speedup_vs_hf"] is None
    assert "tau | tok/s | speedup by set" in render_report(report)
    assert "3.00 | 8.0 | 2.00x" in render_report(report)


def test_one_set_is_no_group(report):
    assert all(mode["by_set"] == {} for mode in report["modes"].values())
    assert "by set" not in render_report(report)


TREE = {"depth": 2, "top_k": 2, "nodes": 4}


@pytest.fixture
def report():
    plain = mode_run("plain", [output("plain", [1] * 6), output("plain", [1] * 3, id="b", category="y")])
    tree = mode_run(
        "tree",
        [
            output(
                "tree", [3, 2, 1], offered_by_level=[3, 3], accepted_by_level=[2, 1], nodes=12, path_conflict=(2, 8)
            ),
            output("tree", [3], id="b", category="y", offered_by_level=[1, 1], accepted_by_level=[1, 1], nodes=4),
        ],
        TREE,
    )
    hf = mode_run("hf_generate", [output("hf_generate", [1] * 6), output("hf_generate", [1] * 3, id="b")])
    modes = [plain, tree, hf]
    return build_report({"argv": []}, modes, compare_modes(modes, None, sampled=False))


def test_schema(report):
    assert report["schema"] == 1
    assert set(report) == {"schema", "run", "modes", "verify", "outputs"}
    for mode in report["modes"].values():
        assert set(mode) >= SCHEMA_MODE_KEYS
        assert set(mode["seconds_by_stage"]) == set(STAGES)
    assert {"compared", "identical", "numeric", "bugs"} <= set(report["verify"])
    row = report["outputs"][0]
    assert {"id", "category", "turn", "mode", "prompt_tokens", "token_ids", "text", "rounds", "run_lengths"} <= set(row)
    json.dumps(report, allow_nan=False)


def test_invariants(report):
    for row in report["outputs"]:
        assert 1 + sum(row["run_lengths"]) == len(row["token_ids"])
        assert len(row["run_lengths"]) == row["rounds"]
    for key, mode in report["modes"].items():
        rows = [row for row in report["outputs"] if row["mode"] == key]
        assert mode["tokens"] == sum(len(row["token_ids"]) for row in rows)
        assert mode["rounds"] == sum(row["rounds"] for row in rows)
        assert mode["seconds"] == pytest.approx(sum(mode["seconds_by_stage"].values()))
        assert mode["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
        assert sum(int(n) * count for n, count in mode["run_length_hist"].items()) == mode["tokens"] - len(rows)
        for part in ("by_category", "by_context"):
            assert sum(group["rounds"] for group in mode[part].values()) == mode["rounds"]


def test_figures_by_hand(report):
    tree, plain = report["modes"]["tree"], report["modes"]["plain"]
    assert plain["tau"] == plain["tau_prompt_mean"] == 1.0
    assert tree["tau"] == 9 / 4
    assert tree["tau_prompt_mean"] == (2 + 3) / 2
    # nine tokens in rounds over two replies of 1.5 s without their prefill
    assert tree["tokens_per_second"] == pytest.approx(9 / 3)
    assert tree["end_to_end_tokens_per_second"] == pytest.approx(11 / 4)
    assert tree["offered_by_level"] == [4, 4] and tree["accepted_by_level"] == [3, 2]
    assert tree["nodes_per_round"] == 4 and tree["utilisation"] == 5 / 16 and tree["path_conflict"] == 2 / 8
    assert tree["run_length_hist"] == {"1": 1, "2": 1, "3": 2}
    assert tree["by_category"]["y"]["tau"] == 3
    assert plain["path_conflict"] is None and plain["utilisation"] is None


def test_the_mean_over_prompts_is_not_one_over_turns():
    """A prompt of two turns, 5/3 and 1 over both 6/4, and one of a single turn: 3."""
    turns = [output("tree", [2, 2, 1]), output("tree", [1], turn=1), output("tree", [3], id="b")]
    run = mode_run("tree", turns, TREE)
    assert (
        build_report({}, [run], compare_modes([run], None, False))["modes"]["tree"]["tau_prompt_mean"]
        == (6 / 4 + 3) / 2
    )


def test_no_round_no_tau():
    """A reply that ends with its first token has no round: tau is null, not zero, not one."""
    run = mode_run("plain", [output("plain", [])])
    mode = build_report({}, [run], compare_modes([run], None, False))["modes"]["plain"]
    assert mode["tau"] is None and mode["tau_prompt_mean"] is None and mode["run_length_hist"] == {}
    assert render_report(build_report({}, [run], compare_modes([run], None, False)))


def test_speedup_is_over_the_turns_that_both_ran():
    slow = [output("plain", [1] * 4, verify=1.5), output("plain", [1] * 4, id="b", verify=11.5)]
    fast = [output("tree", [4], verify=0.5)]
    assert speedup(fast, slow) == pytest.approx(2.0)
    assert speedup(fast, []) is None


def test_the_median_repeat_gives_the_figures():
    repeats = [[output("plain", [1] * 6, verify=seconds)] for seconds in (1.0, 3.0, 2.0)]
    mode = mode_run("plain", repeats[0], more_repeats=repeats[1:])
    assert mode.outputs is repeats[2]
    summary = build_report({}, [mode], compare_modes([mode], None, False))["modes"]["plain"]
    assert summary["tokens_per_second_spread"] == pytest.approx([6 / 3.5, 6 / 1.5])


def test_speedups_are_taken_within_a_repeat():
    """The machine was three times slower in the second repeat, for both modes: that is no change of the speedup."""
    plain = [[output("plain", [1] * 6, verify=seconds, other=0, draft=0)] for seconds in (2.0, 6.0, 2.0)]
    tree = [[output("tree", [3, 3], verify=seconds, other=0, draft=0)] for seconds in (1.0, 3.0, 1.6)]
    modes = [mode_run("plain", plain[0], more_repeats=plain[1:]), mode_run("tree", tree[0], TREE, tree[1:])]
    summary = build_report({}, modes, compare_modes(modes, None, False))
    mode = summary["modes"]["tree"]
    assert mode["speedup_vs_plain"] == pytest.approx(2.0)
    assert mode["speedup_vs_plain_spread"] == pytest.approx([1.25, 2.0])
    assert mode["speedup_vs_hf"] is mode["speedup_vs_hf_spread"] is None
    assert "2.00x (1.25 - 2.00)" in render_report(summary)


def test_of_two_repeats_every_figure_is_the_lower_ones():
    """Speeds and speedups by one rule, so that they are of one run."""
    repeats = [[output("tree", [3, 3], verify=seconds)] for seconds in (1.0, 2.0)]
    plain = [[output("plain", [1] * 6, verify=4.0)] for _ in repeats]
    modes = [mode_run("plain", plain[0], more_repeats=plain[1:]), mode_run("tree", repeats[0], TREE, repeats[1:])]
    mode = build_report({}, modes, compare_modes(modes, None, False))["modes"]["tree"]
    assert mode["tokens_per_second"] == mode["tokens_per_second_spread"][0] == pytest.approx(6 / 2.5)
    assert mode["speedup_vs_plain"] == mode["speedup_vs_plain_spread"][0] == pytest.approx(4.5 / 2.5)


def test_a_repeat_that_only_one_mode_finished_makes_no_pair():
    plain = mode_run("plain", [output("plain", [1] * 6)], more_repeats=[[output("plain", [1] * 6, verify=9.0)]])
    tree = mode_run("tree", [output("tree", [6])], TREE, [[]])
    assert len(tree.speedups(plain)) == 1 and tree.speedups(None) == []


def test_loops_are_told_apart():
    """A reply of 13 tokens of text, then one token for ever: its drafts are accepted, and say nothing of the text."""
    loop = output("tree", [2] * 6 + [4] * 8, accepted_by_level=[14, 8, 8], offered_by_level=[14, 14, 14])
    loop.token_ids[13:] = [99] * len(loop.token_ids[13:])
    plain = output("plain", [1] * 44)
    modes = [mode_run("plain", [plain]), mode_run("tree", [loop], TREE)]
    report = build_report({}, modes, compare_modes(modes, None, False))
    # the first 99 is the round's own, what repeats it is the loop
    assert report["modes"]["tree"]["loops"] == {"share": 31 / 45, "tau_outside": (6 * 2 + 4) / 7}
    assert report["modes"]["plain"]["loops"] == {"share": 0.0, "tau_outside": 1.0}
    text = render_report(report)
    assert "repetition loops: plain 0%, tree 69% of the tokens; tau outside them: tree 2.29" in text


def test_no_loop_no_line(report):
    assert report["modes"]["tree"]["loops"]["share"] == 0.0
    assert "repetition" not in render_report(report)


def test_rules_are_told_in_table_and_file():
    def drafting(key, **rule):
        settings = {**TREE, "rule": "match", "draft_noise": "none", "lossless": True, **rule}
        return mode_run(key, [output(key, [2, 2])], settings)

    modes = [
        mode_run("plain", [output("plain", [1] * 4)]),
        drafting("chain[shared]", draft_noise="shared"),
        drafting("chain[rejection]", rule="rejection"),
        drafting("tree[d2k2n4,threshold]", rule="threshold", lossless=False),
    ]
    drawn = build_report({}, modes, compare_modes(modes, None, sampled=True))
    assert [mode["lossy"] for mode in drawn["modes"].values()] == [False, False, False, True]
    assert [pair["mode"] for pair in drawn["verify"]["pairs"]] == ["chain[shared]"]
    assert [row["mode"] for row in drawn["verify"]["not_compared"]] == ["chain[rejection]", "tree[d2k2n4,threshold]"]
    rows = render_report(drawn).splitlines()
    assert [row.split("  ")[0] for row in rows[2:6]] == [
        "plain",
        "chain shared",
        "chain rejection",
        "tree threshold LOSSY",
    ]
    assert "LOSSY: tree[d2k2n4,threshold] may emit what the target would not." in rows
    assert "outputs: tree[d2k2n4,threshold] not compared: a lossy rule" in rows
    # without drawing every lossless rule emits plain's tokens
    greedy = build_report({}, modes, compare_modes(modes, None, sampled=False))
    assert [pair["mode"] for pair in greedy["verify"]["pairs"]] == ["chain[shared]", "chain[rejection]"]
    assert [row["mode"] for row in greedy["verify"]["not_compared"]] == ["tree[d2k2n4,threshold]"]


def test_only_modes_that_are_not_compared():
    modes = [mode_run("tree[threshold]", [output("tree[threshold]", [2])], {**TREE, "lossless": False})]
    text = render_report(build_report({}, modes, compare_modes(modes, None, False)))
    assert text.endswith("outputs: tree[threshold] not compared: a lossy rule")


def test_shapes_in_the_table():
    shapes = [{}, {"adaptive": True}, {"level_weight": 0.5}]
    modes = [mode_run(f"tree[{i}]", [output("tree", [2])], {**TREE, **more}) for i, more in enumerate(shapes)]
    text = render_report(build_report({}, modes, compare_modes(modes, None, False)))
    assert [line.split()[1] for line in text.splitlines()[2:5]] == ["d2k2n4", "<=d2k2n4", "d2k2n4w0.5"]


def test_modes_that_differ_have_titles_that_differ():
    """Whatever a run may vary: two sharpnesses, two weights, a tree and the most of an adaptive one."""
    varied = [
        *({"draft_noise": "shared", "draft_sharpness": sharpness} for sharpness in (1.0, 1.3)),
        *({"level_weight": weight} for weight in (1.0, 0.7)),
        *({"rule": rule, "lossless": rule != "threshold"} for rule in ("rejection", "target_only", "threshold")),
        *({"top_k": 1, "nodes": 2}, {"adaptive": True}),
    ]
    modes = [mode_run(f"tree[{i}]", [output("tree", [2])], {**TREE, **more}) for i, more in enumerate(varied)]
    report = build_report({}, modes, compare_modes(modes, None, False))
    titles = [mode_title(key, mode) for key, mode in report["modes"].items()]
    assert titles[:4] == ["tree shared d2k2n4", "tree shared*1.3 d2k2n4", "tree d2k2n4", "tree d2k2n4w0.7"]
    assert len(set(titles)) == len(titles)
    # the table's two first columns say the same
    rows = [line.split("  ") for line in render_report(report).splitlines()[2 : 2 + len(varied)]]
    assert [" ".join([row[0], next(cell.strip() for cell in row[1:] if cell)]) for row in rows] == titles


def test_a_report_from_before_sets_is_rendered(report):
    expected = render_report(report)
    for mode in report["modes"].values():
        del mode["by_set"]
    assert render_report(report) == expected


def test_logprobs_are_shown_where_they_were_asked_for():
    asked = [output("plain", [1], logprobs=[-0.5, -1.5]), output("plain", [], id="b", logprobs=[-1.0])]
    modes = [mode_run("plain", asked), mode_run("hf_generate", [output("hf_generate", [1])])]
    report = build_report({}, modes, compare_modes(modes, None, False))
    assert report["modes"]["plain"]["mean_logprob"] == -1.0 and report["modes"]["hf_generate"]["mean_logprob"] is None
    assert [row.get("logprobs") for row in report["outputs"]] == [[-0.5, -1.5], [-1.0], None]
    assert "at temperature 1: plain -1.000" in render_report(report)


def test_an_unfinished_repeat_is_left_out():
    whole = [output("plain", [1]), output("plain", [1], id="b")]
    mode = mode_run("plain", whole, more_repeats=[[output("plain", [1])], []])
    assert mode.outputs is whole and len(mode.rates) == 1


def test_context_buckets_follow_the_reply():
    """A reply that crosses a bucket's edge is counted in both, each round where it began."""
    groups = build_report(
        {}, [mode_run("plain", [output("plain", [1] * 6, prompt_tokens=124)])], compare_modes([], None, False)
    )
    contexts = groups["modes"]["plain"]["by_context"]
    assert {name: group["rounds"] for name, group in contexts.items()} == {"0-127": 3, "128-255": 3}


def test_comparison_counts_and_names_the_place():
    left = [output("tree", [2, 1]), output("tree", [1], id="b")]
    other = output("plain", [1, 1, 1])
    other.token_ids[2] = 99
    modes = [mode_run("plain", [other, output("plain", [1], id="b")]), mode_run("tree", left)]
    comparison = compare_modes(modes, None, sampled=False)
    assert [(p.mode, p.reference, p.compared, p.identical) for p in comparison.pairs] == [("tree", "plain", 2, 1)]
    assert comparison.divergences == [Divergence("a", 0, "tree", "plain", 2)]


def test_sampled_outputs_are_not_compared_with_hf():
    modes = [mode_run("plain", [output("plain", [1])]), mode_run("hf_generate", [output("hf_generate", [1, 1])])]
    assert compare_modes(modes, None, sampled=True).pairs == []
    assert len(compare_modes(modes, None, sampled=False).divergences) == 1


def test_explained_divergences_reach_the_report():
    modes = [mode_run("plain", [output("plain", [1])]), mode_run("tree", [output("tree", [2])], TREE)]

    def explain(left, right, position):
        return Divergence(left.id, left.turn, left.mode, right.mode, position, "bug", 0.5, "told")

    report = build_report({}, modes, compare_modes(modes, explain, sampled=False))
    assert report["verify"]["bugs"][0]["position"] == 2 and report["verify"]["numeric"] == []
    assert "BUG: tree against plain, prompt a, turn 1, token 2" in render_report(report)


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 9], [1, 2]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0


def test_table(report):
    text = render_report(report)
    assert "d2k2n4" in text and "HF generate" in text
    assert "outputs: tree == plain, plain == HF generate (2/2 replies)" in text
    assert "tau | tok/s by category" in text
    assert "\x1b" not in text and not any(line != line.rstrip() for line in text.splitlines())


def test_what_is_not_timed_by_stage_is_no_zero():
    """Of transformers one time is known; an engine's mode without a round has spent none, and that is known."""
    modes = [
        mode_run("plain", [output("plain", [1] * 6, draft=0.0)]),
        mode_run("tree", [output("tree", [], draft=0.0, verify=0.0, other=0.0)], TREE),
        mode_run("hf_generate", [output("hf_generate", [1] * 6, draft=0.0, verify=0.0, other=1.5)]),
        mode_run("hf_prompt_lookup", [output("hf_prompt_lookup", [2] * 3, draft=0.0, verify=0.0, other=1.5)]),
    ]
    text = render_report(build_report({}, modes, compare_modes(modes, None, False)))
    assert [line.split()[-4:] for line in text.splitlines()[2:6]] == [
        ["0.50", "0.00", "1.00", "0.25"],
        ["0.50", "0.00", "0.00", "0.00"],
        ["0.50", "-", "-", "1.50"],
        ["0.50", "-", "-", "1.50"],
    ]
    assert "Not timed by stage, so that rest is all of the decoding: HF generate, HF prompt lookup." in text


def test_slower_is_said():
    modes = [
        mode_run("plain", [output("plain", [1] * 4)]),
        mode_run("chain", [output("chain", [2, 2], verify=3.0)], TREE),
    ]
    text = render_report(build_report({}, modes, compare_modes(modes, None, False)))
    assert "Slower than plain decoding here: chain" in text and "0.43x" in text


def test_nothing_measured():
    assert (
        render_report(build_report({}, [mode_run("plain", [])], compare_modes([], None, False)))
        == "nothing was measured"
    )


def test_align():
    assert align([("a", "b", "c"), ("long", "x", "1.0")]) == "a     b    c\n------------\nlong  x  1.0"


def test_tau_is_pooled():
    """A mean of per-prompt ratios would give (1 + 3) / 2."""
    assert tau([output("t", [1] * 3), output("t", [3], id="b")]) == 6 / 4


def test_a_level_that_was_never_accepted_is_a_zero():
    run = mode_run("tree", [output("tree", [1, 1], offered_by_level=[4, 8], accepted_by_level=[])], TREE)
    report = build_report({}, [run], compare_modes([run], None, False))
    assert report["modes"]["tree"]["accepted_by_level"] == [0, 0]
    assert "0.00 0.00" in render_report(report)


def test_divergences_are_listed_once_and_not_without_end():
    """With plain == HF, what parts from plain parts from HF too: said once; the file has all of it."""
    right = [output("plain", [1], id=str(i)) for i in range(20)]
    wrong = [output("tree", [2], id=str(i)) for i in range(20)]
    hf = [output("hf_generate", [1], id=str(i)) for i in range(20)]
    modes = [mode_run("plain", right), mode_run("tree", wrong, TREE), mode_run("hf_generate", hf)]
    report = build_report({}, modes, compare_modes(modes, None, False))
    assert len(report["verify"]["unclassified"]) == 40
    text = render_report(report)
    assert text.count("differs: ") == 12 and "and 8 more" in text and "tree against HF" not in text
