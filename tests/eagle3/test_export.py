"""Heads as serving engines load them: their layer numbers and keys, our own loader's view, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from eagle3.attention import DenseCausal
from eagle3.checkpoint.export import ENGINES, Launch, export_head
from eagle3.checkpoint.reference import load_head
from eagle3.config import HeadOptions
from eagle3.errors import CheckpointError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import build_vocab_map, identity_map

WIDE = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
# engine -> what its format carries beside a plain head
CARRIED: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {"num_layers": 3, "norm_output": True, "capture_layers": (0, 2, 3, 5, 7)}),
    ("vllm", {"fc_norm": True, "norm_before_residual": True, "sliding_window": 9}),
    ("vllm", WIDE),
    ("vllm", {"capture_layers": (7,)}),
    ("sglang", {"fc_norm": True, "norm_output": True, "capture_layers": (0, 7)}),
    ("sglang", WIDE),
    ("tensorrt-llm", {"capture_layers": (0, 7)}),
    *((engine, {}) for engine in ENGINES),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((engine, {"qk_norm": True}, "head.qk_norm") for engine in ENGINES),
    *((engine, {"attention_bias": True}, "head.attention_bias") for engine in ENGINES),
    *((engine, {"norm_before_residual": True}, "norm_before_residual") for engine in ("sglang", "tensorrt-llm")),
    *((engine, {"num_layers": 2}, r"head.num_layers \(2\)") for engine in ("sglang", "tensorrt-llm")),
    *((engine, {"sliding_window": 9}, r"head.sliding_window \(9\)") for engine in ("sglang", "tensorrt-llm")),
    *((engine, {"capture_layers": (7,)}, "as wide as the head") for engine in ("sglang", "tensorrt-llm")),
    ("tensorrt-llm", {"fc_norm": True}, "head.fc_norm"),
    ("tensorrt-llm", {"norm_output": True}, "head.norm_output"),
    ("tensorrt-llm", WIDE, r"head.hidden_size \(32, the target's is 64\)"),
    ("vllm", {"qk_norm": True, "attention_bias": True}, "head.qk_norm .*; head.attention_bias"),
    ("vllm", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}, "3 attention heads"),
]


@pytest.fixture(scope="module")
def target(build) -> Target:
    return Target(build("llama", num_hidden_layers=8))


def make_head(target: Target, draft_vocab_size: int = 100, **options: Any) -> Eagle3Head:
    """A head with every weight off its default, and a map that is not monotonous in its offsets."""
    counts = torch.randint(1, 99, (300,), generator=torch.Generator().manual_seed(0))
    vocab_map = identity_map(300) if draft_vocab_size == 300 else build_vocab_map(counts, draft_vocab_size, [5], 300)
    head = Eagle3Head.for_target(target, vocab_map, HeadOptions(**options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return head.requires_grad_(False)


def write(tmp_path: Path, head: Eagle3Head, engine: str) -> Path:
    return export_head(head, engine, Launch(str(tmp_path / "out"), "TARGET", 3), torch.float32)


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(head: Eagle3Head, target: Target) -> torch.Tensor:
    ids = torch.arange(9)
    feature = torch.randn(9, head.config.feature_size, generator=torch.Generator().manual_seed(2))
    h = head.step(head.start(feature), head.embed(ids, target), ids, DenseCausal([9]))
    return head.logits(h)


@pytest.mark.parametrize("engine, options", CARRIED)
def test_our_loader_reads_it(tmp_path, target, engine, options):
    head = make_head(target, **options)
    loaded = load_head(write(tmp_path, head, engine), target)
    assert loaded.config == head.config
    assert torch.equal(logits(loaded, target), logits(head, target))
    assert torch.equal(loaded.d2t, head.d2t)


@pytest.mark.parametrize("engine, options, words", REFUSED)
def test_refused_by_name(tmp_path, target, engine, options, words):
    with pytest.raises(CheckpointError, match=words):
        write(tmp_path, make_head(target, **options), engine)
    assert not list(tmp_path.iterdir())


def test_layer_numbers(tmp_path, target):
    """The three conventions: vLLM counts the layers before the stream, the others name the layer whose output it is."""
    head = make_head(target, capture_layers=(0, 3, 6))
    folders = {engine: write(tmp_path / engine, head, engine) for engine in ENGINES}
    told = {engine: content(folder).get("eagle_config") for engine, folder in folders.items()}
    key = "eagle_aux_hidden_state_layer_ids"
    assert told["vllm"] == {key: [1, 4, 7], "use_aux_hidden_state": True}
    assert told["sglang"] == {key: [0, 3, 6], "use_aux_hidden_state": True}
    assert told["tensorrt-llm"] is None
    settings = (folders["tensorrt-llm"] / "speculative.yaml").read_text()
    assert "eagle3_layers_to_capture: [0, 3, 6]" in settings
    assert f'speculative_model: "{folders["tensorrt-llm"]}"' in settings


@pytest.mark.parametrize("engine", ENGINES)
def test_transformers_reads_the_config(tmp_path, target, engine):
    """Engines get the config through transformers; without our block it tells them the same angles and sizes."""
    head = make_head(target)
    read: Any = transformers.AutoConfig.from_pretrained(write(tmp_path, head, engine))
    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert {k: read.rope_parameters[k] for k in head.config.rope_parameters} == head.config.rope_parameters
    assert (read.draft_vocab_size, read.vocab_size, read.head_dim) == (100, 300, head.config.head_dim)
    assert (read.rms_norm_eps, read.tie_word_embeddings) == (head.config.rms_norm_eps, False)


def test_scaled_angles_for_old_and_new_transformers(tmp_path, build):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e3,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    head = make_head(Target(build("llama", num_hidden_layers=8, rope_parameters=rope)))
    folder = write(tmp_path, head, "sglang")
    told = content(folder)
    assert told["rope_theta"] == 5e3
    assert told["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    assert transformers.AutoConfig.from_pretrained(folder).rope_parameters == rope


@pytest.mark.parametrize(
    "engine, rope, words",
    [
        ("sglang", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, "rope_type 'yarn'"),
        ("sglang", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor of rope_type"),
        ("vllm", {"rope_type": "dynamic", "factor": 4.0}, "rope_type 'dynamic'"),
        ("tensorrt-llm", {"rope_type": "linear", "factor": 4.0}, "rope_type 'linear'"),
    ],
)
def test_angles_refused(engine, rope, words, target):
    config = dataclasses.replace(make_head(target).config, rope_parameters={"rope_theta": 1e4, **rope})
    with pytest.raises(CheckpointError, match=words):
        ENGINES[engine].check(config)


def test_whole_vocabulary_needs_no_map(tmp_path, target):
    """vLLM refuses a map where draft and target vocabulary are one."""
    folder = write(tmp_path, make_head(target, draft_vocab_size=300), "vllm")
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
    assert load_head(folder, target).draft_vocab_size == 300


@pytest.mark.parametrize("engine", ENGINES)
def test_whole_vocabulary_in_another_order(tmp_path, target, engine):
    """A map that permutes is legal, and engines get none: the rows are then in the target's order."""
    head = make_head(target, draft_vocab_size=300)
    ids = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    head.d2t.copy_(ids - torch.arange(300))
    folder = write(tmp_path, head, engine)
    assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()
    loaded = load_head(folder, target)
    assert torch.equal(loaded.to_target(torch.arange(300)), torch.arange(300))
    assert torch.equal(logits(loaded, target)[:, ids], logits(head, target))


@pytest.mark.parametrize("kind", ["file", "folder", "head"])
def test_nothing_is_overwritten(tmp_path, target, kind):
    head, out = make_head(target), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
    else:
        write(tmp_path, head, "sglang")
    before = [path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()]
    with pytest.raises(CheckpointError, match="exists; it is not overwritten"):
        write(tmp_path, head, "vllm")
    assert [path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()] == before
