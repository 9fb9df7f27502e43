"""The engine under a controller: whatever it decides, the match rule's tokens stay and both pools stay true."""

import copy

import pytest
import torch

from eagle3.errors import Eagle3Error
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.invariants import CheckedEngine, Whim, lower, random_head, whimsical
from oracles.overfit import overfit
from oracles.tiny import tiny_model

AUTO = TreeConfig(depth=4, top_k=3, nodes=12, adaptive=True)
NEW = 40


@pytest.fixture
def whims(monkeypatch) -> list[Whim]:
    return whimsical(monkeypatch)


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


def test_the_bound_holds_while_costs_are_measured_and_is_asked_again(monkeypatch):
    known = overfit("llama")
    row, seen = known.target.vocab_size * 8 + known.head.feature_size * 4, []
    plain = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, hidden: seen.append(len(hidden)) or plain(self, hidden))
    monkeypatch.setattr("eagle3_infer.engine.free_bytes", lambda device: 5 * row)
    engine = Engine(known.target, known.head, AUTO)
    engine.prepare([Request(known.prompts[0])])
    assert engine.controller is not None
    assert (max(seen), engine.controller.max_rows) == (4, 4)
    monkeypatch.setattr("eagle3_infer.engine.free_bytes", lambda device: None)
    engine.prepare([Request(known.prompts[0])])
    assert engine.controller.max_rows == AUTO.nodes + 1


def test_a_long_backlog_is_read_in_a_plain_round(monkeypatch):
    """Memory, not speed, ends a plain stretch's buffering; nobody else's rows are kept alive by it."""
    [known, kept] = overfit("llama"), []
    monkeypatch.setattr("eagle3_infer.drafter.MOST_BACKLOG", 16)
    monkeypatch.setattr(Whim, "speculate", lambda self, useful, pending: False)
    whimsical(monkeypatch)

    class Watching(CheckedEngine):
        def step(self, waiting):
            touched = super().step(waiting)
            for sequence in self.running:
                kept.append(sequence.unread)
                for part in sequence.backlog:
                    assert part.untyped_storage().nbytes() == part.nbytes
            return touched

    requests = [Request(known.prompts[i], max_new_tokens=NEW, prompt_id=i) for i in range(2)]
    results = Watching(known.target, known.head, AUTO, EngineConfig(slots=2)).generate(requests)
    assert [r.token_ids for r in results] == [reply[:NEW] for reply in known.replies[:2]]
    assert max(kept) == 16
    assert kept.count(0) >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_is_not_finite_names_the_dtype(dtype):
    target = Target(lower(tiny_model("llama"), dtype))
    head = random_head(target).to(dtype)
    head.lm_head.weight[3, 0] = torch.nan
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(Eagle3Error, match=f"head's logits are not finite in {name}"):
        Engine(target, head, AUTO).generate_one(Request([1, 2, 3], max_new_tokens=8))


def test_a_small_chunk_of_prompts_does_not_cut_a_rounds_read(monkeypatch):
    """Four slots commit more rows per round than prompts are read in: the head still steps once over them."""
    known = overfit("llama")
    head, steps = copy.copy(known.head), []

    def step(h, *args, **kwargs):
        steps.append(len(h))
        return Eagle3Head.step(head, h, *args, **kwargs)

    head.step = step
    requests = [Request(known.prompts[i], max_new_tokens=NEW, prompt_id=i) for i in range(4)]
    counts = []
    for rows in (2, 64):
        engine = Engine(known.target, head, TreeConfig.chain(1), EngineConfig(slots=4, prefill_rows=rows))
        engine.prepare(requests)
        steps.clear()
        results = engine.generate(requests)
        # a chain of one needs no step but the first
        counts.append(len(steps) - max(r.rounds for r in results))
    prompt_rows = sum(len(r.prompt_ids) for r in requests)
    assert counts[0] <= prompt_rows // 2 + 4
    assert counts[1] <= 4
