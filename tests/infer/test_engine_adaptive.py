"""The engine under a controller: whatever it decides, the tokens stay and both pools stay true."""

import random

import pytest
import torch

from eagle3_infer.adaptive import Controller
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.invariants import CheckedEngine
from oracles.overfit import overfit

AUTO = TreeConfig(depth=4, top_k=3, nodes=12, adaptive=True)
NEW = 40


class Whim(Controller):
    """Decides by dice: plain stretches with backlogs, any depth, any number of nodes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dice, self.plain_rounds, self.caught_up = random.Random(4), 0, 0

    def speculate(self, useful, pending):
        super().speculate(useful, pending)
        drafts = self.dice.random() < 0.4 and max(useful) > 0
        self.plain_rounds += not drafts
        self.caught_up = max(self.caught_up, pending if drafts else 0)
        return drafts

    def deepen(self, scores):
        return self.dice.random() < 0.7

    def pick(self, scores):
        super().pick(scores)
        return torch.tensor([self.dice.randint(0, self.tree.nodes) for _ in range(len(scores[0]))])


@pytest.fixture
def whims(monkeypatch) -> list[Whim]:
    made: list[Whim] = []

    def make(*args, **kwargs):
        made.append(Whim(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("eagle3_infer.engine.Controller", make)
    return made


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_decisions_change_no_token(family, temperature, whims):
    """Plain rounds keep features, a later round reads them in pieces of seven; slots have trees of all sizes."""
    known = overfit(family)
    requests = [
        Request(known.prompts[i % 4], SamplingConfig(temperature, seed=3), max_new_tokens=NEW, prompt_id=i)
        for i in range(6)
    ]
    expected = [r.token_ids for r in Engine(known.target).generate(requests)]
    engine = CheckedEngine(known.target, known.head, AUTO, EngineConfig(slots=3, page_size=8, prefill_rows=7))
    assert [r.token_ids for r in engine.generate(requests)] == expected
    [whim] = whims
    assert whim.plain_rounds > 10
    # more rows than a step of one round commits: a backlog was read
    assert whim.caught_up > 7


@pytest.mark.parametrize("rule", ["target_only", "rejection", "threshold"])
def test_other_rules_run_under_a_controller(rule):
    known = overfit("llama")
    requests = [
        Request(known.prompts[0], SamplingConfig(t, seed=3), max_new_tokens=NEW, prompt_id=i)
        for i, t in enumerate((0.0, 0.9, 1.0))
    ]
    engine = CheckedEngine(known.target, known.head, AUTO, EngineConfig(slots=2), RuleConfig(rule))
    assert [len(r.token_ids) for r in engine.generate(requests)] == [NEW] * 3


def test_a_controller_is_made_once_and_keeps_what_it_learned():
    known = overfit("llama")
    engine = Engine(known.target, known.head, AUTO)
    assert engine.controller is None
    request = Request(known.prompts[0], max_new_tokens=NEW)
    first = engine.generate_one(request)
    controller = engine.controller
    assert controller is not None
    rows = [controller.cost.verify(n) for n in (1, 2, 4, 8, 13)]
    assert rows[0] > 0
    assert rows == sorted(rows)
    assert engine.generate_one(request).token_ids == first.token_ids
    assert engine.controller is controller


def test_free_memory_bounds_the_rows(monkeypatch):
    """With room for four rows in all, no forward has more, whatever they promise."""
    known = overfit("llama")
    row = known.target.vocab_size * 8 + known.head.feature_size * 4
    monkeypatch.setattr("eagle3_infer.engine.free_bytes", lambda device: 5 * row)
    engine = Engine(known.target, known.head, AUTO)
    result = engine.generate_one(Request(known.prompts[0], max_new_tokens=NEW))
    assert engine.controller is not None
    assert engine.controller.max_rows == 4
    assert result.token_ids == known.replies[0][:NEW]
    assert result.nodes <= 3 * result.rounds


def test_without_a_figure_for_memory_nothing_is_bounded(monkeypatch):
    known = overfit("llama")
    monkeypatch.setattr("eagle3_infer.engine.free_bytes", lambda device: None)
    engine = Engine(known.target, known.head, AUTO)
    engine.prepare([Request(known.prompts[0])])
    assert engine.controller is not None
    assert engine.controller.max_rows is None
