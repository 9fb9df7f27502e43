"""What rounds cost on this machine at the batch that will run: forwards by rows, and all that is done beside them."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice, pairwise
from statistics import median

from eagle3_infer.config import NO_GRAPHS, EngineConfig, TreeConfig
from eagle3_infer.cost_probe import measure_costs
from eagle3_infer.costs import CostModel
from eagle3_infer.engine import Engine
from eagle3_infer.parts import PARTS
from eagle3_infer.request import Request

# whose time beside verification and drafting is taken
ROUNDS = 8
# what has read prompts is no round; a step's seconds are booked with the next one
_UNTIMED = 2


def round_costs(engine: Engine, most: TreeConfig, slots: int, requests: Sequence[Request]) -> CostModel:
    """Measure forwards of any rows, and run some rounds with the largest trees and some without any.

    Args:
        engine: a `wide_engine`.
        slots: requests that will run at once.
        requests: one or more, such as will run.
    """
    assert engine.drafter is not None
    cost = measure_costs(engine.drafter, engine.scheduler.layouts, slots, slots * (most.nodes + 1))
    config = EngineConfig(slots, prefill_rows=engine.scheduler.config.prefill_rows, graphs=NO_GRAPHS)
    drafting = Engine(engine.target, engine.drafter.head, most, config, engine.verifier.rule)
    plain = Engine(engine.target, config=config)
    for each in (drafting, plain):
        rest = time_rest(each, requests)
        if rest is not None:
            cost.observe_round(slots, slots, each is drafting, verify=cost.verify(slots), rest=rest)
    return cost


def time_rest(engine: Engine, requests: Sequence[Request]) -> float | None:
    """Median seconds of a round beside verification and drafting, while all slots run: what `Controller` calls rest.

    Returns:
        None where the target has no positions for some rounds.
    """
    totals: list[float] = []
    with closing(engine.stream(_lasting(engine, requests))) as updates:
        for number, _, result in updates:
            if result is not None or len(totals) == ROUNDS + _UNTIMED:
                break
            # once a round
            if number == 0 and len(engine.running) == engine.scheduler.config.slots:
                totals.append(sum(s.metrics.seconds[stage] for s in engine.running for stage in PARTS["rest"]))
    rounds = [after - before for before, after in pairwise(totals[1:])]
    return median(rounds) if rounds else None


def _lasting(engine: Engine, requests: Sequence[Request]) -> list[Request]:
    """One for each slot, which goes on for as many rounds as are wanted, however many drafts are accepted."""
    config, depth = engine.scheduler.config, engine.drafter.tree.depth if engine.drafter else 0
    chosen = list(islice(cycle(requests), config.slots))
    reading = sum(len(request.prompt_ids) for request in chosen) // config.prefill_rows + 1
    tokens = (reading + ROUNDS + _UNTIMED + 1) * (depth + 1)
    return [
        replace(
            request,
            max_new_tokens=min(tokens, engine.target.max_positions - len(request.prompt_ids)),
            eos_ids=(),
            stop=(),
        )
        for request in chosen
    ]
