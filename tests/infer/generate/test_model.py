"""The model that the engine ran inside `generate`: left as it was, wrapped anew where it changed, nothing leaks."""

import copy
import gc
import time
import weakref
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3.attention import SEAM
from eagle3.target import Target
from eagle3_infer import generator, hf_model
from oracles.prompted import PROMPTS, encode
from oracles.tiny import tiny_model


def test_the_model_is_left_as_it_was(folder, tokenizer):
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    inputs = encode(tokenizer, *PROMPTS)
    custom = generator(folder / "head")
    plain = model.generate(**inputs, max_new_tokens=4)
    model.train()
    model.model.layers[0].eval()
    model.lm_head.weight.requires_grad_(False)
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    training = {name: module.training for name, module in model.named_modules()}
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, custom_generate=custom), plain)
        assert {name: p.requires_grad for name, p in model.named_parameters()} == trainable
        assert {name: module.training for name, module in model.named_modules()} == training
        assert model.config._attn_implementation == "sdpa"
    model(**inputs).logits.sum().backward()


def test_copies_start_without(folder, tokenizer):
    """What the model carries is neither copied nor saved with it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    inputs = encode(tokenizer, PROMPTS[0])
    custom = generator(folder / "head")
    plain = model.generate(**inputs, max_new_tokens=6, custom_generate=custom)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.roll(1, 0))
    with pytest.warns(UserWarning, match="other weights"):
        other = twin.generate(**inputs, max_new_tokens=6, custom_generate=custom)
    assert torch.equal(other, twin.generate(**inputs, max_new_tokens=6))
    assert not torch.equal(other, plain)


def test_a_model_that_changes_is_wrapped_anew(folder, tokenizer):
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    inputs = encode(tokenizer, PROMPTS[0])
    custom = generator(folder / "head")
    plain = model.generate(**inputs, max_new_tokens=6, custom_generate=custom)
    model.double()
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, custom_generate=custom), plain)


def test_other_input_embeddings(folder, tokenizer):
    """They are untied from the lm_head, which alone would not tell."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    inputs = encode(tokenizer, PROMPTS[0])
    custom = generator(folder / "head")

    def target() -> Target:
        model.generate(**inputs, max_new_tokens=6, custom_generate=custom)
        return model._eagle3.engines[custom][1].target

    before = target()
    assert target() is before
    other = torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.roll(1, 0))
    model.set_input_embeddings(other)
    assert target() is not before
    plain = model.generate(**inputs, max_new_tokens=6)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, custom_generate=custom), plain)


def test_two_threads_on_a_fresh_model_share_one_lock(monkeypatch):
    """Else both would have the model's attention at once."""
    made = []

    class Slow(hf_model._Kept):
        def __init__(self):
            time.sleep(0.1)
            super().__init__()
            made.append(self)

    monkeypatch.setattr(hf_model, "_Kept", Slow)
    model = tiny_model()

    def run() -> None:
        with hf_model.driven(model):
            pass

    threads = [Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [model._eagle3]


def test_memory_is_freed_by_hand(folder, tokenizer):
    """As generator's docstring has it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    custom = generator(folder / "head")
    inputs = encode(tokenizer, PROMPTS[0])
    plain = model.generate(**inputs, max_new_tokens=6, custom_generate=custom)
    pool = weakref.ref(model._eagle3.engines[custom][1].pools[0])
    gc.collect()
    assert pool() is not None
    del model._eagle3
    gc.collect()
    assert pool() is None
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, custom_generate=custom), plain)


def test_the_cache_is_weak(folder, tokenizer):
    """Neither the generator nor anything else keeps a model alive, nor the model a generator."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    custom, other = (generator(folder / "head") for _ in range(2))
    for each in (custom, other):
        model.generate(**encode(tokenizer, PROMPTS[0]), max_new_tokens=4, custom_generate=each)
    gone = weakref.ref(other)
    del other, each
    gc.collect()
    assert gone() is None
    assert len(model._eagle3.engines) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_engines_are_kept(model, tokenizer, folder):
    """Probed and allocated once, and again only for more rows than there are slots."""
    custom = generator(folder / "head")

    def engine(*texts: str) -> Any:
        model.generate(**encode(tokenizer, *texts), max_new_tokens=4, custom_generate=custom)
        return model._eagle3.engines[custom][1]

    two = engine(*PROMPTS[:2])
    assert engine(PROMPTS[0]) is two
    assert engine(*PROMPTS) is not two
    assert engine(*PROMPTS) is engine(*PROMPTS[:2])


def test_a_model_inside_a_target(folder, tokenizer):
    """It stays at the seam, where its Target left it."""
    target = Target.load(folder / "target")
    inputs = encode(tokenizer, *PROMPTS)
    with target.stock() as stock:
        plain = stock.generate(**inputs, max_new_tokens=6)
    ours = target.model.generate(**inputs, max_new_tokens=6, custom_generate=generator(folder / "head"))
    assert torch.equal(ours, plain)
    assert target.model.config._attn_implementation == SEAM
