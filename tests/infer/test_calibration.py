"""Acceptance is learned from scores: the prior is the score, the order stays, old rounds fade."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_infer.calibration import CENTRES, Calibration, rising

EDGES = torch.tensor([-200.0, -30.0, -9.0, -3.0, -1.2, -0.7, -0.3, -0.1, -0.02, -0.004, 0.0])


def taught(ratio: float, rounds: int = 1000, level: int = 1, seed: int = 0) -> Calibration:
    """Three children per round, each accepted `ratio` times as often as its score says."""
    calibration, random = Calibration(), np.random.default_rng(seed)
    for _ in range(rounds):
        best = random.uniform(0.2, 0.9)
        q = np.array([best, (1 - best) * 0.6, (1 - best) * 0.3])
        accepted = int(np.searchsorted((ratio * q).cumsum(), random.uniform()))
        calibration.observe(level, np.log(q).tolist(), accepted if accepted < 3 else -1)
        calibration.forget()
    return calibration


@pytest.mark.parametrize("level", [1, 2, 3, 9])
def test_prior_is_the_score(level):
    torch.testing.assert_close(Calibration().log_acceptance(EDGES, level), EDGES)


def test_shape_and_impossible_children_stay():
    edges = torch.tensor([[[-1.0, -torch.inf], [-torch.inf, -3e38]]])
    out = taught(0.3).log_acceptance(edges, 1)
    assert out.shape == edges.shape
    assert (out.isinf() == edges.isinf()).all()


@pytest.mark.parametrize("ratio, error", [(1.0, 0.2), (0.5, 0.28), (0.1, 0.78)])
def test_learns_what_a_score_is_worth(ratio, error):
    """Three standard errors of the 128 rounds that count (0.93 promised in each), and the prior's two drafts."""
    learned = taught(ratio).log_acceptance(EDGES, 1)
    seen = (EDGES > -2) & (EDGES < -0.08)
    assert (learned - EDGES)[seen].exp().mean().item() == pytest.approx(ratio, rel=error)


def test_underconfident_heads_gain_but_never_pass_one():
    calibration = Calibration()
    for _ in range(100):
        calibration.observe(1, [-1.0], 0)
    learned = calibration.log_acceptance(EDGES, 1)
    assert learned[4:6].gt(math.log(0.7)).all()
    assert learned.le(0).all()


def test_levels_are_counted_apart_and_start_from_the_level_above():
    calibration = taught(0.2)
    near = torch.tensor([-0.7])
    first, second = (calibration.log_acceptance(near, level) for level in (1, 2))
    torch.testing.assert_close(second, first, atol=0.25, rtol=0)
    for _ in range(200):
        calibration.observe(3, [-0.7], 0)
    assert calibration.log_acceptance(near, 5) > second + 0.5
    torch.testing.assert_close(calibration.log_acceptance(near, 1), first)


def test_adapts_within_some_hundred_rounds():
    calibration = taught(1.0)
    for _ in range(200):
        calibration.observe(1, [-0.3], -1)
        calibration.forget()
    assert calibration.log_acceptance(torch.tensor([-0.3]), 1) < math.log(0.25)


def test_is_not_noisy():
    """Five heads of one quality: the ratio of a common score stays within 15 % of their mean's."""
    learned = [taught(0.6, seed=seed).log_acceptance(torch.tensor([-0.5]), 1).exp().item() for seed in range(5)]
    assert max(learned) / min(learned) < 1.5
    assert np.mean(learned) == pytest.approx(0.6 * math.exp(-0.5), rel=0.15)


def test_forgets_what_is_no_longer_seen():
    calibration = taught(0.1)
    for _ in range(1500):
        calibration.forget()
    torch.testing.assert_close(calibration.log_acceptance(EDGES, 1), EDGES, atol=1e-3, rtol=1e-3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.floats(-20, 0), min_size=1, max_size=4), st.booleans()), max_size=60
    )
)
def test_siblings_keep_their_order(visits):
    """Whatever was counted: the table is <= 0, finite and rises with the score."""
    calibration = Calibration()
    for level, edges, accepted in visits:
        calibration.observe(level, edges, 0 if accepted else -1)
    scores = torch.cat([torch.linspace(-15, 0, 400), torch.tensor(CENTRES)]).sort().values
    for level in (1, 2, 3):
        out = calibration.log_acceptance(scores, level)
        assert out.le(0).all() and out.isfinite().all()
        steps, below = out.diff(), out[1:] < 0
        assert (steps[below & (scores.diff() > 1e-3)] > 0).all()
        assert (steps >= -1e-6).all()


def test_pooling_is_weighted():
    """3 then 1 fall: they meet at their weighted mean; 0 before and 5 after stay."""
    got = rising(np.array([0.0, 3.0, 1.0, 5.0]), np.array([1.0, 1.0, 3.0, 1.0]))
    np.testing.assert_allclose(got, [0, 1.5, 1.5, 5])
