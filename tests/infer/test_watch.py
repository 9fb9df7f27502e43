"""Drafts watched round by round, against the engine's own counts."""

import math

import pytest

from eagle3_infer.config import EngineConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from eagle3_infer.watch import SLOTS, Round, Watched, tau, told, watch
from oracles.overfit import overfit

pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")


@pytest.mark.parametrize(
    "drafted, emitted, accepted",
    [([1, 2, 3], [1, 2, 9], 2), ([1, 2], [1, 2, 9], 2), ([1, 2], [9], 0), ([1, 2, 3], [1, 2], 2), ([], [9], 0)],
)
def test_accepted_by_hand(drafted, emitted, accepted):
    """A bonus token, a miss at once, an end of the reply within the drafts, no draft."""
    assert Round(drafted, emitted).accepted == accepted


@pytest.mark.parametrize("count", [1, 3, SLOTS + 3])
def test_rounds_add_up_to_what_the_engine_counts(count):
    """Drafts of another request, of the round before or after; requests that join and leave; replies cut at an end."""
    known = overfit("llama")
    prompts = [known.prompts[i % len(known.prompts)][i // len(known.prompts) :] for i in range(count)]
    eos = (known.replies[0][20],)
    requests = [Request(ids, max_new_tokens=9 + 5 * i, prompt_id=i, eos_ids=eos) for i, ids in enumerate(prompts)]
    watched = watch(known.target, known.head, 4, requests)
    alone = Engine(known.target, known.head, TreeConfig.chain(4), EngineConfig())
    for request, (result, rounds) in zip(requests, ((w.result, w.rounds) for w in watched), strict=True):
        assert result.token_ids == alone.generate_one(request).token_ids
        assert result.token_ids[1:] == [token for r in rounds for token in r.emitted]
        assert [len(r.emitted) for r in rounds] == result.run_lengths
        for level in range(4):
            offered = sum(len(r.drafted) > level for r in rounds)
            assert offered == (result.offered_by_level + [0] * 4)[level]
        # before a stop trims it, a round has accepted no less than it emits
        assert sum(r.accepted for r in rounds) <= sum(result.accepted_by_level)
        if result.finish_reason == "length":
            assert sum(r.accepted for r in rounds) == sum(result.accepted_by_level)
        # a round ends with the target's own token, or where the reply does
        assert all(len(r.emitted) == r.accepted + 1 for r in rounds[:-1])
    assert sum(r.accepted for w in watched for r in w.rounds) > 3 * count, "a head that is never right tests nothing"
    emitted, rounds = sum(len(w.result.token_ids) - 1 for w in watched), sum(len(w.rounds) for w in watched)
    assert tau([w.result for w in watched]) == emitted / rounds


def test_tau_without_a_round():
    assert math.isnan(tau([]))


class Words:
    def decode(self, ids):
        return " ".join(f"t{i}" for i in ids)


def test_told_as_text():
    """Drafts after a miss among the accepted ones; a reply that ends within its drafts."""
    result = Result(token_ids=[0], finish_reason="length", prompt_tokens=1, run_lengths=[], seconds={})
    watched = [Watched(result, [Round([1, 2, 3], [1, 9]), Round([4, 5], [4, 5])]), Watched(result, [])]
    assert told(watched, Words()) == [
        {"prompt": 0, "round": 0, "accepted": "t1", "rejected": "t2 t3", "target": "t9"},
        {"prompt": 0, "round": 1, "accepted": "t4 t5", "rejected": "", "target": ""},
    ]
