"""Seconds by rows: read between figures, follow what rounds take, shrug off stalls."""

import numpy as np
import pytest

from eagle3_infer.costs import CostModel, RowCost, largest_rows, measure, row_tiers

VERIFY = {1: 20.0, 2: 22.0, 4: 24.0, 8: 32.0}


def test_row_tiers():
    assert row_tiers(70) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert row_tiers(3) == [1, 2, 3]


@pytest.mark.parametrize("rows, seconds", [(1, 20), (3, 23), (6, 28), (8, 32), (16, 48), (108, 232)])
def test_linear_between_and_beyond(rows, seconds):
    cost = RowCost(VERIFY)
    assert cost(rows) == pytest.approx(seconds)
    assert cost.at(np.array([rows]))[0] == pytest.approx(seconds)


def test_more_rows_never_cost_less():
    cost = RowCost({1: 20.0, 2: 18.0, 4: 30.0, 8: 29.0})
    seconds = cost.at(np.arange(1, 40))
    assert (np.diff(seconds) >= 0).all()
    # two equal figures at the end promise no free rows
    assert cost(16) > cost(8) + 5


def test_observations_move_their_figure_and_its_kin_less():
    cost = RowCost(VERIFY)
    for _ in range(200):
        cost.observe(4, 30.0)
    assert cost(4) == pytest.approx(30, rel=0.01)
    moved = [cost(rows) / VERIFY[rows] for rows in (1, 2, 4, 8)]
    assert moved[2] > moved[1] > moved[0] > 1.05


def test_stalls_leave_little_behind():
    """One round in twenty takes ten times as long."""
    random = np.random.default_rng(0)
    cost, seen = RowCost(VERIFY), []
    for _ in range(600):
        cost.observe(4, 24 * random.lognormal(0, 0.02) * (10 if random.random() < 0.05 else 1))
        seen.append(cost(4))
    assert np.mean(seen[100:]) == pytest.approx(24, rel=0.03)
    assert max(seen[100:]) < 24 * 1.1


def test_rows_far_from_every_figure_get_their_own():
    cost = RowCost(VERIFY)
    for _ in range(200):
        cost.observe(256, 1000.0)
    assert cost(256) == pytest.approx(1000, rel=0.02)
    assert (np.diff(cost.at(np.arange(1, 600))) >= 0).all()


def test_nothing_measured_is_learned():
    cost = RowCost({})
    assert cost(5) == 0
    cost.observe(3, 0.5)
    assert cost(1) == cost(30) == pytest.approx(0.5)


def test_draft_seconds_are_shared_as_predicted():
    cost = CostModel({1: 20.0}, {1: 2.0}, {4: 1.0})
    assert cost.draft(rows=1, frontier=4, levels=4) == 5
    for _ in range(200):
        cost.observe_draft(1, 4, 4, seconds=10.0)
    assert (cost.first(1), cost.level(4)) == (pytest.approx(4, rel=0.01), pytest.approx(2, rel=0.01))


def test_rest_of_the_other_kind_stands_in():
    cost = CostModel({1: 20.0}, {1: 2.0}, {4: 1.0})
    cost.observe_round(8, 1, drafted=True, verify=30.0, rest=3.0)
    assert cost.rest(1, drafted=False) == pytest.approx(3)
    cost.observe_round(1, 1, drafted=False, verify=20.0, rest=1.0)
    assert [cost.rest(1, drafted) for drafted in (True, False)] == pytest.approx([3, 1])
    assert cost.plain(1) == pytest.approx(cost.verify(1) + 1)


def test_measuring_warms_up_and_takes_the_median():
    now, calls, takes = [0.0], [], iter([9.0, 1.0, 7.0, 2.0, 9.0, 3.0, 3.0, 4.0])

    def run(rows: int) -> None:
        calls.append(rows)
        now[0] += next(takes)

    assert measure(run, (1, 4), repeats=3, clock=lambda: now[0]) == {1: 2.0, 4: 3.0}
    assert calls == [1] * 4 + [4] * 4


@pytest.mark.parametrize("free, rows", [(1000, 90), (10, 1), (0, 1)])
def test_largest_rows(free, rows):
    assert largest_rows(free, bytes_per_row=10) == rows
