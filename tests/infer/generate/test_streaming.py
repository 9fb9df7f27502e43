"""Streamers and pipelines around the engine inside `generate`."""

from threading import Thread
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer, pipeline

from eagle3_infer import generator
from oracles.prompted import PROMPTS, TOKENS, UNPRINTABLE, encode


class Pieces(TextStreamer):
    """Keeps the text that TextStreamer prints."""

    def __init__(self, tokenizer: Any, **settings: Any):
        super().__init__(tokenizer, **settings)
        self.texts: list[str] = []
        self.ends = 0

    def on_finalized_text(self, text: str, stream_end: bool = False):
        self.texts.append(text)
        self.ends += stream_end


@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("settings", [{}, {"stop_strings": [*"aeiou13579"]}, {"eos_token_id": list(range(0, 94, 9))}])
def test_streamer_text(model, tokenizer, folder, skip_prompt, settings):
    """Piece by piece what `generate` streams."""
    inputs = encode(tokenizer, PROMPTS[1])
    theirs, ours = (Pieces(tokenizer, skip_prompt=skip_prompt) for _ in range(2))
    asked = {"max_new_tokens": TOKENS, "suppress_tokens": UNPRINTABLE, **settings}
    plain = model.generate(
        **inputs, **asked, streamer=theirs, **({"tokenizer": tokenizer} if "stop_strings" in asked else {})
    )
    assert bool(settings) == (plain.shape[1] < inputs["input_ids"].shape[1] + TOKENS)
    custom = generator(folder / "head", tokenizer=tokenizer, streamer=ours)
    model.generate(**inputs, **asked, custom_generate=custom)
    assert ours.texts == theirs.texts
    assert ours.ends == theirs.ends == 1


def test_streamer_in_a_thread(model, tokenizer, folder):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    inputs = encode(tokenizer, PROMPTS[0])
    settings = {"max_new_tokens": TOKENS, "custom_generate": generator(folder / "head", streamer=streamer)}
    thread = Thread(target=model.generate, kwargs={**inputs, **settings})
    thread.start()
    text = "".join(streamer)
    thread.join()
    plain = model.generate(**inputs, max_new_tokens=TOKENS)
    assert text == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])


class Broken(TextStreamer):
    """Raises at the third token."""

    puts = 0

    def put(self, value):
        self.puts += 1
        if self.puts == 4:
            raise OSError("no space left on device")


def test_a_streamer_that_raises(model, tokenizer, folder):
    """The error comes through, and both model and generator work afterwards."""
    custom = generator(folder / "head", streamer=Broken(tokenizer))
    inputs = encode(tokenizer, PROMPTS[0])
    for _ in range(2):
        custom.streamer.puts = 0
        with pytest.raises(OSError, match="no space"):
            model.generate(**inputs, max_new_tokens=TOKENS, custom_generate=custom)
    assert model.config._attn_implementation == "sdpa"
    custom.streamer = None
    plain = model.generate(**inputs, max_new_tokens=TOKENS)
    assert torch.equal(model.generate(**inputs, max_new_tokens=TOKENS, custom_generate=custom), plain)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_in_a_pipeline(model, tokenizer, speculate, batch_size):
    pipe: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"do_sample": False, "max_new_tokens": TOKENS, "batch_size": batch_size}
    assert pipe(PROMPTS, **settings, custom_generate=speculate) == pipe(PROMPTS, **settings)
    chat = [{"role": "user", "content": "Once"}]
    assert pipe(chat, **settings, custom_generate=speculate) == pipe(chat, **settings)
    # pipelines sample by default
    assert pipe(PROMPTS[0], max_new_tokens=4, custom_generate=speculate)[0]["generated_text"].startswith(PROMPTS[0])
