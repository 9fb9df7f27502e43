"""The untimed pass of `--html`: a run's first replies once more, by every mode that drafts, with all their trees."""

from collections.abc import Sequence

from eagle3_infer.bench import Bench, Turn
from eagle3_infer.config import NO_GRAPHS, EngineConfig
from eagle3_infer.engine import Engine
from eagle3_infer.replies import Told, Words, tell_reply
from eagle3_infer.settings import ModePlan
from eagle3_infer.trace import Trace, trace

CUT_SHORT = (
    "The run was interrupted: where a reply was not decoded once more, its rounds are shown without their trees."
)
ADAPTS = (
    "Trees of {}: this pass learns anew what pays, so that they may differ from those that were timed; scores of whole "
    "paths are learned chances of acceptance."
)

# by mode, then by place in the list of turns
Traces = dict[str, dict[int, Trace]]


def trace_replies(bench: Bench) -> Told:
    """The first `html_replies` turns that were measured, as every mode answered them.

    Requests, seeds and rules are the run's own. After an interrupt nothing is decoded again; one that comes meanwhile
    ends the pass, keeps what is there and counts as the bench's.
    """
    turns = bench.turns[: bench.settings.html_replies]
    measured = {mode.key: {output.place: output for output in mode.outputs} for mode in bench.modes}
    plans = [plan for plan in bench.plans if plan.tree is not None and measured[plan.key]]
    traces: Traces = {plan.key: {} for plan in plans}
    words = Words(bench.tokenizer)
    told = Told(words=words.known)
    if not bench.interrupted:
        _trace_all(bench, plans, turns, traces)
        told.notes += [ADAPTS.format(plan.key) for plan in plans if plan.tree and plan.tree.adaptive]
    if bench.interrupted:
        told.notes.append(CUT_SHORT)
    for at, turn in enumerate(turns):
        outputs = [found for by_place in measured.values() if (found := by_place.get((turn.prompt.id, turn.turn)))]
        if outputs:
            known = {key: replies[at] for key, replies in traces.items() if at in replies}
            told.replies.append(tell_reply(outputs, known, turn.prompt.turns[turn.turn], words))
    return told


def _trace_all(bench: Bench, plans: Sequence[ModePlan], turns: Sequence[Turn], traces: Traces) -> None:
    try:
        for plan in plans:
            bench.progress.show(f"{plan.key}: {len(turns)} replies once more, for their trees")
            for at, reply in trace(_engine(bench, plan, len(turns)), [turn.request for turn in turns]):
                traces[plan.key][at] = reply
    except KeyboardInterrupt:
        bench.interrupted = True
    finally:
        bench.progress.clear()


def _engine(bench: Bench, plan: ModePlan, requests: int) -> Engine:
    settings = bench.settings
    config = EngineConfig(min(settings.batch, requests), prefill_rows=settings.prefill_rows, graphs=NO_GRAPHS)
    return Engine(bench.target, bench.head, plan.tree, config, plan.rule)
