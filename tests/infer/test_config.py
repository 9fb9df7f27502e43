"""Engine settings: ranges are checked when given, and the error prints them."""

import subprocess
import sys

import pytest

from eagle3.errors import ConfigError
from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig


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
    ],
)
def test_trees_out_of_range_print_the_range(settings, message):
    with pytest.raises(ConfigError, match=message):
        TreeConfig(**settings)


@pytest.mark.parametrize(
    "settings", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_sampling_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingConfig(**settings)


@pytest.mark.parametrize("temperature", [1e-45, 9e-5])
def test_temperatures_too_small_to_divide_by(temperature):
    with pytest.raises(ConfigError, match=r"0 \(greedy\) or a finite number of at least 0.0001"):
        SamplingConfig(temperature)
    SamplingConfig(1e-4)


@pytest.mark.parametrize("settings", [{"slots": 0}, {"page_size": 0}, {"max_tokens": 0}, {"head_pages": 0}])
def test_engine_settings_out_of_range(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_chain_is_a_tree():
    assert TreeConfig.chain(5) == TreeConfig(5, 1, 5)


@pytest.mark.parametrize("vocab, narrow", [(100, (3, 8, 20)), (8, (3, 8, 20)), (3, (3, 3, 20)), (1, (3, 1, 3))])
def test_a_tree_is_no_wider_than_the_draft_vocabulary(vocab, narrow):
    assert TreeConfig(3, 8, 20).narrowed(vocab) == TreeConfig(*narrow)


def test_settings_import_no_torch():
    code = "import sys, eagle3_infer.config, eagle3_infer.request; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
