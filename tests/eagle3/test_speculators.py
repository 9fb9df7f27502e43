"""Checkpoints of vllm-project/speculators: the same head comes out, and what heads here lack is refused by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eagle3.checkpoint.reference import load_head, save_head
from eagle3.config import HeadOptions
from eagle3.errors import CheckpointError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import build_vocab_map


@pytest.fixture(scope="module")
def target(build) -> Target:
    return Target(build("llama", num_hidden_layers=8))


def foreign(folder: Path, head: Eagle3Head, **changes) -> Path:
    """`head` as speculators saves it: serving names, embedding beside, a config that holds differences only."""
    save_head(folder, head, torch.float32)
    state = load_file(folder / "model.safetensors")
    state = {k.replace("midlayer.", "layers.0."): v for k, v in state.items()}
    state["embed_tokens.weight"] = torch.zeros(head.config.vocab_size, head.config.hidden_size)
    save_file(state, folder / "model.safetensors")
    c = head.config
    shape = {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": c.rope_parameters,
    }
    kind = transformers.Qwen3Config if c.qk_norm else transformers.LlamaConfig
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": kind(**shape).to_diff_dict(),
        "draft_vocab_size": c.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in c.capture_layers],
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": False,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capture_layers": (0, 7)},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True},
        {"qk_norm": True},
    ],
)
def test_same_head_comes_out(tmp_path, target, options):
    counts = torch.randint(1, 99, (300,), generator=torch.Generator().manual_seed(0))
    head = Eagle3Head.for_target(target, build_vocab_map(counts, 100, [5], 300), HeadOptions(**options))
    loaded = load_head(foreign(tmp_path / "head", head), target, torch.float32)
    assert {**vars(loaded.config), "target_fingerprint": 0} == {**vars(head.config), "target_fingerprint": 0}
    assert all(torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), head.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"speculators_model_type": "dflash"}, "'dflash'"),
        ({"norm_before_fc": True}, "norm_before_fc"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 3]}, "id 0 is the embedding"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, "reads layers"),
        ({"transformer_layer_config": {"model_type": "gemma2"}}, "gemma2"),
        ({"transformer_layer_config": {}}, "transformer_layer_config"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_refused_by_name(tmp_path, target, changes, words):
    counts = torch.ones(300, dtype=torch.int64)
    head = Eagle3Head.for_target(target, build_vocab_map(counts, 100, [5], 300))
    with pytest.raises(CheckpointError, match=words):
        load_head(foreign(tmp_path / "head", head, **changes), target)


def test_window_of_all_layers(tmp_path, target):
    """speculators trains with a window of 2048 unless told otherwise."""
    counts = torch.ones(300, dtype=torch.int64)
    head = Eagle3Head.for_target(target, build_vocab_map(counts, 100, [5], 300))
    folder = foreign(tmp_path / "head", head)
    content = json.loads((folder / "config.json").read_text())
    content["transformer_layer_config"] |= {"sliding_window": 64, "layer_types": ["sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(content))
    assert load_head(folder, target).config.sliding_window == 64
