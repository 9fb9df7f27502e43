"""The controller's decisions one by one: what pick, deepen, speculate and the bookkeeping do with given numbers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_infer.adaptive import Controller
from eagle3_infer.calibration import EdgeKind
from eagle3_infer.config import TreeConfig
from eagle3_infer.costs import CostModel, row_tiers
from eagle3_infer.gate import CREDIT, INTEREST, Gate

VERIFY = {1: 22.5e-3, 8: 28e-3, 16: 31e-3, 32: 40e-3}


def controller(depth=4, top_k=4, nodes=None, verify=VERIFY, first=2e-3, level=1.6e-3, max_rows=None) -> Controller:
    tree = TreeConfig(depth, top_k, nodes, adaptive=True)  # type: ignore[arg-type]
    return Controller(tree, CostModel(verify, {1: first}, {4: level}), max_rows=max_rows)


def drafting(useful=(100,), **settings) -> Controller:
    made = controller(**settings)
    assert made.speculate(useful, pending=len(useful))
    return made


def reading() -> Controller:
    """One whose head takes 0.06 ms per row that it reads."""
    return Controller(TreeConfig(adaptive=True), CostModel(VERIFY, {1: 2e-3, 64: 6e-3}, {4: 1.6e-3}))


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


@pytest.mark.parametrize("max_rows", [None, 1])
def test_scores_that_are_not_numbers_reach_the_tree(max_rows):
    """Who builds it knows the dtype and raises: such a slot gets a node even where nothing else pays or fits."""
    first = torch.tensor([[-9.0, -9.0], [-9.0, math.nan], [-9.0, -9.0]])
    second = torch.tensor([[-20.0] * 4, [-9.0, math.nan] * 2, [-20.0, -20.0, math.nan, -20.0]])
    made = drafting((9, 9, 1), top_k=2, max_rows=max_rows)
    made.deepen([first])
    # the third slot has no use for its second level, so nobody will see it
    limit = limits(made, first, second)
    assert limit[0] == 0 and limit[1] >= 1 and limit[2] == 0
    # the controller outlives the run that raises
    made.speculate((9, 9, 9), pending=3)
    assert made.deepen([log([0.9, 0.05], [0.9, 0.05], [0.9, 0.05])]) == (max_rows is None)


def test_the_bound_of_memory_may_change():
    made = controller(verify={1: 1.0, 99: 1.001})
    for most, nodes in ((None, 4), (3, 2), (1, 0), (4, 3)):
        made.max_rows = most
        made.speculate([9], pending=1)
        assert limits(made, log([0.9] * 4)) == [nodes]


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


def test_what_was_never_drafted_is_tried():
    assert drafting(top_k=2).deepen([log([0.99, 0.001])])


def seen(second: float, **settings) -> Controller:
    """A controller that has seen second levels whose best child is accepted with this probability."""
    made = drafting(top_k=2, **settings)
    made.pick([log([0.9, 0.05]), log([0.9 * second, 0.01, 0.05 * second, 0.0])])
    made.speculate([100], pending=1)
    return made


def test_a_level_is_copied_to_the_host_once():
    """What `deepen` has seen is not looked at again by the next one or by `pick`."""
    first, second = log([0.9, 0.05]), log([0.7, 0.01, 0.04, 0.0])
    fresh, again = seen(0.8), seen(0.8)
    expected = limits(fresh, first, second)
    again.deepen([first])
    again.deepen([torch.zeros(0), second])
    assert limits(again, torch.zeros(0), torch.zeros(0)) == expected


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
        made.speculate([100], pending=1)
        rounds += 1
        assert rounds < 1000
    assert 3 < rounds < 100


# bookkeeping


def test_walks_teach_the_children_of_visited_nodes():
    """Root with children 1, 2; 2 with child 3; 1 with child 4. The walk takes 2 and 3, and sees nothing of 4."""
    made, told = controller(), []
    made.calibrations[EdgeKind.LOG_Q].observe = lambda *what: told.append(what)  # type: ignore[method-assign]
    made.walked([-1, 0, 0, 2, 1], [0.0, -0.1, -0.2, -0.3, -0.4], [0, 2, 3])
    made.walked([-1, 0, 0], [0.0, -0.1, -0.2], [0])
    made.walked([-1], [0.0], [0])
    assert told == [(1, [-0.1, -0.2], 1), (2, [-0.3], 0), (1, [-0.1, -0.2], -1)]


def test_kinds_of_edge_scores_are_learned_apart():
    """A mixed batch: greedy slots whose drafts fail, sampled ones whose drafts hold; each is weighed as its own."""
    made = controller()
    for _ in range(50):
        made.walked([-1, 0], [0.0, -0.5], [0], EdgeKind.LOG_Q)
        made.walked([-1, 0], [0.0, -0.5], [0, 1], EdgeKind.RANK)
    edges = torch.full((3, 1, 2), -0.5)
    kinds = [EdgeKind.RANK, EdgeKind.LOG_Q, EdgeKind.SHARED]
    sampled, greedy, shared = made.weigh(edges, 1, kinds).exp()[:, 0, 0].tolist()
    assert greedy < 0.2 and sampled > 0.8
    assert shared == pytest.approx(math.exp(-0.5))
    for kind, alone in zip(kinds, (sampled, greedy, shared), strict=True):
        assert made.weigh(edges, 1, [kind] * 3).exp().flatten().tolist() == pytest.approx([alone] * 6)
    torch.testing.assert_close(made.weigh(edges, 1), made.weigh(edges, 1, [EdgeKind.LOG_Q] * 3))


def test_every_kind_is_forgotten_with_time():
    made = controller()
    made.walked([-1, 0], [0.0, -0.5], [0], EdgeKind.SHARED)
    for _ in range(1500):
        made.finished(1, 1.0, 0.0, 0.0)
    edges = torch.tensor([[-0.5]])
    torch.testing.assert_close(made.weigh(edges, 1, [EdgeKind.SHARED]), edges, atol=1e-4, rtol=0)


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
    made.gates[(8).bit_length()].drafting, made.credit.rounds = True, 1.0
    assert made.speculate([9] * 9, pending=9)
    assert not made.speculate([9], pending=1)


def test_what_plain_rounds_left_is_paid_whoever_reads_it():
    """The gate of 8 is plain, that of 7 never stopped; 5000 rows cost more than there is to lose."""
    made = reading()
    assert made.speculate([9] * 7, pending=7)
    made.gates[(8).bit_length()] = Gate(made.credit, drafting=False)
    for _ in range(3):
        made.speculate([9] * 8, pending=5000)
        made.finished(8, 28e-3, 0.0, 0.0)
    assert not made.speculate([9] * 7, pending=5000)
    made.credit.rounds = 30.0
    assert made.speculate([9] * 7, pending=5000)
    assert made.credit.rounds == pytest.approx(30 - 11, abs=1)


def test_prompts_are_no_way_back():
    """The first draft reads them, also those that join after a plain round; what that round left is paid."""
    made = reading()
    assert made.speculate([9], pending=10**5)
    made.finished(0, 0.0, 0.0, 0.0, prompts=True)
    made.gates[1].drafting = False
    assert not made.speculate([9], pending=3)
    made.finished(1, 22.5e-3, 2e-3, 0.0)
    made.gates[1].drafting = True
    assert made.speculate([9], pending=10**5)
    made.finished(1, 22.5e-3, 2e-3, 0.0)
    assert made.credit.rounds == pytest.approx(CREDIT + 2 * INTEREST, abs=0.3)


def test_a_round_that_nobody_had_use_for_leaves_nothing():
    """Its sequences end; the prompt that joins is read for free."""
    made = reading()
    assert not made.speculate([0], pending=3000)
    made.finished(1, 22.5e-3, 0.0, 0.0)
    assert made.speculate([9], pending=10**5)


def test_nobody_has_use_for_a_draft():
    assert not controller().speculate([0, 0], pending=2)
