"""The trainer's simulated tau against the engine's own counts: equal, exactly, in fp32.

Whatever training and serving do differently (positions, features after a rejection, the next root, masks, the end of
a reply) shows here as a round more or less.
"""

import pytest

from eagle3_infer.config import EngineConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_train.evaluate import walk
from oracles.invariants import shifted_target
from oracles.overfit import greedy, mapped_head, overfit, packed, simulate
from oracles.tiny import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
# depth of the chain, which is the number of steps simulated: fewer, as many and more than were trained
DEPTHS = (1, 4, 6)
OPTIONS = {
    "default": {},
    "two_layers": {"num_layers": 2},
    "eagle31": {"fc_norm": True, "norm_output": True},
    "windowed": {"sliding_window": 6, "qk_norm": True},
    "own_embedding": {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
}


def run_engine(target, head, prompts, replies, depth, slots=1, eos=()):
    requests = [
        Request(prompt, max_new_tokens=len(reply), prompt_id=i, eos_ids=eos)
        for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
    results = Engine(target, head, TreeConfig.chain(depth), EngineConfig(slots=slots)).generate(requests)
    assert [r.token_ids for r in results] == replies, "the simulation needs the replies that the engine gives"
    return results


def hit_tables(inputs, output):
    """[steps, R] of every reply, in order."""
    supervision = inputs.supervision
    hits = (output.prediction == supervision.tokens) & supervision.counted
    spans = inputs.batch.span_ids[supervision.rows + 1]
    return [hits[:, spans == span] for span in spans.unique()]


def check(target, head, prompts, replies, depth, slots=1):
    results = run_engine(target, head, prompts, replies, depth, slots)
    tally, inputs, output = simulate(target, head, packed(prompts, replies), depth)
    runs = [walk(table) for table in hit_tables(inputs, output)]
    assert [r.run_lengths for r in results] == runs
    assert tally.rounds == sum(r.rounds for r in results)
    assert tally.emitted == sum(sum(r.run_lengths) for r in results)
    assert tally.accepted == by_level([r.accepted_by_level for r in results], depth)
    # a round near a reply's end drafts no deeper than it can emit
    left = [sum(run[i:]) - 1 for run in runs for i in range(len(run))]
    offered = [sum(n > level for n in left) for level in range(depth)]
    assert by_level([r.offered_by_level for r in results], depth) == offered
    return tally


def by_level(counts, depth):
    """Sum of lists that may stop early."""
    return [sum(count[level] for count in counts if level < len(count)) for level in range(depth)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_overfit_head(family, depth):
    """A head that is right often, so that rounds of every length occur."""
    known = overfit(family)
    tally = check(known.target, known.head, known.prompts, known.replies, depth)
    assert tally.tau > (1.3 if depth == 1 else 1.8)


@pytest.mark.full
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "gemma2"}))
def test_overfit_head_of_every_family(family, depth):
    known = overfit(family)
    check(known.target, known.head, known.prompts, known.replies, depth)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(v, id=k, marks=[pytest.mark.full] if k in ("default", "windowed") else [])
        for k, v in OPTIONS.items()
    ],
)
def test_head_options(options):
    """An option that the rollout and the engine's drafter read differently."""
    known = overfit("qwen3", prompts=3, optimizer_steps=50, **options)
    assert check(known.target, known.head, known.prompts, known.replies, 4).tau > 1.5


def test_small_vocabulary():
    """Tokens that cannot be drafted end a run in both, and count as rounds of one."""
    known = overfit("llama", draft_vocab_size=40, optimizer_steps=50)
    tally = check(known.target, known.head, known.prompts, known.replies, 4)
    assert tally.rates()["coverage"] < 0.8
    assert tally.tau > 1.2


def test_several_slots():
    """Counts that depend on who shares the batch."""
    known = overfit("llama")
    check(known.target, known.head, known.prompts, known.replies, 4, slots=3)


def test_untrained_head():
    """Rounds of one token throughout."""
    target = shifted_target("qwen2")
    prompts = [[5, 9, 200, 31, 7], [8, 8, 1]]
    replies = [greedy(target, prompt, 24) for prompt in prompts]
    check(target, mapped_head(target, packed(prompts, replies), 50), prompts, replies, 3)


def test_replies_that_end_by_eos():
    """The end of turn is drafted, supervised and counted like any token; nothing after it is."""
    known = overfit("llama")
    eos = known.replies[0][20]
    ends = [reply.index(eos) + 1 if eos in reply else len(reply) for reply in known.replies]
    replies = [reply[:end] for reply, end in zip(known.replies, ends, strict=True)]
    assert any(end < len(reply) for end, reply in zip(ends, known.replies, strict=True))
    results = run_engine(known.target, known.head, known.prompts, replies, 4, eos=(eos,))
    tally, inputs, output = simulate(known.target, known.head, packed(known.prompts, replies), 4)
    assert [r.run_lengths for r in results] == [walk(table) for table in hit_tables(inputs, output)]
    assert tally.tau == sum(sum(r.run_lengths) for r in results) / sum(r.rounds for r in results)
