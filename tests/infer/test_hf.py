"""The engine inside `generate`: equal to transformers' own greedy output whatever is set, the model left as it was."""

import copy
import gc
import time
import weakref
from collections import Counter
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper

from eagle3.attention import SEAM
from eagle3.checkpoint.reference import save_head
from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer import generator, hf_model, pure
from eagle3_infer.config import EngineConfig, TreeConfig
from oracles.overfit import mapped_head, packed, train
from oracles.tiny import greedy, tiny_folder, tiny_model

PROMPTS = ["Once", "A longer prompt", "x"]
TOKENS = 24
# all but ASCII's letters, digits and signs: the tokenizer's lowest 94 ids
UNPRINTABLE = list(range(94, 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with tokenizer and its head, on disk; the head knows the replies to PROMPTS."""
    home = tmp_path_factory.mktemp("hf")
    target = Target.load(tiny_folder(home / "target"))
    asked = [target.tokenizer(text)["input_ids"] for text in PROMPTS]
    batch = packed(asked, [greedy(target, prompt, TOKENS) for prompt in asked])
    head = mapped_head(target, batch, 80)
    train(target, head, batch, optimizer_steps=40, ttt_steps=3)
    save_head(home / "head", head, torch.float32)
    return home


@pytest.fixture(scope="module")
def model(folder) -> Any:
    """Loaded as users do, without a Target."""
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "target", padding_side="left")


@pytest.fixture
def speculate(folder, tokenizer):
    return generator(folder / "head", tokenizer=tokenizer)


def encode(tokenizer: Any, *texts: str) -> dict[str, Tensor]:
    return tokenizer(list(texts), return_tensors="pt", padding=True)


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


# sampling


def test_torchs_seed_governs_sampling(model, tokenizer, speculate, folder):
    """Whatever the tree; greedy calls draw no random number."""
    inputs = encode(tokenizer, *PROMPTS)

    def sample(seed: int, custom: Any) -> Tensor:
        torch.manual_seed(seed)
        model.generate(**inputs, max_new_tokens=2, custom_generate=custom)
        return model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=0, custom_generate=custom)

    first = sample(0, speculate)
    assert torch.equal(sample(0, speculate), first)
    assert torch.equal(sample(0, generator(folder / "head", tree=TreeConfig.chain(2))), first)
    assert not torch.equal(sample(1, speculate), first)
    # not seeded anew by each call
    again = model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=0, custom_generate=speculate)
    assert not torch.equal(again, sample(1, speculate))


def test_samples_of_one_prompt_differ(model, tokenizer, speculate):
    inputs = encode(tokenizer, *PROMPTS[:2])
    torch.manual_seed(0)
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=True, top_k=0, num_return_sequences=3, custom_generate=speculate
    )
    width = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :width], inputs["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out[:, width:].tolist()}) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4, "temperature": 1.5},
        {"top_k": 0, "top_p": 0.3, "temperature": 3.0},
        {"top_k": 0, "min_p": 0.2, "temperature": 3.0, "repetition_penalty": 1.2},
        {"top_k": 8, "typical_p": 0.5, "temperature": 3.0},
        {"top_k": 6, "temperature": 2.0, "renormalize_logits": True, "sequence_bias": [[[97], 3.0]]},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_the_law_of_a_sampled_token(model, tokenizer, folder, settings):
    """Chi-square of 600 draws against the probabilities that transformers itself draws from."""
    inputs = encode(tokenizer, PROMPTS[1])
    count, width = 600, inputs["input_ids"].shape[1]
    asked = {"do_sample": True, "max_new_tokens": 1, **settings}
    scored = model.generate(**inputs, **asked, output_scores=True, return_dict_in_generate=True)
    law = scored.scores[0][0].softmax(-1)
    torch.manual_seed(0)
    custom = generator(folder / "head", config=EngineConfig(slots=50))
    rows = model.generate(**inputs, **asked, num_return_sequences=count, custom_generate=custom)
    drawn = Counter(rows[:, width].tolist())
    assert all(law[token] > 0 for token in drawn)
    expected = {i: count * float(p) for i, p in enumerate(law) if p > 0}
    rare = sum(e for e in expected.values() if e < 5)
    cells = [(drawn[i], e) for i, e in expected.items() if e >= 5]
    if rare >= 5:
        cells.append((count - sum(seen for seen, _ in cells), rare))
    assert len(cells) >= 3
    statistic = sum((seen - e) ** 2 / e for seen, e in cells)
    # a right engine fails at one seed in 10^4: Wilson-Hilferty's cube root of chi-square, 3.72 sigma
    freedom = len(cells) - 1
    assert (statistic / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5


# streams, pipelines


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


# the model afterwards


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


# refusals


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


def test_too_long_for_the_target(model, tokenizer, speculate):
    with pytest.raises(ConfigError, match="the target has 512"):
        model.generate(**encode(tokenizer, PROMPTS[0]), max_new_tokens=600, custom_generate=speculate)
    assert model.config._attn_implementation == "sdpa"
