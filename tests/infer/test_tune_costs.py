"""What a round takes beside its forwards, at the batch that will run: by a clock that only what is named here moves."""

from collections.abc import Callable

import pytest

from eagle3_infer import metrics
from eagle3_infer.config import EngineConfig, RuleConfig, TreeConfig
from eagle3_infer.drafter import Drafter
from eagle3_infer.engine import Engine, Request
from eagle3_infer.scheduler import Scheduler
from eagle3_infer.tune_costs import ROUNDS, round_costs, time_rest
from eagle3_infer.tune_counts import wide_engine
from eagle3_infer.verifier import Verifier
from oracles.overfit import overfit
from oracles.tiny import tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
MOST = TreeConfig(3, 2, 8)


class Clock:
    """Stage clocks show its seconds; what is made slow moves them with every call."""

    def __init__(self, monkeypatch):
        self.seconds, self.calls, self._patch = 0.0, {}, monkeypatch.setattr
        self._patch(metrics, "now", lambda device: self.seconds)

    def slow(self, owner, name, seconds: float | Callable[[int], float]):
        whole = getattr(owner, name)

        def slowly(*args, **kwargs):
            self.calls[name] = self.calls.get(name, 0) + 1
            self.seconds += seconds(self.calls[name]) if callable(seconds) else seconds
            return whole(*args, **kwargs)

        self._patch(owner, name, slowly)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def requests_of(known, **given):
    return [Request(prompt, prompt_id=number, **given) for number, prompt in enumerate(known.prompts[:3])]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_fixed_cost_of_a_round_is_a_rounds_whatever_the_batch(clock, slots):
    """Building the tree counts, forwards do not; plain rounds have no tree to build. Replies of a token will do."""
    known = overfit("llama")
    clock.slow(Verifier, "accept", 0.02)
    clock.slow(Drafter, "build", 0.03)
    clock.slow(Scheduler, "chunks", 0.004)
    clock.slow(Verifier, "forward", 5.0)
    clock.slow(Drafter, "levels", 7.0)
    engine = wide_engine(known.target, known.head, MOST, RuleConfig(), 7)
    cost = round_costs(engine, MOST, slots, requests_of(known, max_new_tokens=1))
    assert cost.rest(slots, drafted=True) == pytest.approx(0.054)
    assert cost.rest(slots, drafted=False) == pytest.approx(0.024)
    assert clock.calls["accept"] >= 2 * ROUNDS
    assert all(cost.verify(rows) <= cost.verify(2 * rows) for rows in (1, 2, 4, 8))


def test_a_stall_is_no_cost(clock):
    known = overfit("llama")
    stalls = {1: 70.0, 4: 50.0, 7: 90.0}
    clock.slow(Verifier, "accept", lambda call: stalls.get(call, 0.01))
    engine = Engine(known.target, known.head, MOST, EngineConfig(2))
    assert time_rest(engine, requests_of(known, max_new_tokens=40)) == pytest.approx(0.01)


def test_without_positions_for_rounds_nothing_is_known():
    target = tiny_target("llama", max_position_embeddings=32)
    requests = [Request([1] * 31, max_new_tokens=1)]
    assert time_rest(Engine(target), requests) is None
