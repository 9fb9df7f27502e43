"""Speculation pays its way: a useless head costs a bounded share, a good one is let back in."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_infer.gate import CHECK_EVERY, CREDIT, INTEREST, LAST_WAIT, Credit, Gate


def run(gate: Gate, rounds: int, took: float, gave: float, promised: float | None = None, row: float = 0.0):
    """Rounds on one slot; a buffered token costs `row` plain rounds to catch up on. Loss, and whether each drafted."""
    loss, pending, drafted = 0.0, 1, []
    for _ in range(rounds):
        catch_up = 0.0 if not drafted or drafted[-1] else row * pending
        drafted.append(gate.decide(catch_up))
        if drafted[-1]:
            loss += took - gave + catch_up
            gate.drafted_round(took, gave, (took, gave if promised is None else promised))
        else:
            gate.plain_round()
        pending = 1 if drafted[-1] else pending + 1
    return loss, drafted


@pytest.mark.parametrize("rounds", [50, 300, 3000])
@pytest.mark.parametrize("row", [0.0, 0.005, 0.1])
@pytest.mark.parametrize("took, promised", [(1.04, 1.0), (1.3, 1.2), (1.6, 3.0), (2.5, 4.0)])
def test_a_useless_head_costs_a_bounded_share(took, promised, row, rounds):
    """Even if its scores go on promising, and whatever it costs to come back."""
    loss, _ = run(Gate(), rounds, took, 1.0, promised, row)
    assert loss <= CREDIT + INTEREST * rounds + took - 1 + row


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(1, 3), st.integers(1, 5), st.floats(1, 5), st.floats(0, 2)), max_size=300))
def test_no_head_costs_more(rounds):
    gate, loss = Gate(), 0.0
    for n, (took, gave, promised, catch_up) in enumerate(rounds):
        if gate.decide(catch_up):
            loss += took - gave + catch_up
            gate.drafted_round(took, gave, (took, promised))
        else:
            gate.plain_round()
        assert loss <= CREDIT + INTEREST * (n + 1) + 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(1, 3), st.integers(1, 4), st.floats(1, 5), st.floats(0, 2)), max_size=150
    )
)
def test_gates_that_share_a_credit_lose_no_more_together(rounds):
    """However the batch changes, and whatever each change leaves to be read."""
    credit, loss = Credit(), 0.0
    gates = [Gate(credit) for _ in range(4)]
    for n, (size, took, gave, promised, catch_up) in enumerate(rounds):
        gate = gates[size]
        if gate.decide(catch_up):
            loss += took - gave + catch_up
            gate.drafted_round(took, gave, (took, promised))
        else:
            gate.plain_round()
        assert loss <= CREDIT + INTEREST * (n + 1) + 2


def test_a_drafting_gate_pays_for_catching_up_too():
    """What another gate's plain rounds left; where the credit does not cover it, it waits."""
    gate = Gate()
    assert not gate.decide(catch_up=CREDIT + 0.1)
    assert gate.decide(catch_up=CREDIT - 0.1)
    assert not gate.decide(catch_up=0.2)
    assert gate.decide(catch_up=0.0)


def test_plain_rounds_are_not_checked_while_prompts_wait_for_the_head():
    gate = Gate(unchecked=CHECK_EVERY)
    assert gate.decide(0.0, joining=True)
    assert not gate.decide(0.0)


def test_waits_double_up_to_the_last():
    gate, waits = Gate(), []
    for _ in range(6000):
        was, idle = gate.drafting, gate.idle
        if gate.decide(0.0):
            assert was or idle >= gate.wait
            gate.drafted_round(1.8, 1.0, (1.8, 1.0))
            waits += [] if gate.drafting else [gate.wait]
        else:
            gate.plain_round()
    assert waits[:6] == [8, 16, 32, 64, 128, 256]
    assert set(waits[6:]) == {LAST_WAIT}


@pytest.mark.parametrize("took, gave", [(1.4, 1.5), (1.5, 3.0)])
def test_a_head_that_pays_is_never_stopped(took, gave):
    """But for the rounds that check what plain costs, where little is gained."""
    _, drafted = run(Gate(), 1000, took, gave)
    checks = drafted.count(False)
    assert checks == (0 if gave / took > 1.3 else pytest.approx(1000 / CHECK_EVERY, abs=2))
    assert not any(a is False and b is False for a, b in pairwise(drafted))


@pytest.mark.parametrize("useless", [60, 500, 3000])
def test_comes_back_when_the_head_becomes_useful(useless):
    gate = Gate()
    run(gate, useless, 1.8, 1.0)
    assert not gate.drafting
    _, drafted = run(gate, 400, 1.6, 2.8, row=0.003)
    assert drafted.index(True) <= LAST_WAIT
    assert all(drafted[drafted.index(True) :])
    assert gate.proven and gate.wait == 8


def test_stops_soon_when_a_good_head_turns():
    gate = Gate()
    run(gate, 500, 1.6, 2.8)
    loss, drafted = run(gate, 200, 1.6, 1.0, promised=2.8)
    assert drafted.index(False) < 40
    assert loss < 25


def test_a_way_back_that_is_too_dear_is_not_taken():
    gate = Gate()
    run(gate, 100, 1.8, 1.0)
    assert not any(gate.decide(catch_up=1000.0) or gate.plain_round() for _ in range(500))
    assert gate.decide(catch_up=0.0)
