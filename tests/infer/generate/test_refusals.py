"""What the engine inside `generate` cannot honour is refused by name."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from eagle3.errors import ConfigError
from eagle3_infer import generator
from oracles.prompted import PROMPTS, encode
from oracles.tiny import tiny_model


class Shift(LogitsProcessor):
    """Of the user's own making."""

    def __call__(self, input_ids, scores):
        return scores.roll(input_ids.shape[1], -1)


class Never(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


def cache_of_two() -> DynamicCache:
    cache = DynamicCache()
    for layer in range(8):
        cache.update(torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16), layer)
    return cache


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"num_beams": 2}, "beam_search .*num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation .*prompt_lookup_num_tokens=3"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search .*penalty_alpha=0.6"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"prefix_allowed_tokens_fn": lambda batch, ids: [1]}, "PrefixConstrainedLogitsProcessor"),
        ({"encoder_repetition_penalty": 1.3}, "EncoderRepetitionPenaltyLogitsProcessor"),
        ({"logits_processor": LogitsProcessorList([Shift()])}, r"Shift .*pure"),
        ({"stopping_criteria": StoppingCriteriaList([Never()])}, "Never"),
        ({"past_key_values": cache_of_two()}, "past_key_values holds 2 tokens"),
        # generate would fill it
        ({"past_key_values": DynamicCache()}, "past_key_values holds 0 tokens and cannot be read or filled"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6]])}, "position_ids"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "row 0 hides tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0]])}, "padding_side = 'left'"),
        ({"do_sample": True, "temperature": 1e-6}, "temperature is 1e-06"),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_honoured_is_refused(model, tokenizer, speculate, settings, match):
    inputs = {**encode(tokenizer, "abcd"), **settings}
    with pytest.raises(ConfigError, match=match):
        model.generate(**inputs, max_new_tokens=4, custom_generate=speculate)
    assert model.config._attn_implementation == "sdpa"


def test_rows_and_streams_are_checked(model, tokenizer, folder):
    two = encode(tokenizer, *PROMPTS[:2])
    with pytest.raises(ConfigError, match="streamer takes one row"):
        model.generate(**two, custom_generate=generator(folder / "head", streamer=TextStreamer(tokenizer)))
    with pytest.raises(ConfigError, match=r"generator\(head, tokenizer=tokenizer\)"):
        model.generate(**two, stop_strings="a", custom_generate=generator(folder / "head"))
    config = GenerationConfig(eos_token_id=None, pad_token_id=None, max_new_tokens=4)
    bare = tiny_model()
    with pytest.raises(ConfigError, match="set pad_token_id"):
        bare.generate(**two, generation_config=config, max_time=9.0, custom_generate=generator(folder / "head"))


def test_an_assistant_never_arrives(model, tokenizer, speculate):
    """transformers drops it, as the docstring says; should it ever come through, it is to be refused."""
    inputs = {**encode(tokenizer, PROMPTS[0]), "max_new_tokens": 8, "custom_generate": speculate}
    assert model.generate(**inputs, assistant_model=model).tolist() == model.generate(**inputs).tolist()


def test_too_long_for_the_target(model, tokenizer, speculate):
    with pytest.raises(ConfigError, match="the target has 512"):
        model.generate(**encode(tokenizer, PROMPTS[0]), max_new_tokens=600, custom_generate=speculate)
    assert model.config._attn_implementation == "sdpa"
