"""The rules of one node: hand-computed and degenerate laws, choices by coins and noise.

That they keep the target's law is enumerated in oracles/test_rules.py.
"""

import pytest
import torch

from eagle3_kernels.sample_nodes import Purpose, uniforms, vocabulary_gumbel
from eagle3_kernels.verify_tree.rules import NodeLaw, decide, sequential_law, threshold_choice
from oracles.exact import emitted


def law(*weights: float) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


def one_hot(x: int, vocab: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(x), vocab).double()


def test_one_child_is_leviathans_rule():
    p, q = law(5, 3, 2), law(2, 6, 2)
    assert sequential_law(p, [1], q).accept.tolist() == pytest.approx([0.5])
    assert sequential_law(p, [1], q).residual.tolist() == pytest.approx([1, 0, 0])
    # p above q is always accepted
    assert sequential_law(p, [0], q).accept.tolist() == [1]


def test_second_sibling_meets_the_residual_and_a_draft_without_the_first():
    """p = .5 .3 .2, q = .1 .6 .3: after x = 1, p_2 = 1 0 0 and q_2 = .25 0 .75."""
    both = sequential_law(law(5, 3, 2), [1, 2], law(1, 6, 3))
    assert both.accept.tolist() == pytest.approx([0.5, 0])
    assert both.residual.tolist() == pytest.approx([1, 0, 0])
    other = sequential_law(law(5, 3, 2), [1, 0], law(4, 5, 1))
    # p_2 = (.1, 0, .1) / .2, q_2 = (.8, 0, .2)
    assert other.accept.tolist() == pytest.approx([0.6, 0.625])
    assert other.residual.tolist() == pytest.approx([0, 0, 1])


def test_target_only_is_the_same_rule_with_the_draft_all_on_the_child():
    p = law(5, 3, 0, 2)
    for x in range(4):
        ours, same = sequential_law(p, [x]), sequential_law(p, [x], one_hot(x, 4))
        assert ours.accept.tolist() == same.accept.tolist()
        assert ours.residual.tolist() == same.residual.tolist()
    assert sequential_law(p, [1, 0]).accept.tolist() == pytest.approx([0.3, 5 / 7])


def test_duplicates_and_impossible_children_change_nothing():
    p, q = law(5, 3, 2, 0), law(1, 4, 5, 0)
    for extra in (None, q):
        plain = sequential_law(p, [1, 2], extra)
        padded = sequential_law(p, [1, 3, 1, 2, 2], extra)
        assert padded.accept[[0, 3]].tolist() == plain.accept.tolist()
        assert padded.accept[[1, 2, 4]].tolist() == [0, 0, 0]
        assert padded.residual.tolist() == plain.residual.tolist()


def test_no_children_leave_the_target_as_it_is():
    assert sequential_law(law(1, 3), []).residual.tolist() == [0.25, 0.75]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_left_all_is_accepted_and_finite(dtype):
    """p = q, p all on one token, and a draft that runs out of tokens."""
    p, sure = law(1, 2, 3).to(dtype), one_hot(1, 3).to(dtype)
    for node, accept in (
        (sequential_law(p, [2, 0], p), [1, 0]),
        (sequential_law(sure, [1, 0]), [1, 0]),
        (sequential_law(sure, [0, 1, 2]), [0, 1, 0]),
        (sequential_law(p, [1, 0], sure), [1 / 3, 0]),
    ):
        assert node.accept.tolist() == pytest.approx(accept)
        assert node.residual.isfinite().all()
        assert float(node.residual.sum()) == pytest.approx(1)


@pytest.mark.parametrize("spread", [0.0, 3.0, 30.0])
def test_float32_over_a_whole_vocabulary_keeps_the_law(spread):
    """Flat, usual and saturated laws of 50,000 tokens; the children are the draft's own draws and the target's best."""
    draw = torch.Generator().manual_seed(int(spread))
    p, q = (torch.randn(2, 50_000, generator=draw, dtype=torch.float64) * spread).softmax(-1)
    sampled = q.multinomial(4, generator=draw).tolist()
    for draft, children in ((q, sampled), (None, [*sampled, *p.topk(3).indices.tolist()])):
        exact, ours = (
            sequential_law(p.to(dtype), children, None if draft is None else draft.to(dtype))
            for dtype in (torch.float64, torch.float32)
        )
        assert ours.accept.isfinite().all()
        assert float((emitted(ours) - emitted(exact)).abs().max()) < 1e-6


def test_the_first_coin_below_accepts():
    node = NodeLaw(torch.tensor([0.3, 0.0, 1.0]), torch.tensor([0.0, 1.0]), [7, 8, 9])
    quiet = torch.zeros(2)
    assert decide(node, torch.tensor([0.29, 0.0, 0.0]), quiet) == (0, 7)
    # a probability of 0 accepts no coin, one of 1 accepts all
    assert decide(node, torch.tensor([0.3, 0.0, 1 - 2**-24]), quiet) == (2, 9)


def test_the_residual_is_drawn_where_all_are_rejected():
    node = NodeLaw(torch.tensor([0.5]), torch.tensor([0.0, 0.25, 0.5, 0.25]), [0])
    coin = torch.tensor([0.5])
    assert decide(node, coin, torch.zeros(4)) == (-1, 2)
    # noise decides among what has mass, and equals go to the lowest id
    assert decide(node, coin, torch.tensor([99.0, 1.0, 0.0, 2.0])) == (-1, 3)
    tied = node._replace(residual=torch.tensor([0.0, 0.25, 0.25, 0.5]))
    assert decide(tied, coin, torch.tensor([0.0, 5.0, 5.0, 0.0])) == (-1, 1)
    assert decide(NodeLaw(torch.tensor([]), torch.tensor([0.0, 1.0]), []), torch.tensor([]), torch.zeros(2)) == (-1, 1)


@pytest.mark.parametrize("draft", [None, law(1, 3, 4, 2)])
def test_decisions_with_keyed_noise_follow_the_law(draft):
    """6000 positions: each outcome's count within five standard deviations (7 outcomes: 4e-6 by chance)."""
    node = sequential_law(law(4, 2, 1, 3), [2, 1, 0], draft)
    runs, counts = 6000, {}
    for position in range(runs):
        coins = uniforms(3, Purpose.ACCEPT, position, 3, "cpu")
        noise = vocabulary_gumbel(3, Purpose.RESIDUAL, position, 4, torch.device("cpu"))
        outcome = decide(node, coins, noise)
        counts[outcome] = counts.get(outcome, 0) + 1
    left, expected = 1.0, {}
    for index, (x, accept) in enumerate(zip(node.children, node.accept.tolist(), strict=True)):
        expected[index, x] = left * accept
        left *= 1 - accept
    expected |= {(-1, x): left * share for x, share in enumerate(node.residual.tolist())}
    assert set(counts) <= {outcome for outcome, share in expected.items() if share > 0}
    for outcome, share in expected.items():
        assert abs(counts.get(outcome, 0) - runs * share) <= 5 * (runs * share * (1 - share)) ** 0.5


def test_threshold_takes_the_most_likely_child_that_reaches_it():
    p = law(1, 4, 4, 1)
    assert threshold_choice(p, [0, 2, 1], 0.4) == 1
    assert threshold_choice(p, [0, 2, 1], 0.41) == -1
    assert threshold_choice(p, [3], 0.05) == 0
    assert threshold_choice(p, [], 0.05) == -1
