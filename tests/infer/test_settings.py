"""What the flags of `eagle3-infer` become: settings, the plan of the modes, and notes of what changes nothing."""

import pytest

from eagle3.errors import ConfigError
from eagle3_infer.cli import parse_settings
from eagle3_infer.config import SamplingConfig, TreeConfig
from eagle3_infer.notes import run_notes, unused
from eagle3_infer.settings import RunSettings


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--top-p", "0.9", "--seed", "4"], ["--top-p", "--seed"]),
        (["--temperature", "0.5", "--top-p", "0.9", "--seed", "4", "--rule", "rejection"], []),
        (["--min-p", "0.1", "--rule", "match,rejection"], ["--min-p", "--rule"]),
        (["--draft-noise", "shared"], ["--draft-noise"]),
        (["--rule", "threshold", "--threshold", "0.5"], []),
        (["--threshold", "0.5"], ["--threshold"]),
        (["--temperature", "1", "--mode", "plain", "--rule", "rejection"], ["--rule"]),
        (["--mode", "plain", "--draft", "random", "--chain-depth", "2"], ["--draft", "--chain-depth"]),
        ([], []),
        (["--mode", "plain,auto", "--tree-level-weight", "2"], ["--tree-level-weight"]),
        (["--mode", "tree", "--tree-nodes", "auto", "--tree-level-weight", "2"], ["--tree-level-weight"]),
        (["--mode", "tree,auto", "--tree-level-weight", "2"], ["--tree-level-weight"]),
        (["--mode", "chain", "--tree-level-weight", "2"], ["--tree-level-weight"]),
        (["--mode", "tree", "--tree-level-weight", "2", "--tree-top-k", "7"], []),
        (["--mode", "plain,chain", "--tree-top-k", "7", "--tree-nodes", "7"], ["--tree-top-k", "--tree-nodes"]),
        (["--mode", "plain,auto", "--tree-depth", "2", "--tree-top-k", "7"], []),
        (["--mode", "chain", "--tree-depth", "2"], []),
        (["--mode", "chain", "--tree-depth", "2", "--chain-depth", "3"], ["--tree-depth"]),
        (["--mode", "plain", "--tree-depth", "2"], ["--tree-depth"]),
        (["--logprobs"], ["--logprobs"]),
        (["--logprobs", "--json", "report.json"], []),
        (["--assistant", "small"], ["--assistant"]),
        (["--assistant", "small", "--hf", "generate,assisted"], []),
        (["--server-model", "m", "--html-replies", "2"], ["--server-model", "--html-replies"]),
    ],
)
def test_flags_that_change_nothing_are_named(flags, named):
    assert [text.split()[0] for text in unused(parse_settings(flags))] == named


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--mode", "auto", "--temperature", "1"], None),
        (["--mode", "tree", "--temperature", "1", "--rule", "rejection"], None),
        (["--mode", "auto", "--rule", "target_only"], None),
        (["--mode", "auto", "--temperature", "1", "--rule", "match,target_only"], "auto[target_only]"),
        (
            ["--mode", "tree", "--tree-nodes", "8,auto", "--temperature", "1", "--rule", "rejection,target_only"],
            "auto[rejection], auto[target_only]",
        ),
        # greedy requests too obey the threshold
        (["--mode", "auto", "--rule", "threshold"], "auto[threshold]"),
    ],
)
def test_tokens_that_hang_on_the_machines_speed_are_noted(flags, named):
    """Under a rule that is not pathwise the tree has a say in which tokens are drawn, and the clock in the tree."""
    notes = [text for text in run_notes(parse_settings(flags)) if "seed" in text]
    assert [text.partition(" draw")[0] for text in notes] == ([] if named is None else [named])


@pytest.mark.parametrize(
    "hf, batch, noted",
    [("generate", "4", False), ("generate,prompt_lookup", "1", False), ("generate,prompt_lookup", "4", True)],
)
def test_what_transformers_does_one_at_a_time_is_noted(hf, batch, noted):
    notes = run_notes(parse_settings(["--hf", hf, "--batch", batch]))
    assert ["--hf prompt_lookup: transformers drafts for one prompt at a time" in text for text in notes] == [
        True
    ] * noted


def test_baselines_have_keys_of_their_own_and_an_order():
    plans = parse_settings(["--hf", "assisted,generate,prompt_lookup", "--assistant", "small"]).hf_plans()
    assert [plan.key for plan in plans] == ["hf_generate", "hf_prompt_lookup", "hf_assisted"]
    assert parse_settings(["--hf", "none"]).hf_plans() == []


@pytest.mark.parametrize("least, noted", [("13", True), ("12", False)])
def test_a_least_length_out_of_reach_is_noted(least, noted):
    notes = run_notes(parse_settings(["--min-tokens", least, "--max-new-tokens", "12"]))
    assert [text.split(":")[0] for text in notes] == ["--min-tokens 13 is more than --max-new-tokens 12"] * noted


def keys(*flags):
    return [plan.key for plan in parse_settings(["--temperature", "1", *flags]).plans()]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], ["plain", "chain", "tree"]),
        (["--mode", "plain,auto"], ["plain", "auto"]),
        (["--mode", "tree", "--tree-nodes", "auto"], ["auto"]),
        (["--mode", "tree", "--tree-nodes", "8,auto,16"], ["tree", "tree[d4k4n16]", "auto"]),
        (["--mode", "tree,auto", "--tree-nodes", "auto", "--verify"], ["plain", "auto"]),
        (["--mode", "plain", "--tree-nodes", "auto"], ["plain"]),
        (["--mode", "tree", "--tree-level-weight", "1,0.5"], ["tree", "tree[d4k4n16w0.5]"]),
        (["--rule", "rejection"], ["plain", "chain[rejection]", "tree[rejection]"]),
        (["--mode", "tree", "--draft-noise", "none,shared"], ["tree", "tree[shared]"]),
        (
            ["--mode", "tree", "--tree-nodes", "8,16", "--rule", "match,target_only", "--draft-noise", "shared"],
            ["tree[shared]", "tree[target_only]", "tree[d4k4n16,shared]", "tree[d4k4n16,target_only]"],
        ),
        # the default is TreeConfig's, top_k * depth: given twice it is one tree
        (["--mode", "tree", "--tree-depth", "2,3", "--tree-top-k", "2"], ["tree", "tree[d3k2n6]"]),
        (["--mode", "tree", "--tree-nodes", "16,16"], ["tree"]),
    ],
)
def test_keys_of_the_modes(flags, expected):
    assert keys(*flags) == expected


def test_an_adaptive_tree_may_be_as_large_as_the_largest():
    flags = ["--mode", "auto", "--tree-depth", "2,5", "--tree-top-k", "3,2", "--tree-nodes", "8,auto,12"]
    assert parse_settings(flags).adaptive_tree == TreeConfig(depth=5, top_k=3, nodes=12, adaptive=True)
    assert parse_settings(["--mode", "auto"]).adaptive_tree == TreeConfig(adaptive=True)


def test_sampling_flags_reach_the_requests():
    flags = [
        "--temperature", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--presence-penalty", "0.3",
        "--frequency-penalty", "-0.1", "--logit-bias", "5=1.5", "--logit-bias", "7=-2", "--min-tokens", "3",
    ]  # fmt: skip
    assert parse_settings(flags).sampling == SamplingConfig(
        temperature=0.5, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.1,
        logit_bias=((5, 1.5), (7, -2.0)), min_tokens=3,
    )  # fmt: skip


def test_unwritable_report_is_known_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        parse_settings(["--json", str(tmp_path / "none" / "report.json")])


@pytest.mark.parametrize("first, second", [("--json", "--html"), ("--json", "--plot"), ("--html", "--plot")])
def test_two_forms_of_a_report_do_not_replace_each_other(tmp_path, monkeypatch, first, second):
    """However the path is written; beside each other they may stand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for path in ("r", "./r", str(tmp_path / "r"), "link/r"):
        with pytest.raises(ConfigError, match=f"^{second} {path} is where {first} goes, too"):
            parse_settings([first, "r", second, path])
    parse_settings([first, "r", second, "r2"])


def test_template_options_are_yaml_or_json():
    for text in ("{enable_thinking: false}", '{"enable_thinking": false}'):
        assert parse_settings(["--template-options", text]).template_options == {"enable_thinking": False}
    for text in ("enable_thinking=false", "[1]", "{", "null", ""):
        with pytest.raises(ConfigError, match="is no object such as"):
            parse_settings(["--template-options", text])
    with pytest.raises(ConfigError, match="--template-options has the key True"):
        parse_settings(["--template-options", "{on: true}"])
    with pytest.raises(ConfigError, match="--template-options sets return_dict, tokenize, expected variables"):
        parse_settings(["--template-options", "{tokenize: false, return_dict: true, enable_thinking: true}"])


def test_defaults_live_in_the_settings():
    assert parse_settings([]) == RunSettings()


def test_draft_sharpness_belongs_to_shared_noise():
    """Each value is a run of its own, named in the key; nothing is run twice where the noise is not shared."""
    settings = RunSettings(
        modes=("chain",),
        draft_noise=("none", "shared"),
        draft_sharpness=(1.0, 1.2),
        sampling=SamplingConfig(temperature=1),
    )
    assert [plan.key for plan in settings.plans()] == ["chain", "chain[shared]", "chain[shared*1.2]"]
    assert settings.plans()[-1].settings["draft_sharpness"] == 1.2
    (note,) = unused(RunSettings(draft_sharpness=(1.2,)))
    assert note == "--draft-sharpness changes nothing: it belongs to --draft-noise shared"
    with pytest.raises(ConfigError, match="draft_sharpness is 0"):
        RunSettings(draft_noise=("shared",), draft_sharpness=(0.0,))
