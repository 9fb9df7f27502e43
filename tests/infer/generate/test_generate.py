"""The engine inside `generate`: equal to transformers' own greedy output whatever is set."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper

from eagle3_infer import generator, pure
from eagle3_infer.config import TreeConfig
from oracles.prompted import PROMPTS, TOKENS, UNPRINTABLE, encode


@pytest.mark.parametrize("texts", [PROMPTS[:1], PROMPTS])
@pytest.mark.parametrize("tree", [None, TreeConfig.chain(3), TreeConfig(depth=2, top_k=3, nodes=5)])
def test_greedy_equals_generate(model, tokenizer, folder, texts, tree):
    inputs = encode(tokenizer, *texts)
    plain = model.generate(**inputs, max_new_tokens=TOKENS)
    ours = model.generate(**inputs, max_new_tokens=TOKENS, custom_generate=generator(folder / "head", tree=tree))
    assert torch.equal(ours, plain)
    assert ours.dtype == plain.dtype


def test_drafts_are_accepted(model, tokenizer, speculate):
    """Fewer forwards than tokens, or the engine would be of no use here."""
    calls = []
    hook = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    inputs = encode(tokenizer, PROMPTS[1])
    # the first call probes the model
    model.generate(**inputs, max_new_tokens=TOKENS, custom_generate=speculate)
    calls.clear()
    model.generate(**inputs, max_new_tokens=TOKENS, custom_generate=speculate)
    hook.remove()
    assert len(calls) < TOKENS * 2 / 3


@pytest.mark.parametrize("at", range(0, TOKENS, 3))
def test_eos_anywhere_in_a_run(model, tokenizer, speculate, at):
    """Rows that end early are filled up with the pad token, as `generate` does."""
    inputs = encode(tokenizer, *PROMPTS)
    eos = [int(model.generate(**inputs, max_new_tokens=TOKENS)[0, inputs["input_ids"].shape[1] + at])]
    settings = {"max_new_tokens": TOKENS, "eos_token_id": eos, "pad_token_id": 7}
    plain = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=speculate), plain)


def compare(model: Any, tokenizer: Any, speculate: Any, settings: dict[str, Any]) -> Tensor:
    """What both emit for the padded prompts; padding counts in lengths and repetitions, as in `generate`."""
    inputs = encode(tokenizer, *PROMPTS)
    settings = {**({} if "max_length" in settings else {"max_new_tokens": TOKENS}), **settings}
    plain = model.generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=speculate), plain)
    return plain


@pytest.mark.parametrize(
    "choose",
    [
        lambda out: {"repetition_penalty": 1.4},
        lambda out: {"bad_words_ids": [out[4:5], out[7:9], out[11:14]]},
        lambda out: {"sequence_bias": [[out[4:5], -9.0], [[out[7], 65], 30.0], [[66], 2.5]]},
        lambda out: {"no_repeat_ngram_size": 1},
        lambda out: {"suppress_tokens": out[3:6]},
        lambda out: {"begin_suppress_tokens": out[:6]},
        lambda out: {"min_new_tokens": 9, "eos_token_id": out[2:4]},
        lambda out: {"min_length": 20, "eos_token_id": out[2:4]},
        lambda out: {"exponential_decay_length_penalty": (3, 3.0), "eos_token_id": 65},
        lambda out: {"forced_eos_token_id": 65},
        lambda out: {"repetition_penalty": 0.8, "no_repeat_ngram_size": 2, "sequence_bias": [[out[4:5], -9.0]]},
        lambda out: {"max_length": 21},
    ],
    ids=lambda choose: "+".join(choose([0] * TOKENS)),
)
def test_settings_are_honoured(model, tokenizer, speculate, choose):
    """Settings are made so that they change the output of the first row."""
    plain = compare(model, tokenizer, speculate, {})
    assert not torch.equal(compare(model, tokenizer, speculate, choose(plain[0, -TOKENS:].tolist())), plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"renormalize_logits": True, "remove_invalid_values": True},
        {"max_time": 100.0},
        {"use_cache": False},
        {"cache_implementation": "static"},
        # greedy search has no warpers: transformers ignores them, so do we
        {"temperature": 0.5, "top_k": 3, "min_p": 0.5},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_settings_that_change_nothing(model, tokenizer, speculate, settings):
    assert torch.equal(compare(model, tokenizer, speculate, settings), compare(model, tokenizer, speculate, {}))


def test_default_length(model, tokenizer, speculate):
    inputs = encode(tokenizer, *PROMPTS)
    assert torch.equal(model.generate(**inputs, custom_generate=speculate), model.generate(**inputs))


def test_custom_processors_at_their_place(model, tokenizer, speculate):
    """The user's own come after the built-in ones and replace those of their class."""
    inputs = encode(tokenizer, *PROMPTS)
    given = LogitsProcessorList([TemperatureLogitsWarper(0.7), NoRepeatNGramLogitsProcessor(2)])
    settings = {"max_new_tokens": TOKENS, "repetition_penalty": 1.2, "no_repeat_ngram_size": 4}
    plain = model.generate(**inputs, **settings, logits_processor=given)
    ours = model.generate(**inputs, **settings, logits_processor=given, custom_generate=speculate)
    assert torch.equal(ours, plain)


class Shift(LogitsProcessor):
    """Of the user's own making."""

    def __call__(self, input_ids, scores):
        return scores.roll(input_ids.shape[1], -1)


def test_a_pure_processor_is_let_through(model, tokenizer, speculate):
    inputs = encode(tokenizer, *PROMPTS)
    plain = model.generate(**inputs, max_new_tokens=TOKENS, logits_processor=LogitsProcessorList([Shift()]))
    given: Any = LogitsProcessorList([pure(Shift())])
    ours = model.generate(**inputs, max_new_tokens=TOKENS, logits_processor=given, custom_generate=speculate)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("at", [0, 1, 5, 12])
def test_stop_strings(model, tokenizer, speculate, at):
    """Also across prompt and output, where transformers looks too."""
    inputs = encode(tokenizer, *PROMPTS)
    width = inputs["input_ids"].shape[1]
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "suppress_tokens": UNPRINTABLE}
    plain = model.generate(**inputs, **settings)
    # the third row goes on
    stops = [tokenizer.decode(row[width + at - 1 : width + at + 1]) for row in plain[:2]]
    stopped = model.generate(**inputs, **settings, stop_strings=stops, tokenizer=tokenizer)
    assert (stopped[:2, width + at + 1 :] == tokenizer.pad_token_id).all()
    assert torch.equal(model.generate(**inputs, **settings, stop_strings=stops, custom_generate=speculate), stopped)
    settings["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, stops)])
    assert torch.equal(model.generate(**inputs, **settings, custom_generate=generator(speculate.head)), stopped)


def test_stopped_rows_leave(model, tokenizer, speculate):
    """A row that ended takes part in no further round."""
    rows: list[int] = []
    inputs = encode(tokenizer, *PROMPTS)
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "suppress_tokens": UNPRINTABLE}
    plain = model.generate(**inputs, **settings, custom_generate=speculate)
    first, second, goes_on = plain[:, -TOKENS:].tolist()
    stops = [tokenizer.decode(next(i for i in row if i not in goes_on)) for row in (first, second)]
    hook = model.model.layers[0].register_forward_hook(lambda _module, args, _output: rows.append(args[0].shape[1]))
    model.generate(**inputs, **settings, custom_generate=speculate)
    whole = sum(rows)
    rows.clear()
    stopped = model.generate(**inputs, **settings, stop_strings=stops, custom_generate=speculate)
    hook.remove()
    assert stopped[2].tolist() == plain[2].tolist()
    assert sum(rows) < whole * 2 / 3


def test_return_dict(model, tokenizer, speculate):
    inputs = encode(tokenizer, PROMPTS[0])
    settings = {"max_new_tokens": 6, "return_dict_in_generate": True}
    ours = model.generate(**inputs, **settings, custom_generate=speculate)
    assert torch.equal(ours.sequences, model.generate(**inputs, **settings).sequences)
