"""Many unlike requests share few slots and scarce pages; every one of them emits what it emits alone (fp32).

Catches state that leaks between slots, rows that depend on their batch, wrong chunks of prompts, pages given twice.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest

from eagle3.target import Target
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from oracles.invariants import CheckedEngine, KnowingHead, random_head, whimsical
from oracles.overfit import greedy
from oracles.tiny import tiny_model, tiny_tokenizer

SLOTS = 8
TREE = TreeConfig(depth=4, top_k=3, nodes=10)
CONFIG = EngineConfig(slots=SLOTS, page_size=8, pages=36, head_page_size=16, head_pages=19, prefill_rows=24)


class World:
    """A target with a tokenizer, and a head that knows part of one greedy reply."""

    def __init__(self) -> None:
        tokenizer = tiny_tokenizer()
        self.target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
        self.prompt = tokenizer("tell me a tale")["input_ids"]
        self.reply = greedy(self.target, self.prompt, 40)
        self.head = KnowingHead(random_head(self.target), self.prompt + self.reply, share=0.8)


@lru_cache(maxsize=1)
def world() -> World:
    return World()


def draw_sampling(draw: random.Random) -> SamplingConfig:
    pick = draw.choice
    return SamplingConfig(
        temperature=pick([0.0, 0.0, 0.7, 1.0]),
        top_k=pick([0, 0, 20]),
        top_p=pick([1.0, 1.0, 0.9]),
        min_p=pick([0.0, 0.0, 0.02]),
        seed=draw.randrange(3),
        repetition_penalty=pick([1.0, 1.0, 1.3]),
        presence_penalty=pick([0.0, 0.0, 0.6]),
        frequency_penalty=pick([0.0, 0.0, 0.4]),
        logit_bias=pick([(), ((draw.randrange(8, 200), 4.0), (7, -3.0))]),
        bad_words=pick([(), ((draw.randrange(200),), (5, 6))]),
        min_tokens=pick([0, 0, 4]),
    )


def draw_request(draw: random.Random, number: int) -> Request:
    """Prompts of 1 to 60 tokens, half of them the start of what the head knows; every kind of stop."""
    known = world().prompt + world().reply
    length = draw.randint(1, 60)
    prompt = known[: min(length, 30)] if draw.random() < 0.5 else [draw.randrange(256) for _ in range(length)]
    text = world().target.tokenizer.decode(world().reply[6:8])
    return Request(
        prompt,
        draw_sampling(draw) if draw.random() < 0.6 else SamplingConfig(),
        max_new_tokens=draw.randint(1, 24),
        stop=draw.choice([(), (text,)]),
        prompt_id=number,
        eos_ids=tuple(draw.sample(range(256), draw.choice([0, 3, 40]))),
        logprobs=draw.random() < 0.3,
    )


class Crowd(CheckedEngine):
    """Feeds requests in bursts at random times, and counts the rounds in which free slots had to wait for pages."""

    def __init__(self, *args, seed: int, **kwargs):
        super().__init__(*args, **kwargs)
        self._draw = random.Random(seed)
        self.starved = 0
        self._later: list = []

    def step(self, waiting):
        if waiting and (self.scheduler.busy or len(waiting) > 1):
            # the rest of the queue arrives later
            shown = self._draw.randint(0 if self.scheduler.busy else 1, min(3, len(waiting)))
            self._later = [waiting.pop() for _ in range(len(waiting) - shown)]
        touched = super().step(waiting)
        free = SLOTS - len(self.running) - len(self.scheduler.reading)
        self.starved += bool(waiting) and free > 0
        waiting.extend(reversed(self._later))
        self._later = []
        return touched


def alone(requests: list[Request], tree: TreeConfig | None, rule: RuleConfig | None) -> Iterator[tuple]:
    engine = Engine(world().target, world().head if tree else None, tree, rule=rule)
    for request in requests:
        result = engine.generate_one(request)
        yield result.token_ids, result.finish_reason, result.run_lengths, result.accepted_by_level


def stress(count: int, seed: int, tree: TreeConfig | None, rule: RuleConfig | None = None) -> None:
    draw = random.Random(seed)
    requests = [draw_request(draw, number) for number in range(count)]
    engine = Crowd(world().target, world().head if tree else None, tree, CONFIG, rule, seed=seed)
    results = engine.generate(requests)
    assert engine.starved
    assert all(pool.free for pool in engine.pools)
    found = [(r.token_ids, r.finish_reason, r.run_lengths, r.accepted_by_level) for r in results]
    assert found == list(alone(requests, tree, rule))
    if rule is None:
        # and drafting changed nothing: the match rule is plain decoding's
        assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in alone(requests, None, None)]
    for request, result in zip(requests, results, strict=True):
        assert (result.logprobs is not None) == request.logprobs
        assert result.logprobs is None or len(result.logprobs) == len(result.token_ids)
    assert {r.finish_reason for r in results} == {"eos", "stop", "length"} or count < 50


def cancelled_some(count: int, seed: int, monkeypatch) -> None:
    [whims, draw] = whimsical(monkeypatch), random.Random(seed)
    requests = [draw_request(draw, number) for number in range(count)]
    engine = Crowd(world().target, world().head, replace(TREE, adaptive=True), CONFIG, seed=seed)
    results: dict[int, Result] = {}
    for number, _, result in engine.stream(requests):
        if draw.random() < 0.1:
            engine.cancel(draw.randrange(count))
        if result is not None:
            results[number] = result
    expected = [tokens for tokens, *_ in alone(requests, None, None)]
    ended = {number for number, result in results.items() if result.finish_reason == "cancelled"}
    assert 0 < len(ended) < count / 2
    assert whims[0].plain_rounds
    assert set(results) == set(range(count))
    for number, result in results.items():
        tokens = result.token_ids
        assert tokens == expected[number][: len(tokens)]
        assert number in ended or len(tokens) == len(expected[number])
    assert all(pool.free for pool in engine.pools)


def test_twenty_requests() -> None:
    stress(20, seed=1, tree=TREE)


def test_twenty_requests_under_whims_some_cancelled(monkeypatch) -> None:
    """Trees of any size, plain stretches, cancels at random times: what was emitted is what plain decoding emits."""
    cancelled_some(20, 3, monkeypatch)


@pytest.mark.full
def test_two_hundred_requests_under_whims_some_cancelled(monkeypatch) -> None:
    cancelled_some(200, 4, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tree", [None, TreeConfig.chain(3), TREE])
def test_two_hundred_requests(tree, seed) -> None:
    stress(200, seed, tree)


@pytest.mark.full
@pytest.mark.parametrize("rule", [RuleConfig(draft_noise="shared"), RuleConfig("target_only"), RuleConfig("rejection")])
def test_two_hundred_requests_of_other_rules(rule) -> None:
    """Their draws are keyed by request and position too: batches change nothing."""
    stress(200, 5, replace(TREE, nodes=12), rule)
