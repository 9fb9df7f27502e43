"""Prompts read in chunks, streams, cancelling, log-probabilities: what a request sees beside its tokens."""

import threading

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.running import Running
from oracles.invariants import CheckedEngine, KnowingHead, dense_logits, random_head, shifted_target
from oracles.overfit import greedy, random_prompts

TREE = TreeConfig(depth=4, top_k=3, nodes=12)
NEW = 24


class World:
    """A target, a prompt, its greedy reply, and a head that knows most of it."""

    def __init__(self) -> None:
        self.target = shifted_target("llama")
        self.prompt = random_prompts(self.target, 1)[0]
        self.reply = greedy(self.target, self.prompt, NEW)
        self.head = KnowingHead(random_head(self.target), self.prompt + self.reply, share=0.8)

    def engine(self, tree: TreeConfig | None = TREE, rule: RuleConfig | None = None, **config) -> CheckedEngine:
        return CheckedEngine(self.target, self.head if tree else None, tree, EngineConfig(**config), rule)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


class RowCounting(CheckedEngine):
    """Notes how many prompt rows each round read, and whether trees were verified beside them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rounds: list[tuple[int, int]] = []
        chunks = self.scheduler.chunks

        def noted():
            found = chunks()
            self.rounds.append((len(self.running), sum(chunk.rows for chunk in found)))
            return found

        self.scheduler.chunks = noted


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompts_are_read_in_chunks(family, rows):
    """Chunks of one row up, beside running trees; mid-chunk the head embeds the next prompt token (checked pools)."""
    target = shifted_target(family)
    prompts = [prompt * 3 for prompt in random_prompts(target, 3)]
    limits = (12, 5, 8)
    expected = [greedy(target, prompt, new) for prompt, new in zip(prompts, limits, strict=True)]
    for tree in (None, TREE):
        head = random_head(target) if tree else None
        engine = RowCounting(target, head, tree, EngineConfig(slots=2, page_size=8, prefill_rows=rows))
        results = engine.generate([Request(prompts[i], max_new_tokens=limits[i], prompt_id=i) for i in range(3)])
        assert [r.token_ids for r in results] == expected
        assert max(read for _, read in engine.rounds) <= rows
        assert sum(read for _, read in engine.rounds) == sum(map(len, prompts))
        # a chunk of a later prompt and the trees of an earlier one were in one forward
        assert any(running and read for running, read in engine.rounds)


def test_a_stream_tells_every_round(world):
    updates = list(world.engine().stream([Request(world.prompt, max_new_tokens=NEW)]))
    assert [token for update in updates for token in update.token_ids] == world.reply
    assert [update.result is not None for update in updates] == [False] * (len(updates) - 1) + [True]
    result = updates[-1].result
    assert result is not None
    assert [len(update.token_ids) for update in updates] == [1, *result.run_lengths]


def test_a_stream_of_many_tells_each_its_own(world):
    prompts = random_prompts(world.target, 5)
    said: dict[int, list[int]] = {}
    for number, tokens, _ in world.engine(slots=2).stream(
        [Request(p, max_new_tokens=4 + i, prompt_id=i) for i, p in enumerate(prompts)]
    ):
        said.setdefault(number, []).extend(tokens)
    assert said == {i: greedy(world.target, p, 4 + i) for i, p in enumerate(prompts)}


def test_a_stream_that_is_dropped_frees_the_engine(world):
    engine = world.engine(slots=2)
    stream = engine.stream([Request(world.prompt, max_new_tokens=NEW)] * 3)
    next(stream)
    with pytest.raises(RuntimeError, match="already runs"):
        engine.generate_one(Request([7]))
    stream.close()
    assert all(pool.free for pool in engine.pools)
    assert engine.generate_one(Request(world.prompt, max_new_tokens=NEW)).token_ids == world.reply


def test_cancelled_requests_keep_what_they_emitted(world):
    """One that runs, one whose prompt is being read, one that waits; the others are not disturbed."""
    engine = world.engine(slots=2, prefill_rows=4)
    long = world.prompt * 4
    requests = [
        Request(world.prompt, max_new_tokens=NEW),
        Request(long, max_new_tokens=8, prompt_id=1),
        Request(world.prompt, max_new_tokens=8, prompt_id=2),
        Request(world.prompt, max_new_tokens=12, prompt_id=3),
    ]
    said, results = [], {}
    for number, tokens, result in engine.stream(requests):
        said += tokens if number == 0 else []
        if number == 0 and len(said) == len(tokens):
            for cancelled in (0, 1, 2):
                engine.cancel(cancelled)
        if result is not None:
            results[number] = result
    assert [results[i].finish_reason for i in range(4)] == ["cancelled"] * 3 + ["length"]
    assert results[0].token_ids == said == world.reply[: len(said)]
    assert 1 + sum(results[0].run_lengths) == len(said)
    assert (results[1].token_ids, results[2].token_ids) == ([], [])
    assert results[3].token_ids == world.reply[:12]
    assert all(pool.free for pool in engine.pools)
    # nothing of it is left for the next run
    assert engine.generate_one(Request(world.prompt, max_new_tokens=NEW)).token_ids == world.reply


def test_cancelling_all_that_is_left_ends_the_run(world):
    """One waits, the other's prompt is being read; nothing has a tree."""

    class Impatient(CheckedEngine):
        def step(self, waiting):
            self.cancel(0)
            self.cancel(1)
            return super().step(waiting)

    engine = Impatient(world.target, world.head, TREE, EngineConfig(prefill_rows=1))
    results = engine.generate([Request(world.prompt, prompt_id=i) for i in range(2)])
    assert [(r.token_ids, r.finish_reason) for r in results] == [([], "cancelled")] * 2


def test_cancels_that_come_too_late_do_nothing(world):
    """After its request is done, after the run, before any run, of a number that no request has."""
    engine = world.engine(slots=2)
    engine.cancel(0)
    requests = [Request(world.prompt, max_new_tokens=n) for n in (2, NEW)]
    results = engine.generate(requests, on_result=lambda number, _: engine.cancel(0) or engine.cancel(7))
    assert [r.finish_reason for r in results] == ["length"] * 2
    engine.cancel(0)
    assert engine.generate_one(Request(world.prompt, max_new_tokens=NEW)).token_ids == world.reply


def test_another_thread_may_cancel(world):
    engine = world.engine()
    updates = engine.stream([Request(world.prompt, max_new_tokens=NEW)])
    next(updates)
    thread = threading.Thread(target=engine.cancel, args=(0,))
    thread.start()
    thread.join()
    [last] = updates
    assert last.result is not None
    assert last.result.finish_reason == "cancelled"


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.8, top_k=30, seed=2, repetition_penalty=1.2)])
def test_log_probs_are_the_models_own(world, sampling):
    """Of raw logits, whatever was sampled from; trimmed with the tokens at a stop."""
    for tree in (None, TreeConfig.chain(3), TREE):
        request = Request(world.prompt, sampling, max_new_tokens=11, logprobs=True)
        result = world.engine(tree).generate_one(request)
        tokens = world.prompt + result.token_ids
        with torch.inference_mode():
            log_p = dense_logits(world.target, tokens).log_softmax(-1)
        at = torch.arange(len(world.prompt), len(tokens))
        expected = log_p[at - 1, torch.tensor(result.token_ids)]
        assert result.logprobs is not None
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=1e-4, atol=1e-4)
        short = world.engine(tree).generate_one(
            Request(world.prompt, sampling, max_new_tokens=11, logprobs=True, eos_ids=(result.token_ids[4],))
        )
        assert short.logprobs == pytest.approx(result.logprobs[: len(short.token_ids)], abs=1e-4)
        assert len(short.token_ids) <= 5


def test_no_log_probs_unless_asked(world):
    assert world.engine().generate_one(Request(world.prompt, max_new_tokens=3)).logprobs is None


def test_an_all_greedy_batch_asks_no_node(world, monkeypatch):
    """Neither a rule's function nor noise is called where every request takes the largest logit."""

    def never(*args):
        raise AssertionError("a sampling cost")

    monkeypatch.setattr("eagle3_infer.rules.RoundRule.__call__", never)
    monkeypatch.setattr("eagle3_infer.sampling.Sampler.draw", never)
    for rule in (None, RuleConfig(draft_noise="shared"), RuleConfig("target_only"), RuleConfig("rejection")):
        result = world.engine(rule=rule, slots=2).generate([Request(world.prompt, max_new_tokens=NEW)] * 2)
        assert [r.token_ids for r in result] == [world.reply] * 2


def test_only_visited_nodes_are_drawn(world, monkeypatch):
    drawn = []
    plain = Running.emit
    monkeypatch.setattr("eagle3_infer.sampling.sample_node", lambda *args: drawn.append(args[-1]) or 7)
    emitted = []
    monkeypatch.setattr(
        Running, "emit", lambda self, run, logprobs: emitted.append(len(run)) or plain(self, run, logprobs)
    )
    world.engine().generate_one(Request(world.prompt, SamplingConfig(1.0), max_new_tokens=9))
    assert len(drawn) == sum(emitted)


@pytest.mark.parametrize("rule", ["target_only", "rejection", "threshold"])
def test_shared_noise_needs_the_match_rule(rule):
    with pytest.raises(ConfigError, match="draft_noise shared needs the match rule"):
        RuleConfig(rule, draft_noise="shared")


def test_threshold_is_lossy_and_says_so(world):
    """It takes what is likely enough: also at temperature 0 the output may part from the target's."""
    assert not RuleConfig("threshold").lossless
    assert all(RuleConfig(rule).lossless for rule in ("match", "target_only", "rejection"))
    eager = world.engine(rule=RuleConfig("threshold", threshold=1e-9))
    result = eager.generate_one(Request(world.prompt, max_new_tokens=NEW))
    assert result.token_ids != world.reply
    # every child is likely enough: only a bare root accepts none
    assert result.accepted_by_level[0] >= result.rounds - 1
    # no filter counts at temperature 0
    filtered = Request(world.prompt, SamplingConfig(top_p=0.01, top_k=1, min_p=1.0), max_new_tokens=NEW)
    assert eager.generate_one(filtered).token_ids == result.token_ids
    strict = world.engine(rule=RuleConfig("threshold", threshold=1.0))
    assert strict.generate_one(Request(world.prompt, max_new_tokens=NEW)).token_ids == world.reply


def test_prompts_wait_for_their_turn_to_be_read(world):
    """Two prompts join at once and the budget of a round is one row: the second is read when the first is done."""
    engine = world.engine(slots=2, prefill_rows=1)
    results = engine.generate([Request(world.prompt, max_new_tokens=6, prompt_id=i) for i in range(2)])
    assert [r.token_ids for r in results] == [world.reply[:6]] * 2


def test_the_backlog_of_the_head_is_read_in_pieces(world):
    engine = Engine(world.target, world.head, TREE, EngineConfig(prefill_rows=64))
    assert engine.drafter is not None
    engine.drafter.most_rows = 3
    assert engine.generate_one(Request(world.prompt, max_new_tokens=NEW)).token_ids == world.reply
