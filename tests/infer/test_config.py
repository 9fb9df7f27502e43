"""Engine settings: ranges are checked when given, and the error prints them."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from eagle3.errors import ConfigError
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig


@pytest.mark.parametrize("depth, top_k, nodes", [(1, 1, 1), (4, 4, 16), (6, 10, 59), (3, 2, 10), (5, 1, 5)])
def test_legal_trees(depth, top_k, nodes):
    assert TreeConfig(depth, top_k, nodes).candidates >= nodes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"depth": 0}, "depth is 0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"depth": 4, "nodes": 3}, "between 4 .* and 52"),
        ({"depth": 3, "top_k": 2, "nodes": 11}, "between 3 .* and 10"),
        ({"depth": 3, "top_k": 1, "nodes": 4}, "between 3 .* and 3"),
        ({"depth": 10**20, "nodes": 10**20}, f"depth is {10**20}; it must be between 1 and 1024"),
        ({"top_k": 1025}, "top_k is 1025; it must be between 1 and 1024"),
        ({"depth": 4, "top_k": 1024, "nodes": 2000}, "between 4 .* and 1024"),
        ({"level_weight": 0.0}, r"level_weight is 0.0; it must be between 0.1 and 10.0"),
        ({"level_weight": float("nan")}, "level_weight is nan"),
        ({"level_weight": 1.5, "adaptive": True}, "level_weight is 1.5; an adaptive tree takes 1"),
        ({"depth": 2.5}, r"depth is 2.5 \(float\); it must be a whole number"),
        ({"top_k": True}, r"top_k is True \(bool\)"),
        ({"nodes": "8"}, r"nodes is '8' \(str\)"),
        ({"level_weight": "1"}, r"level_weight is '1' \(str\); it must be a number"),
    ],
)
def test_trees_out_of_range_print_the_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        TreeConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        *({"temperature": -0.1}, {"temperature": float("nan")}, {"temperature": "1"}, {"temperature": None}),
        *({"top_k": -1}, {"top_k": 2.5}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": True}, {"seed": 0.5}),
    ],
)
def test_sampling_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingConfig(**settings)


@pytest.mark.parametrize("depth, top_k, nodes", [(4, 4, 16), (1, 3, 3), (5, 1, 5), (2, 1024, 1024)])
def test_nodes_default_to_top_k_times_depth(depth, top_k, nodes):
    assert TreeConfig(depth, top_k).nodes == nodes


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "names a token id twice"),
        ({"logit_bias": (("a", 2.0),)}, r"logit_bias holds \('a', 2.0\)"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias holds"),
        ({"bad_words": ((),)}, r"bad_words holds \(\)"),
        ({"bad_words": ((1.5,),)}, "bad_words holds"),
        ({"logit_bias": (5, 1.0)}, "logit_bias holds 5; expected pairs"),
        ({"logit_bias": {5: "x"}}, r"logit_bias holds \(5, 'x'\)"),
        ({"logit_bias": ((True, 1.0),)}, "logit_bias holds"),
        ({"logit_bias": 5}, r"logit_bias is 5 \(int\); it must be a sequence"),
        ({"bad_words": (3,)}, "bad_words holds 3"),
        ({"bad_words": "text"}, r"bad_words is 'text' \(str\)"),
        ({"min_tokens": 1.5}, r"min_tokens is 1.5 \(float\)"),
        ({"repetition_penalty": "1"}, r"repetition_penalty is '1' \(str\)"),
    ],
)
def test_processors_out_of_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)


def test_biases_and_words_may_come_as_mappings_and_lists():
    sampling = SamplingConfig(logit_bias={3: 1.5, 4: -2.0}, bad_words=[[1, 2], [3]])  # type: ignore[arg-type]
    assert (sampling.logit_bias, sampling.bad_words) == (((3, 1.5), (4, -2.0)), ((1, 2), (3,)))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rule": "best"}, "rule is 'best'; it must be one of match, target_only, rejection, threshold"),
        ({"draft_noise": "own"}, "draft_noise is 'own'; it must be one of none, shared"),
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"threshold": 1.5}, "threshold is 1.5"),
        *(
            (
                {"draft_noise": "shared", "draft_sharpness": value},
                "draft_sharpness is .*; it must be between 0.01 and 100",
            )
            for value in (0.0, -1.0, 1e308, math.inf, math.nan)
        ),
        ({"threshold": "0.5"}, r"threshold is '0.5' \(str\); it must be a number"),
    ],
)
def test_rules_that_do_not_exist(settings, message):
    with pytest.raises(ConfigError, match=message):
        RuleConfig(**settings)


@pytest.mark.parametrize("temperature", [1e-45, 9e-5])
def test_temperatures_too_small_to_divide_by(temperature):
    with pytest.raises(ConfigError, match=r"0 \(greedy\) or a finite number of at least 0.0001"):
        SamplingConfig(temperature)
    SamplingConfig(1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        *({"slots": 0}, {"page_size": 0}, {"max_tokens": 0}, {"head_pages": 0}),
        *({"slots": 2.5}, {"slots": True}, {"slots": None}, {"pages": "9"}, {"prefill_rows": 1.0}),
        *({"graphs": "on"}, {"graphs": True}, {"graphs": None}),
    ],
)
def test_engine_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_numpys_numbers_are_numbers():
    three: Any = np.int64(3)
    half: Any = np.float32(0.5)
    assert EngineConfig(slots=three).slots == 3
    assert SamplingConfig(half, logit_bias=((three, half),)) == SamplingConfig(0.5, logit_bias=((3, 0.5),))
    assert TreeConfig(three, 2) == TreeConfig(3, 2)


def test_chain_is_a_tree():
    assert TreeConfig.chain(5) == TreeConfig(5, 1, 5)


@pytest.mark.parametrize("vocab, narrow", [(100, (3, 8, 20)), (8, (3, 8, 20)), (3, (3, 3, 20)), (1, (3, 1, 3))])
def test_a_tree_is_no_wider_than_the_draft_vocabulary(vocab, narrow):
    assert TreeConfig(3, 8, 20).narrowed(vocab) == TreeConfig(*narrow)


def test_settings_import_no_torch():
    code = "import sys, eagle3_infer.config, eagle3_infer.request; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
