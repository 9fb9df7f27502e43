"""The controller's decisions one by one: what pick, deepen, speculate and the bookkeeping do with given numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_infer.adaptive import Controller
from eagle3_infer.config import TreeConfig
from eagle3_infer.costs import CostModel, row_tiers

VERIFY = {1: 22.5e-3, 8: 28e-3, 16: 31e-3, 32: 40e-3}


def controller(depth=4, top_k=4, nodes=None, verify=VERIFY, first=2e-3, level=1.6e-3, max_rows=None) -> Controller:
    tree = TreeConfig(depth, top_k, nodes, adaptive=True)  # type: ignore[arg-type]
    return Controller(tree, CostModel(verify, {1: first}, {4: level}), max_rows=max_rows)


def drafting(useful=(100,), **settings) -> Controller:
    made = controller(**settings)
    assert made.speculate(useful, pending=len(useful))
    return made


def log(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def limits(made: Controller, *scores: torch.Tensor) -> list[int]:
    return made.pick(scores).tolist()


# pick


def test_pick_takes_what_pays():
    """A row costs 0.79 ms and a token is worth 22.5 ms: 0.05 pays and 0.02 does not, as far as the tiers allow."""
    assert limits(drafting(), log([0.5, 0.05, 0.02, 0.01])) == [2]
    assert limits(drafting(), log([0.5, 0.2, 0.15, 0.1])) == [4]


def test_pick_of_hopeless_drafts_is_a_bare_root():
    assert limits(drafting(), log([0.01, 0.01, 0.01, 0.0])) == [0]


def test_slots_compete_for_the_rows():
    """The sure slot gets them; one that is about to end gets none."""
    made = drafting(useful=(9, 9, 0), top_k=4)
    assert limits(made, log([0.9, 0.05, 0.01, 0.01], [0.02, 0.01, 0.01, 0.0], [0.9, 0.9, 0.9, 0.9])) == [1, 0, 0]


def test_levels_that_are_of_no_use_get_no_nodes():
    first, second = log([0.9, 0.1], [0.9, 0.1]), log([0.8, 0.1, 0.09, 0.01], [0.8, 0.1, 0.09, 0.01])
    made = drafting(useful=(1, 2), top_k=2, verify={1: 1.0, 9: 1.01})
    assert limits(made, first, second) == [2, 6]


def test_pick_never_passes_nodes_or_memory():
    scores = log([0.9] * 4, [0.8] * 4), log([0.7] * 16, [0.6] * 16)
    free = {1: 1.0, 99: 1.001}
    assert limits(drafting((9, 9), nodes=6, verify=free), *scores) == [6, 6]
    assert sum(limits(drafting((9, 9), verify=free, max_rows=13), *scores)) == 11
    assert limits(drafting((9, 9), verify=free, max_rows=1), *scores) == [0, 0]


def test_padding_is_no_candidate():
    assert limits(drafting(verify={1: 1.0, 99: 1.001}), log([0.5, 0.1, 0.0, 0.0])) == [2]


def test_scores_that_are_not_numbers_are_an_error():
    with pytest.raises(FloatingPointError, match="not finite"):
        drafting().pick([torch.tensor([[-1.0, math.nan]])])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 10), st.integers(0, 10**6))
def test_pick_is_the_best_of_all_tiers(slots, nodes, seed):
    """Against every allotment of a tier's rows to slots, best nodes first in each."""
    p = np.random.default_rng(seed).dirichlet(np.ones(4), slots) ** 2
    made = drafting([9] * slots, depth=1, top_k=4, nodes=min(nodes, 4))
    got = made.pick([torch.tensor(p).log()]).numpy()
    price, best = slots / made.cost.plain(slots), -np.sort(-p, 1)[:, : min(nodes, 4)]

    def value(limit: np.ndarray) -> float:
        kept = np.arange(best.shape[1]) < limit[:, None]
        return (best * kept).sum() - price * made.cost.verify(slots + int(limit.sum()))

    tiers = {*row_tiers(100), slots, slots + best.size}
    every = np.array(list(np.ndindex(*[best.shape[1] + 1] * slots)))
    allowed = [limit for limit in every if slots + limit.sum() in tiers]
    assert value(got) == pytest.approx(max(map(value, allowed)), abs=1e-6)


# deepen


def test_depth_ends_where_the_tree_or_its_use_does():
    sure = [log([0.99, 0.001]), log([0.98, 0.001, 0.0, 0.0])]
    assert not drafting(depth=2, top_k=2).deepen(sure)
    assert not drafting(useful=(2,), depth=4, top_k=2).deepen(sure)
    assert drafting(useful=(3,), depth=4, top_k=2).deepen(sure)


def seen(second: float, **settings) -> Controller:
    """A controller that has seen second levels whose best child is accepted with this probability."""
    made = drafting(top_k=2, **settings)
    made.pick([log([0.9, 0.05]), log([0.9 * second, 0.01, 0.05 * second, 0.0])])
    return made


def test_deepens_where_more_is_promised_than_it_costs():
    sure, unsure = [log([0.9, 0.05])], [log([0.05, 0.02])]
    assert seen(0.8).deepen(sure)
    assert not seen(0.8).deepen(unsure)
    assert not seen(0.02).deepen(sure)
    assert not seen(0.8, level=60e-3).deepen(sure)


def test_a_level_that_is_not_drafted_is_thought_of_like_the_one_above():
    """What was learned of it fades, so that it is tried again."""
    made = seen(0.02)
    rounds = 0
    while not made.deepen([log([0.9, 0.05])]):
        made.pick([log([0.9, 0.05])])
        rounds += 1
    assert 3 < rounds < 100


# bookkeeping


def test_walks_teach_the_children_of_visited_nodes():
    """Root with children 1, 2; 2 with child 3; 1 with child 4. The walk takes 2 and 3, and sees nothing of 4."""
    made, told = controller(), []
    made.calibration.observe = lambda *what: told.append(what)  # type: ignore[method-assign]
    made.walked([-1, 0, 0, 2, 1], [0.0, -0.1, -0.2, -0.3, -0.4], [0, 2, 3])
    made.walked([-1, 0, 0], [0.0, -0.1, -0.2], [0])
    made.walked([-1], [0.0], [0])
    assert told == [(1, [-0.1, -0.2], 1), (2, [-0.3], 0), (1, [-0.1, -0.2], -1)]


def play(made: Controller, rounds: int, accepted: int = 1, verify: float | None = None, prompts: bool = False):
    """Rounds of a chain of one on one slot, which cost what is expected of them; whether each drafted."""
    drafted, cost = [], made.cost
    for _ in range(rounds):
        was = drafted[-1] if drafted else False
        drafted.append(made.speculate([100], pending=1))
        if drafted[-1]:
            made.pick([log([0.6])])
        seconds = verify or cost.verify(1 + was)
        made.finished(1 + accepted * was, seconds, cost.first(1) * drafted[-1], rest=1e-4, prompts=prompts)
    return drafted


@pytest.mark.parametrize("prompts", [False, True])
def test_useless_drafts_end_in_plain_rounds(prompts):
    """Also where prompts are read in every step."""
    drafted = play(controller(top_k=1, first=8e-3), 100, accepted=0, prompts=prompts)
    assert drafted[0]
    assert drafted.count(True) < 20


def test_one_stall_stops_nothing():
    made = controller(top_k=1)
    play(made, 100)
    play(made, 1, verify=5.0)
    assert sum(play(made, 50)) >= 48


def test_steps_that_read_prompts_teach_no_seconds():
    made = controller(top_k=1)
    play(made, 50, verify=5.0, prompts=True)
    assert [made.cost.verify(rows) for rows in VERIFY] == pytest.approx(list(VERIFY.values()))


def test_each_size_of_batch_has_its_own_gate():
    """A new size starts as its neighbour stands, and then goes its own way."""
    made = controller(top_k=1, first=8e-3)
    play(made, 100, accepted=0)
    assert not made.speculate([9] * 8, pending=8)
    made.gates[(8).bit_length()].drafting = True
    assert made.speculate([9] * 9, pending=9)
    assert not made.speculate([9], pending=1)


def test_nobody_has_use_for_a_draft():
    assert not controller().speculate([0, 0], pending=2)
