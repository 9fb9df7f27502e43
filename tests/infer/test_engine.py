"""Requests from the outside: limits, stops inside runs, errors, reuse, and counts that add up."""

import copy
import itertools
import threading
from typing import Any

import pytest
import torch

from eagle3.errors import CheckpointError, ConfigError, Eagle3Error
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.metrics import path_conflict
from eagle3_infer.request import STAGES
from eagle3_infer.running import Running
from oracles.invariants import CheckedEngine, KnowingHead, lower, random_head, shifted_target
from oracles.overfit import greedy, random_prompts
from oracles.tiny import tiny_model, tiny_tokenizer

TREE = TreeConfig(depth=4, top_k=3, nodes=12)


class World:
    """A target, one prompt, its greedy reply, and a head that knows most of it."""

    def __init__(self, new: int = 24):
        self.target = shifted_target("llama")
        self.prompt = random_prompts(self.target, 1)[0]
        self.reply = greedy(self.target, self.prompt, new)
        self.head = KnowingHead(random_head(self.target), self.prompt + self.reply, share=0.8)

    def engines(self) -> list[CheckedEngine]:
        trees = (None, TreeConfig.chain(3), TREE)
        return [CheckedEngine(self.target, self.head if tree else None, tree) for tree in trees]


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def test_every_limit_is_exact(world):
    for engine in world.engines():
        for limit in range(1, 20):
            result = engine.generate_one(Request(world.prompt, max_new_tokens=limit))
            assert result.token_ids == world.reply[:limit]
            assert result.finish_reason == "length"
            assert 1 + sum(result.run_lengths) == limit
            assert result.rounds == len(result.run_lengths)


def test_one_new_token_needs_no_round(world):
    for engine in world.engines():
        result = engine.generate_one(Request(world.prompt, max_new_tokens=1))
        assert (result.rounds, result.run_lengths, result.nodes, result.offered_by_level) == (0, [], 0, [])


def test_eos_at_every_place_of_a_run(world):
    for engine in world.engines():
        for token in dict.fromkeys(world.reply):
            at = world.reply.index(token)
            result = engine.generate_one(Request(world.prompt, max_new_tokens=24, eos_ids=(299, token)))
            assert result.token_ids == world.reply[: at + 1]
            assert result.finish_reason == "eos"
            assert 1 + sum(result.run_lengths) == at + 1


def test_prompt_of_one_token(world):
    expected = greedy(world.target, [7], 10)
    for engine in world.engines():
        assert engine.generate_one(Request([7], max_new_tokens=10)).token_ids == expected


@pytest.mark.parametrize("stop_at", [3, 4, 9, 17])
def test_stop_strings_span_tokens(stop_at):
    """The text of three tokens in the middle stops the output at the third, in every mode."""
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    prompt = tokenizer("tell me")["input_ids"]
    reply = greedy(target, prompt, 24)
    head = KnowingHead(random_head(target), prompt + reply, share=0.9)
    stop = tokenizer.decode(reply[stop_at - 2 : stop_at + 1])
    first = next(n for n in range(1, 25) if stop in tokenizer.decode(reply[:n]))
    for tree in (None, TreeConfig.chain(4), TREE):
        engine = Engine(target, head if tree else None, tree)
        result = engine.generate_one(Request(prompt, max_new_tokens=24, stop=("never there", stop), eos_ids=()))
        assert result.token_ids == reply[:first]
        assert result.finish_reason == "stop"


def test_results_keep_the_order_and_are_announced(world):
    requests = [Request(world.prompt, max_new_tokens=n, prompt_id=n) for n in (20, 3, 9, 1, 6)]
    announced = []
    engine = CheckedEngine(world.target, world.head, TREE, EngineConfig(slots=2))
    results = engine.generate(requests, on_result=lambda i, result: announced.append((i, len(result.token_ids))))
    assert [len(r.token_ids) for r in results] == [20, 3, 9, 1, 6]
    assert sorted(announced) == [(0, 20), (1, 3), (2, 9), (3, 1), (4, 6)]
    assert announced[0] != (0, 20)
    assert engine.generate([]) == []


def test_an_engine_is_as_new_after_each_run_and_after_an_error(world):
    other = random_prompts(world.target, 5)[-1]
    fresh = Engine(world.target, world.head, TREE).generate_one(Request(other, max_new_tokens=12))
    engine = Engine(world.target, world.head, TREE, EngineConfig(slots=2))
    engine.generate_one(Request(world.prompt, max_new_tokens=24))
    assert engine.generate_one(Request(other, max_new_tokens=12)).token_ids == fresh.token_ids

    def interrupt(index, result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(world.prompt, max_new_tokens=n) for n in (2, 24, 24)], on_result=interrupt)
    assert all(pool.free for pool in engine.pools)
    assert engine.generate_one(Request(other, max_new_tokens=12)).token_ids == fresh.token_ids


def test_an_engine_that_runs_is_not_entered_again(world):
    """Neither from on_result nor from another thread; the outer run goes on as if nobody had asked."""
    engine = Engine(world.target, world.head, TREE, EngineConfig(slots=2))
    second, refused = Request([7], max_new_tokens=2), []

    def enter():
        for call in (engine.generate_one, lambda request: engine.prepare([request])):
            with pytest.raises(RuntimeError, match="already runs") as error:
                call(second)
            refused.append(error)

    def on_result(index, result):
        enter()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    results = engine.generate([Request(world.prompt, max_new_tokens=n) for n in (3, 24)], on_result)
    assert [r.token_ids for r in results] == [world.reply[:3], world.reply]
    assert len(refused) == 2 * 2 * 2
    assert len(engine.generate_one(second).token_ids) == 2


class CountingEngine(CheckedEngine):
    """Notes how many requests ever ran at once."""

    most = 0

    def step(self, waiting):
        done = super().step(waiting)
        self.most = max(self.most, len(self.running))
        return done


@pytest.mark.parametrize("tight", [{"pages": 12}, {"head_pages": 12}, {"head_page_size": 4, "head_pages": 24}])
def test_requests_wait_for_pages(world, tight):
    """Four slots, one of the pools with room for about two requests."""
    prompts = random_prompts(world.target, 5)
    engine = CountingEngine(world.target, world.head, TREE, EngineConfig(slots=4, page_size=8, **tight))
    results = engine.generate([Request(p, max_new_tokens=20, prompt_id=i) for i, p in enumerate(prompts)])
    assert [r.token_ids for r in results] == [greedy(world.target, p, 20) for p in prompts]
    assert engine.most == 2


def test_a_request_larger_than_a_pool_is_refused(world):
    engine = Engine(world.target, world.head, TREE, EngineConfig(page_size=8, head_page_size=4, head_pages=5))
    with pytest.raises(ConfigError, match=r"needs 33 K/V rows .* the head's pool has 5 pages of 4"):
        engine.generate_one(Request([1] * 4, max_new_tokens=20))


def test_what_was_prepared_is_not_allocated_again(world):
    engine = Engine(world.target, world.head, TREE)
    requests = [Request(world.prompt, max_new_tokens=n) for n in (12, 4)]
    engine.prepare(requests)
    held = engine.verifier.capture, *engine.pools
    for request in requests:
        engine.generate_one(request)
    assert (engine.verifier.capture, *engine.pools) == held


def test_counts_add_up(world):
    [_, chain, tree] = world.engines()
    for engine in (chain, tree):
        result = engine.generate_one(Request(world.prompt, max_new_tokens=24))
        assert result.nodes == sum(result.offered_by_level)
        assert sum(result.accepted_by_level) + result.rounds >= sum(result.run_lengths)
        assert all(a <= result.rounds for a in result.accepted_by_level)
        assert len(result.accepted_by_level) <= len(result.offered_by_level)
        assert set(result.seconds) == set(STAGES)
        assert all(seconds >= 0 for seconds in result.seconds.values())
        assert min(result.seconds[stage] for stage in ("prefill", "verify", "draft", "tree_build", "accept")) > 0
    assert result.path_conflict[0] <= result.path_conflict[1]


def test_a_prompts_way_through_the_head_is_prefill(world, monkeypatch):
    """Every wait for the device is one second: what is between two of them is one stage's."""
    seconds = itertools.count()
    monkeypatch.setattr("eagle3_infer.metrics.now", lambda device: float(next(seconds)))
    engine = Engine(world.target, world.head, TREE)
    booked = []
    plain = Running.result
    monkeypatch.setattr(Running, "result", lambda self: booked.append(dict(self.metrics.seconds)) or plain(self))
    engine.generate_one(Request(world.prompt, max_new_tokens=2))
    # the joining step: both models' prefill and the first token; then one round of a bare root
    assert booked[0]["prefill"] == 3
    assert booked[0]["verify"] == booked[0]["accept"] == 1
    assert booked[0]["draft"] == booked[0]["tree_build"] == 1


def test_drafts_past_the_limit_are_not_verified(world):
    """The last rounds offer only levels that could still be emitted."""
    result = Engine(world.target, random_head(world.target), TreeConfig.chain(6)).generate_one(
        Request(world.prompt, max_new_tokens=4)
    )
    assert result.token_ids == world.reply[:4]
    assert len(result.offered_by_level) <= 2


@pytest.mark.parametrize("parents", [[-1], [-1, 0], [-1, 0, 0], [-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 1, 1]])
def test_path_conflict_counts_leaf_pairs(parents):
    inner, pairs, conflicts = set(parents), 0, 0
    leaves = [row for row in range(1, len(parents)) if row not in inner]
    for pair in itertools.combinations(leaves, 2):
        branches = set()
        for row in pair:
            while parents[row] > 0:
                row = parents[row]
            branches.add(row)
        pairs, conflicts = pairs + 1, conflicts + (len(branches) == 2)
    assert path_conflict(parents) == (conflicts, pairs)


def test_forced_tokens_are_emitted_first(world):
    forced = (5, 6, 7, world.reply[3])
    for engine in world.engines():
        result = engine.generate_one(Request(world.prompt, max_new_tokens=9, forced=forced))
        assert tuple(result.token_ids[:4]) == forced
        assert result.token_ids[4:] == greedy(world.target, world.prompt + list(forced), 5)


def test_the_last_position_is_usable_and_the_next_is_refused():
    target = shifted_target("llama", max_position_embeddings=40)
    head, prompt = random_head(target), random_prompts(target, 1)[0]
    most = 40 - len(prompt) + 1
    expected = greedy(target, prompt, most)
    for tree in (None, TREE):
        engine = Engine(target, head if tree else None, tree)
        assert engine.generate_one(Request(prompt, max_new_tokens=most)).token_ids == expected
        with pytest.raises(ConfigError, match="41 positions; the target has 40"):
            engine.generate_one(Request(prompt, max_new_tokens=most + 1))


def test_what_users_do_wrong(world):
    engine = Engine(world.target, world.head, TREE, EngineConfig(max_tokens=30))
    for bad in ({"prompt_ids": []}, {"max_new_tokens": 0}, {"stop": "text"}, {"stop": ("",)}):
        with pytest.raises(ConfigError):
            Request(**{"prompt_ids": [1], **bad})
    for request, message in (
        (Request([1, 300]), "token id 300"),
        (Request([-1]), "token id -1"),
        (Request([1], forced=(9999,)), "forced to emit token id 9999"),
        (Request([1], stop=("x",)), "tokenizer"),
        (Request([1], max_new_tokens=25), "max_tokens allows 30"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.generate([Request([1], max_new_tokens=2), request])
    for head, tree in ((world.head, None), (None, TREE)):
        with pytest.raises(ConfigError, match="give both, or neither"):
            Engine(world.target, head, tree)
    with pytest.raises(CheckpointError):
        Engine(shifted_target("llama", hidden_size=32), random_head(world.target), TREE)


@pytest.mark.parametrize(
    "bad, told",
    [
        ({"prompt_ids": [1.5]}, r"prompt_ids\[0\] is 1.5 \(float\)"),
        ({"prompt_ids": [1, "a"]}, r"prompt_ids\[1\] is 'a' \(str\)"),
        ({"prompt_ids": [True]}, r"prompt_ids\[0\] is True \(bool\)"),
        ({"prompt_ids": [[1, 2]]}, r"prompt_ids\[0\] is \[1, 2\] \(list\)"),
        ({"prompt_ids": torch.arange(99)}, r"prompt_ids is tensor\(.*\.\.\. \(Tensor\)"),
        ({"prompt_ids": "text"}, r"prompt_ids is 'text' \(str\)"),
        ({"prompt_ids": None}, "prompt_ids is None"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens is 2.5 \(float\)"),
        ({"prompt_id": "a"}, "prompt_id is 'a'"),
        ({"eos_ids": 3}, r"eos_ids is 3 \(int\)"),
        ({"forced": (1.0,)}, r"forced\[0\] is 1.0"),
        ({"stop": (1,)}, r"stop is \(1,\)"),
        ({"stop": None}, "stop is None"),
    ],
)
def test_fields_of_another_type_say_what_was_found(bad, told):
    with pytest.raises(ConfigError, match=told):
        Request(**{"prompt_ids": [1], **bad})


def test_a_tree_deeper_than_the_targets_positions():
    target = shifted_target("llama", max_position_embeddings=40)
    Engine(target, random_head(target), TreeConfig.chain(40))
    with pytest.raises(ConfigError, match="depth is 41; for this target it must be between 1 and 40"):
        Engine(target, random_head(target), TreeConfig.chain(41))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_finite_name_the_dtype(dtype):
    target = Target(lower(tiny_model("llama"), dtype))
    head = random_head(target).to(dtype)
    name = str(dtype).removeprefix("torch.")
    head.lm_head.weight[3, 0] = torch.nan
    with pytest.raises(Eagle3Error, match=f"head's logits are not finite in {name}"):
        Engine(target, head, TREE).generate_one(Request([1, 2, 3], max_new_tokens=8))
    with torch.no_grad():
        target.lm_head.weight[3, 0] = torch.nan
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        with pytest.raises(Eagle3Error, match=f"target's logits are not finite in {name}"):
            Engine(target).generate_one(Request([1, 2, 3], sampling, max_new_tokens=8))


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
def test_a_head_that_fails_below_the_first_level_is_noticed(world, bad):
    """One logit of one node of level 2; its siblings are fine."""
    head, calls = copy.copy(random_head(world.target)), []

    def logits(h):
        calls.append(Eagle3Head.logits(head, h))
        if len(calls) == 2:
            calls[-1][0, 1, 7] = bad
        return calls[-1]

    head.logits = logits
    with pytest.raises(Eagle3Error, match="head's logits are not finite"):
        Engine(world.target, head, TREE).generate_one(Request(world.prompt, max_new_tokens=8))


def test_a_layer_that_leaves_the_seam_is_noticed(world):
    """The model is given another attention, or is open for plain transformers, while an engine runs it."""
    target = shifted_target("llama")
    engine, request = Engine(target, random_head(target), TREE), Request([1, 2, 3], max_new_tokens=4)
    right = engine.generate_one(request).token_ids
    with target.stock(), pytest.raises(RuntimeError, match=r"layers \[0, .*7\] of 8 did not come to the engine"):
        engine.generate_one(request)
    assert engine.generate_one(request).token_ids == right
    attention: Any = target.layers[2].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match=r"layers \[2\] of 8"):
        engine.generate_one(request)


def test_two_engines_on_one_target_may_run_in_threads(world):
    results: dict[int, list[list[int]]] = {0: [], 1: []}

    def work(number: int) -> None:
        engine = Engine(world.target, world.head, TREE)
        for _ in range(4):
            results[number].append(engine.generate_one(Request(world.prompt, max_new_tokens=24)).token_ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [world.reply] * 4, 1: [world.reply] * 4}


def test_processors_may_write_and_must_return_logits(world):
    """What they are given is theirs: neither the output nor the log-probabilities change with it."""

    def negate(tokens, logits):
        return logits.mul_(-1)

    def fresh(tokens, logits):
        return logits * -1

    results = [
        Engine(world.target).generate_one(
            Request(world.prompt, max_new_tokens=6, logprobs=True, processors=(processor,))
        )
        for processor in (negate, fresh)
    ]
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == pytest.approx(results[1].logprobs)
    for bad, told in ((lambda t, x: x[:5], r"\(5,\)"), (lambda t, x: None, "NoneType"), (lambda t, x: x[None], "300")):
        with pytest.raises(ConfigError, match=f"prompt 0: a processor returned .*{told}"):
            Engine(world.target).generate_one(Request(world.prompt, max_new_tokens=2, processors=(bad,)))


def test_draft_vocabulary_smaller_than_top_k():
    """More children asked for than exist: clamped, and said once."""
    target = shifted_target("llama")
    head, prompt = random_head(target, 3), [4, 5, 6]
    with pytest.warns(UserWarning, match="top_k 8 is more than the draft vocabulary of 3"):
        engine = Engine(target, head, TreeConfig(3, 8, 20))
    # the head's pool is sized by the children that exist
    assert engine.scheduler.rows_needed(Request(prompt, max_new_tokens=10)) == [13 + 20, 13 + 3 * 2]
    result = engine.generate_one(Request(prompt, max_new_tokens=10))
    assert result.token_ids == greedy(target, prompt, 10)
    assert result.offered_by_level[0] == 3 * (result.rounds - 1)
