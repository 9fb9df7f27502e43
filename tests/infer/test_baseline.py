"""Hugging Face generate as the benchmark runs it: a left-padded batch gives what each prompt gives alone."""

import pytest
import torch

from eagle3.target import Target
from eagle3_infer.baseline import hf_decoder, left_padded
from eagle3_infer.config import SamplingConfig
from eagle3_infer.request import STAGES, Request
from oracles.tiny import tiny_model

PROMPTS = ([5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18], [21], [31, 32, 33, 34])
EOS = 7


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model("llama"))


def replies(target, requests, size):
    with hf_decoder(target) as generate, torch.inference_mode():
        return [result for i in range(0, len(requests), size) for result in generate(requests[i : i + size])]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(repetition_penalty=1.6, logit_bias=((9, 1.5), (20, -3.0)), bad_words=((40,), (50, 60))),
        SamplingConfig(presence_penalty=1.5, frequency_penalty=0.7, min_tokens=6),
    ],
    ids=["greedy", "repetition, bias, bad words", "presence, frequency, min tokens"],
)
def test_a_batch_replies_as_each_prompt_alone(target, sampling):
    requests = [Request(prompt, sampling, max_new_tokens=16, eos_ids=(EOS, 9)) for prompt in PROMPTS]
    alone, batch = replies(target, requests, 1), replies(target, requests, len(requests))
    assert [r.token_ids for r in batch] == [r.token_ids for r in alone]
    assert [r.finish_reason for r in batch] == [r.finish_reason for r in alone]
    assert len({tuple(r.token_ids) for r in alone}) > 1


def test_replies_end_where_they_end(target):
    """Not where the longest of their batch does: what fills the row behind them is cut."""
    longest = replies(target, [Request(prompt, max_new_tokens=16) for prompt in PROMPTS], 1)
    end = longest[0].token_ids[4]
    requests = [Request(prompt, max_new_tokens=16, eos_ids=(end,)) for prompt in PROMPTS]
    [first, *others] = replies(target, requests, 4)
    assert first.token_ids == longest[0].token_ids[: longest[0].token_ids.index(end) + 1]
    assert first.finish_reason == "eos" and any(len(r.token_ids) > len(first.token_ids) for r in others)
    for result in [first, *others]:
        assert 1 + sum(result.run_lengths) == len(result.token_ids)


def test_a_least_length_out_of_reach_is_no_news_of_every_prompt(target, recwarn):
    """The settings say so once; transformers would twice per prompt length, and in a warm-up that is short."""
    requests = [Request(prompt, SamplingConfig(min_tokens=99), 6, eos_ids=tuple(range(200))) for prompt in PROMPTS]
    assert [len(reply.token_ids) for reply in replies(target, requests, 1)] == [6] * len(PROMPTS)
    assert not recwarn.list


def test_seconds_of_a_batch_are_shared(target):
    results = replies(target, [Request(prompt, max_new_tokens=4) for prompt in PROMPTS], 4)
    assert len({tuple(r.seconds.values()) for r in results}) == 1
    assert set(results[0].seconds) == set(STAGES) and min(results[0].seconds[s] for s in ("prefill", "other")) > 0


def test_padding_repeats_a_token_of_the_prompt():
    """So that the repetition penalty meets no token that the prompt lacks."""
    ids, mask = left_padded([[5, 6], [7, 8, 9, 10]], torch.device("cpu"))
    assert ids.tolist() == [[5, 5, 5, 6], [7, 8, 9, 10]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_the_models_own_settings_are_put_aside_and_come_back(target):
    own = target.model.generation_config
    own.repetition_penalty = 5.0
    try:
        request = Request(PROMPTS[0], max_new_tokens=12)
        [reply] = replies(target, [request], 1)
        assert target.model.generation_config is own
    finally:
        own.repetition_penalty = None
    assert replies(target, [request], 1)[0].token_ids == reply.token_ids
