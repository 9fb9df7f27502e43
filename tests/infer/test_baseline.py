"""Hugging Face's decoding as the benchmark runs it: a left-padded batch gives what each prompt gives alone, and
drafting (prompt lookup, an assistant) what `generate` gives without it, in as many forwards as are counted."""

from contextlib import contextmanager

import pytest
import torch

from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer.baseline import _drafting, hf_decoder, left_padded, run_lengths, split_seconds
from eagle3_infer.config import SamplingConfig
from eagle3_infer.models import Assistant
from eagle3_infer.request import STAGES, Request
from eagle3_infer.settings import HF, HF_ASSISTED, HF_PROMPT_LOOKUP
from oracles.tiny import tiny_model, tiny_tokenizer

PROMPTS = ([5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18], [21], [31, 32, 33, 34])
EOS = 7


@pytest.fixture(scope="module")
def target():
    return Target(tiny_model("llama"))


def replies(target, requests, size, kind=HF, assistant=None):
    with hf_decoder(target, kind, assistant) as generate, torch.inference_mode():
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


SAMPLING = {
    "greedy": SamplingConfig(),
    "penalties": SamplingConfig(repetition_penalty=1.05, presence_penalty=0.1, logit_bias=((9, 0.5),), min_tokens=6),
}
# its end has come before, so that there is something to look up from the first token
LOOPING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]


@pytest.fixture(scope="module")
def drafting_target():
    """One whose greedy replies repeat themselves, which prompt lookup and a like-minded assistant then guess."""
    return Target(tiny_model("llama", initializer_range=0.05), tiny_tokenizer())


@contextmanager
def counted_forwards(model, counts):
    hook = model.register_forward_hook(lambda module, args, output: counts.append(1))
    try:
        yield
    finally:
        hook.remove()


def assistant_of(**changes):
    return Assistant(tiny_model("llama", initializer_range=0.05, **changes), tiny_tokenizer())


@pytest.mark.parametrize("kind", [HF_PROMPT_LOOKUP, HF_ASSISTED])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_drafting_changes_how_many_forwards_it_takes_and_nothing_else(drafting_target, kind, sampling):
    request = Request(LOOPING, sampling, max_new_tokens=40, eos_ids=(EOS,))
    [expected] = replies(drafting_target, [request], 1)
    counts = []
    with counted_forwards(drafting_target.model, counts):
        [drafted] = replies(drafting_target, [request], 1, kind, assistant_of())
    assert (drafted.token_ids, drafted.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert 1 + sum(drafted.run_lengths) == len(drafted.token_ids)
    # the prefill is a round where it verified drafts and took one
    assert len(counts) - 1 <= drafted.rounds <= len(counts)
    assert drafted.rounds < expected.rounds == len(expected.token_ids) - 1
    assert drafted.seconds["prefill"] >= 0 and drafted.seconds["other"] > 0


def test_an_assistant_of_another_vocabulary_drafts_as_text(drafting_target):
    [expected] = replies(drafting_target, [request := Request(LOOPING, max_new_tokens=12)], 1)
    [drafted] = replies(drafting_target, [request], 1, HF_ASSISTED, assistant_of(vocab_size=320, seed=3))
    assert drafted.token_ids == expected.token_ids


def test_as_many_ids_are_not_the_same_ids(drafting_target):
    """Of another tokenizer with a vocabulary of the same size, drafts go over as text, too."""
    like, unlike = assistant_of(), assistant_of()
    vocabulary = unlike.tokenizer.get_vocab()
    first, second = list(vocabulary)[:2]
    swapped = vocabulary | {first: vocabulary[second], second: vocabulary[first]}
    unlike.tokenizer.get_vocab = lambda: swapped
    assert "assistant_tokenizer" not in _drafting(drafting_target, HF_ASSISTED, like)
    assert "assistant_tokenizer" in _drafting(drafting_target, HF_ASSISTED, unlike)


@pytest.mark.parametrize(
    "runs, expected",
    [
        ([1, 3, 2], (4.0, 6.0)),
        # the first forward read the prompt and was a round: its tokens count, and so does its time
        ([4, 2, 2, 2], (2.0, 8.0)),
        # never more than there is, and nothing where no round tells how long one takes
        ([4, 2], (0.0, 10.0)),
        ([4], (4.0, 6.0)),
    ],
)
def test_a_first_forward_that_verified_drafts_is_charged_with_a_round(runs, expected):
    assert split_seconds(4.0, 6.0, runs) == expected


def test_a_stop_string_inside_accepted_drafts_ends_the_reply(drafting_target):
    """transformers looks for it at the end of what a forward gave, and goes on."""
    [plain] = replies(drafting_target, [Request(LOOPING, max_new_tokens=40)], 1)
    texts = [drafting_target.tokenizer.decode([token]) for token in plain.token_ids]
    stop = next(text for text in texts[6:] if text.isprintable() and text.isascii())
    request = Request(LOOPING, max_new_tokens=40, stop=(stop,))
    [expected] = replies(drafting_target, [request], 1)
    [drafted] = replies(drafting_target, [request], 1, HF_ASSISTED, assistant_of())
    assert drafted.token_ids == expected.token_ids and drafted.finish_reason == "stop"
    assert 1 + sum(drafted.run_lengths) == len(drafted.token_ids) < 40


@pytest.mark.parametrize("kind", [HF_PROMPT_LOOKUP, HF_ASSISTED])
def test_drafting_samples(drafting_target, kind):
    request = Request(LOOPING, SamplingConfig(temperature=1.0, top_k=20), max_new_tokens=12)
    [drafted] = replies(drafting_target, [request], 1, kind, assistant_of())
    assert len(drafted.token_ids) == 12 == 1 + sum(drafted.run_lengths)


@pytest.mark.parametrize(
    "runs, count, expected",
    [
        ([1], 1, []),
        ([1, 3, 2], 6, [3, 2]),
        ([1, 3, 2], 3, [2]),
        ([1, 3, 2], 4, [3]),
        ([4, 2], 6, [3, 2]),
        ([4, 2], 1, []),
    ],
)
def test_rounds_of_what_the_forwards_gave(runs, count, expected):
    assert run_lengths(runs, count) == expected


def test_what_transformers_refuses_to_draft_for_is_said_of_the_flag(drafting_target):
    requests = [Request(LOOPING, max_new_tokens=4)] * 2
    with pytest.raises(ConfigError, match=r"--hf prompt_lookup: transformers refuses it: .*batch_size = 1"):
        replies(drafting_target, requests, 2, HF_PROMPT_LOOKUP)
