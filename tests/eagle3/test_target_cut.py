"""Targets cut to their first layer: what offline training asks of them, and what they refuse."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from eagle3.attention import DenseCausal
from eagle3.capture import Capture
from eagle3.config import HeadOptions
from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.heads.eagle3 import Eagle3Head, head_config
from eagle3.loading import weights_digest
from eagle3.target import Target
from eagle3.vocab import identity_map
from oracles.tiny import FAMILIES, tiny_folder, tiny_model

# Gemma 4 without the embeddings per layer of its smallest models
CUTTABLE = {
    **{name: {} for name in (*FAMILIES, "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "mimo_v2_flash")},
    "gemma4": {"hidden_size_per_layer_input": 0},
}


def written(folder, family: str, **changes):
    tiny_model(family, **changes).save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def pair(tmp_path):
    whole = Target.load(tiny_folder(tmp_path / "model"))
    return whole, Target.load(tmp_path / "model", layers=1)


@pytest.mark.parametrize("family", CUTTABLE)
@torch.no_grad()
def test_cut_equals_whole(tmp_path, family):
    """Catches: rows, scales, caps or a description other than the whole target's."""
    folder = written(tmp_path, family, **CUTTABLE[family])
    whole, cut = Target.load(folder, tokenizer=False), Target.load(folder, tokenizer=False, layers=1)
    assert len(whole.layers) == 8
    assert len(cut.layers) == 1
    ids, hidden = torch.arange(40), torch.randn(40, whole.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cut.embed(ids), whole.embed(ids))
    assert torch.equal(cut.logits(hidden), whole.logits(hidden))
    assert torch.equal(cut.logits_of(ids)(hidden), whole.logits_of(ids)(hidden))
    for name in ("num_layers", "hidden_size", "vocab_size", "max_positions", "fingerprint", "dtype"):
        assert getattr(cut, name) == getattr(whole, name), name
    options = HeadOptions(capture_layers=(1, 3, 7))
    assert head_config(cut, 64, options) == head_config(whole, 64, options)
    assert cut.text_config.to_dict() == whole.text_config.to_dict()


def test_tokenizer_and_eos(pair):
    """Catches: an offline run that renders chats otherwise than an online one."""
    whole, cut = pair
    assert (cut.eos_ids, cut.usable_vocab, cut.path) == (whole.eos_ids, whole.usable_vocab, whole.path)


def test_a_head_starts_as_with_the_whole_target(pair):
    """Catches: an initial head (lm_head rows, final norm, rope check) that depends on how the target was loaded."""
    heads = [
        Eagle3Head.for_target(target, identity_map(target.vocab_size), HeadOptions(capture_layers=(1, 3, 7)), 0)
        for target in pair
    ]
    ours, theirs = (head.state_dict() for head in heads)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_running_is_refused(pair):
    """Catches: features, teachers or replies of a one-layer model."""
    _, cut = pair
    ids = torch.arange(8)
    for run in (
        lambda: cut.hidden(ids, ids, DenseCausal([8])),
        lambda: cut.check_teacher(ids, ids),
        lambda: Capture(cut, (0,), 8),
        lambda: cut.stock().__enter__(),
    ):
        with pytest.raises(ConfigError, match=r"need all 8 decoder layers .*; 1 were loaded"):
            run()


@pytest.mark.parametrize("layers, loaded", [(3, 3), (8, 8), (99, 8)])
def test_any_number_of_layers(tmp_path, layers, loaded):
    """Catches: a target of one layer, whole already, that is refused; a count that is not honoured."""
    target = Target.load(tiny_folder(tmp_path), layers=layers)
    assert (len(target.layers), target.num_layers) == (loaded, 8)


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    """Catches: a 70B checkpoint passing through memory on its way to one layer."""
    read, materialize = [], core_model_loading.spawn_materialize

    def spy(pool, tensor, *args, **kwargs):
        read.append(tensor.get_shape())
        return materialize(pool, tensor, *args, **kwargs)

    monkeypatch.setattr(core_model_loading, "spawn_materialize", spy)
    cut = Target.load(written(tmp_path, "llama"), tokenizer=False, layers=1)
    assert sorted(read) == sorted(list(p.shape) for p in cut.model.parameters())


@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_embeddings_per_layer_are_refused(tmp_path, family):
    """Catches: a matrix over all layers that is cut wrongly, or a shape error without a word on what to do."""
    with pytest.raises(UnsupportedTargetError, match=r"cannot be cut to 1 of its 8 layers.*per_layer.*use online"):
        Target.load(written(tmp_path, family), tokenizer=False, layers=1)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_weights_stay_errors(tmp_path, name):
    """Catches: a cut that excuses every difference between file and model."""
    folder = tiny_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        Target.load(folder, layers=1)


def test_a_first_layer_of_another_kind_is_refused(tmp_path):
    """Catches: weights of the first layer that the cut model does not know."""
    folder = tiny_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.extra.weight"] = torch.ones(3)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedTargetError, match=r"left out are of layers \[0, 1, 2"):
        Target.load(folder, layers=1)


def test_unused_weights_are_not_reported(tmp_path, caplog):
    """Catches: transformers' table of hundreds of unused weights at each start of an offline run."""
    logger = transformers.utils.logging.get_logger("transformers.modeling_utils")
    level = logger.level
    transformers.utils.logging.enable_propagation()
    Target.load(tiny_folder(tmp_path), layers=1)
    transformers.utils.logging.disable_propagation()
    assert "UNEXPECTED" not in caplog.text
    assert logger.level == level


def test_digest_of_all_files(tmp_path):
    """Catches: layers that a cut target never reads, and that differ."""
    folder = written(tmp_path, "llama")
    before = weights_digest(str(folder))
    assert weights_digest(str(folder)) == before
    path = next(
        p for p in sorted(folder.glob("*.safetensors")) if "model.layers.5.mlp.down_proj.weight" in load_file(p)
    )
    tensors = load_file(path)
    tensors["model.layers.5.mlp.down_proj.weight"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert weights_digest(str(folder)) != before
    assert (
        Target.load(folder, tokenizer=False).fingerprint == Target.load(folder, tokenizer=False, layers=1).fingerprint
    )


def test_digest_without_files(tmp_path):
    assert weights_digest(str(tmp_path)) is None
    assert weights_digest("nobody/nothing") is None
