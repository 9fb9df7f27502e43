"""Every choice about head, rollout, loss and optimiser by a line of YAML, up to a head that the engine runs."""

import json
import math
import runpy

import pytest
import torch
import yaml

from eagle3.checkpoint.reference import load_head
from eagle3.target import Target
from eagle3_infer.config import TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.runs import arguments, check_equal, metrics, weights
from oracles.script import SCRIPT

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
# several lines a run, as they do not meet
LINES = [
    ["ttt: {steps: 2, decay: 0.5}", "head: {capture_layers: [2], draft_vocab_size: 60}"],
    ["head: {capture_layers: [0, 2, 3, 5, 7], num_layers: 2}", "loss: {lk_lambda: 1.0}"],
    ["head: {hidden_size: 32, head_dim: 16, fc_norm: true, norm_output: true}", "ttt: {weights: dpace}"],
    ["head: {norm_before_residual: true, qk_norm: true, attention_bias: true}", "loss: {soft_ce: 0.5, tv: 0.5}"],
    ["head: {sliding_window: 8, num_attention_heads: 2, num_key_value_heads: 1}", "ttt: {checkpointing: true}"],
    ["head: {intermediate_size: 48}", "ttt: {feature_noise: 0.05}", "optim: {name: muon, momentum: 0.9}"],
    ["loss: {reverse_kl: 1.0, kl: 0.5}", "optim: {ema: 0.9, weight_decay: 0.1, lr: 0.01}"],
    ["loss: {lk_alpha: 1.0, hard_ce: 0.1}", "optim: {beta1: 0.8, clip: 0.5, final_ratio: 0.5, warmup_ratio: 0.5}"],
]


# each of them alone changes what two steps learn, from a start that is the same
SETTINGS = [
    *("ttt.decay 0.3", "ttt.weights dpace", "ttt.feature_noise 0.05", "optim.beta1 0.5", "optim.beta2 0.5"),
    *("optim.weight_decay 0.5", "optim.warmup_ratio 0.9", "optim.final_ratio 0.9", "optim.clip 0.01", "optim.ema 0.5"),
]


@pytest.fixture(scope="module")
def target(made):
    return Target.load(made / "target", "float32")


@pytest.mark.parametrize("lines", LINES, ids=lambda lines: " ".join(lines))
def test_an_option_is_a_line_of_yaml(made, target, tmp_path, lines):
    """A setting that does not reach the head, the rollout or the checkpoint; a head that the engine cannot run."""
    config = tmp_path / "config.yaml"
    config.write_text("\n".join(lines))
    words = [*arguments(made, tmp_path / "run", max_steps=2, eval__every=2, save_every=2), "--config", str(config)]
    assert runpy.run_path(str(SCRIPT))["main"](words) == 0
    given = yaml.safe_load(config.read_text())
    record = json.loads((tmp_path / "run/run.json").read_text())
    for group, settings in given.items():
        assert {k: record["config"][group][k] for k in settings} == settings
    for step in metrics(tmp_path / "run"):
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0
        assert len(step["accept"]) == record["config"]["ttt"]["steps"]
    head = load_head(tmp_path / "run/last", target)
    for name, value in given.get("head", {}).items():
        assert getattr(head.config, name) == (tuple(value) if isinstance(value, list) else value)
    request = Request([5, 9, 200, 31, 7], max_new_tokens=12)
    plain = Engine(target).generate_one(request)
    for tree in (TreeConfig.chain(3), TreeConfig(depth=3)):
        assert Engine(target, head, tree).generate_one(request).token_ids == plain.token_ids


@pytest.fixture(scope="module")
def usual(made, tmp_path_factory):
    """Weights of a head trained for two steps on the defaults."""
    return two_steps(made, tmp_path_factory.mktemp("usual"))


def two_steps(made, folder, *words):
    given = arguments(made, folder / "run", max_steps=2, eval__every=2, save_every=2, optim__lr=0.03)
    assert runpy.run_path(str(SCRIPT))["main"]([*given, *words]) == 0
    return weights(folder / "run")


def test_the_same_settings_learn_the_same(made, usual, tmp_path):
    """Without it the next test shows nothing."""
    check_equal(two_steps(made, tmp_path), usual)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_what_is_learned(made, usual, tmp_path, setting):
    """A setting that is accepted, recorded, and used by nobody."""
    name, value = setting.split()
    changed = two_steps(made, tmp_path, f"--{name}", value)
    assert not all(torch.equal(changed[key], x) for key, x in usual.items())
