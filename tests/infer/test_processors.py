"""Processors against transformers' own, one by one and together; what is not known to be stateless is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer.config import SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request
from eagle3_infer.processors import STATELESS, Edits, Processor, Pure, adapt, build_processors, pure
from eagle3_infer.sampling import Sampler
from oracles.invariants import KnowingHead, random_head, shifted_target
from oracles.overfit import random_prompts
from oracles.tiny import tiny_model

# its annotations name subclasses of Tensor
transformers: Any = hf
VOCAB = 40
EOS = (3, 7)
PROMPT = [5, 9, 5, 11]


def rows(count: int, seed: int = 0) -> list[tuple[list[int], Tensor]]:
    """Token lists that start with PROMPT (few distinct ids, so that sequences recur), and logits."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 12, (count,), generator=draw).tolist()
    return [
        (PROMPT + torch.randint(4, 9, (n,), generator=draw).tolist(), torch.randn(VOCAB, generator=draw) * 4)
        for n in lengths
    ]


def run(processors: tuple[Processor, ...], tokens: list[int], logits: Tensor) -> Tensor:
    before = logits.clone()
    out = logits
    for processor in processors:
        out = processor(tokens, out)
    assert torch.equal(logits, before), "a processor wrote into its input"
    return out


def theirs(processor: Callable[..., Tensor], tokens: list[int], logits: Tensor) -> Tensor:
    return processor(torch.tensor([tokens]), logits[None].clone())[0]


def built(extra=(), **settings) -> tuple[Processor, ...]:
    return build_processors(SamplingConfig(**settings), len(PROMPT), EOS, extra)


def test_nothing_set_costs_nothing():
    assert built() == ()
    assert built(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3) == ()
    # nothing to forbid where nothing ends a reply
    assert build_processors(SamplingConfig(min_tokens=3), 4, ()) == ()


WORDS = [[4], [5, 6], [6, 7, 8], [11, 5], [9, 5, 11, 6]]
BIASES = [[[8], 2.5], [[5], -1.5], [[5, 6], 3.0], [[8, 6], 0.5]]


@pytest.mark.parametrize(
    "settings, processor",
    [
        ({"repetition_penalty": 1.3}, hf.RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.7}, hf.RepetitionPenaltyLogitsProcessor(0.7)),
        ({"logit_bias": ((8, 2.5), (5, -1.5))}, hf.SequenceBiasLogitsProcessor([[[8], 2.5], [[5], -1.5]])),
        ({"bad_words": WORDS}, hf.NoBadWordsLogitsProcessor(WORDS)),
        ({"bad_words": [[3], [7, 3], [4]]}, hf.NoBadWordsLogitsProcessor([[3], [7, 3], [4]], list(EOS))),
        ({"min_tokens": 6}, hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, list(EOS))),
    ],
)
def test_equals_transformers(settings, processor):
    changed = 0
    for tokens, logits in rows(60):
        out = run(built(**settings), tokens, logits)
        assert torch.equal(out, theirs(processor, tokens, logits))
        changed += not torch.equal(out, logits)
    assert changed > 5


def test_only_an_eos_is_a_bad_word():
    """It would never end: transformers drops it too (and then refuses an empty list)."""
    assert built(bad_words=[[3], [7]]) == ()


def test_a_sequence_as_long_as_the_tokens_has_no_effect_yet():
    """transformers' rule: it asks for as many tokens as the whole sequence has."""
    processors = built(bad_words=[[5, 9, 5, 11, 6]])
    logits = torch.zeros(VOCAB)
    assert torch.equal(run(processors, PROMPT, logits), logits)
    assert run(processors, [1, *PROMPT], logits)[6] == -math.inf
    own = hf.NoBadWordsLogitsProcessor([[5, 9, 5, 11, 6]])
    assert torch.equal(theirs(own, PROMPT, logits), logits)


def test_presence_and_frequency_count_the_output_only():
    tokens = [*PROMPT, 6, 6, 9]
    out = run(built(presence_penalty=0.5, frequency_penalty=0.25), tokens, torch.zeros(VOCAB))
    expected = torch.zeros(VOCAB)
    expected[6], expected[9] = -0.5 - 2 * 0.25, -0.5 - 0.25
    assert torch.equal(out, expected)
    assert torch.equal(run(built(presence_penalty=0.5), PROMPT, torch.zeros(VOCAB)), torch.zeros(VOCAB))


def test_all_together_in_transformers_order():
    """Bias before repetition (it scales what the bias left), bans last; custom processors after them."""
    config = GenerationConfig(
        do_sample=False,
        sequence_bias=[[[8], 2.5], [[5], -1.5]],
        repetition_penalty=1.3,
        bad_words_ids=WORDS,
        min_new_tokens=6,
        eos_token_id=list(EOS),
    )
    model = tiny_model(vocab_size=VOCAB)
    model._prepare_special_tokens(config, device="cpu")
    custom = hf.NoRepeatNGramLogitsProcessor(2)
    own = model._get_logits_processor(
        config, input_ids_seq_length=len(PROMPT), logits_processor=LogitsProcessorList([custom]), device="cpu"
    )
    names = ["SequenceBias", "RepetitionPenalty", "NoBadWords", "MinNewTokensLength", "NoRepeatNGram"]
    assert [type(p).__name__.removesuffix("LogitsProcessor") for p in own] == names
    ours = built((custom,), logit_bias=((8, 2.5), (5, -1.5)), repetition_penalty=1.3, bad_words=WORDS, min_tokens=6)
    for tokens, logits in rows(60, seed=1):
        assert torch.equal(run(ours, tokens, logits), theirs(own, tokens, logits))
    # one copy of the logits for all of ours, then the custom one
    assert [type(p) for p in ours] == [Edits, Pure]


def test_penalties_come_between_repetition_and_bad_words():
    logits = torch.full((VOCAB,), 4.0)
    out = run(built(repetition_penalty=2.0, presence_penalty=1.0, bad_words=[[9]]), [*PROMPT, 6, 9], logits)
    assert out[6] == 4.0 / 2 - 1
    assert out[9] == -math.inf


def instances() -> dict[str, LogitsProcessor]:
    """One processor of every class that is let through bare."""
    made = [
        hf.MinLengthLogitsProcessor(8, list(EOS)),
        hf.MinNewTokensLengthLogitsProcessor(4, 3, 3),
        hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.SequenceBiasLogitsProcessor(BIASES),
        hf.NoBadWordsLogitsProcessor(WORDS, list(EOS)),
        hf.ForcedBOSTokenLogitsProcessor(4),
        hf.ForcedEOSTokenLogitsProcessor(9, list(EOS)),
        hf.InfNanRemoveLogitsProcessor(),
        hf.ExponentialDecayLengthPenalty((2, 1.3), list(EOS), 4),
        hf.LogitNormalization(),
        hf.WatermarkLogitsProcessor(VOCAB, "cpu", seeding_scheme="selfhash"),
        hf.SuppressTokensLogitsProcessor([5, 8]),
        hf.SuppressTokensAtBeginLogitsProcessor([5, 8], 4),
        hf.TemperatureLogitsWarper(0.6),
        hf.TopKLogitsWarper(5),
        hf.TopPLogitsWarper(0.8),
        hf.TopHLogitsWarper(0.5),
        hf.MinPLogitsWarper(0.1),
        hf.TypicalLogitsWarper(0.8),
        hf.EpsilonLogitsWarper(0.02),
        hf.EtaLogitsWarper(0.02),
    ]
    return {type(p).__name__: p for p in made}


def test_every_bare_class_is_tried_here():
    assert set(instances()) == STATELESS


@pytest.mark.parametrize("name", sorted(STATELESS))
def test_bare_processors_remember_nothing(name):
    """A used one, asked about nodes in any order, answers as a fresh one does; the adapted one as the bare one."""
    used, (ours,) = instances()[name], adapt([instances()[name]])
    asked = rows(20, seed=2) + rows(20, seed=2)[::-1]
    for tokens, logits in asked:
        fresh = theirs(instances()[name], tokens, logits)
        assert torch.equal(theirs(used, tokens, logits), fresh)
        assert torch.equal(run((ours,), tokens, logits), fresh)


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_the_watermark_reseeds_per_call(scheme):
    used = hf.WatermarkLogitsProcessor(VOCAB, "cpu", seeding_scheme=scheme, context_width=2)
    first = [theirs(used, tokens, logits) for tokens, logits in rows(8)]
    again = [theirs(used, tokens, logits) for tokens, logits in rows(8)[::-1]]
    assert all(torch.equal(a, b) for a, b in zip(first, again[::-1], strict=True))


class Drift(LogitsProcessor):
    """Remembers how often it was called, and writes into its scores."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, 1] += self.calls
        return scores


class Milder(hf.TemperatureLogitsWarper):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    "processor",
    [
        Drift(),
        Milder(0.5),
        hf.PrefixConstrainedLogitsProcessor(lambda batch, tokens: [1], 1),
        transformers.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([PROMPT])),
        transformers.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([PROMPT])),
        transformers.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 1024, 0, 8, "cpu"),
        hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
    ],
    ids=lambda p: type(p).__name__,
)
def test_others_are_refused_by_name(processor):
    with pytest.raises(ConfigError, match=rf"{type(processor).__name__} .*eagle3_infer\.pure"):
        built((processor,))


@pytest.mark.parametrize("processor", [LogitsProcessorList(), 3, None])
def test_what_is_no_processor_is_refused(processor):
    with pytest.raises(ConfigError, match=type(processor).__name__):
        adapt([processor])


def test_pure_lets_a_custom_one_through():
    """It is called as in transformers, on a copy it may write into."""
    tokens, logits = rows(1)[0]
    (wrapped,) = built((pure(Drift()),))
    assert run((wrapped,), tokens, logits)[1] == logits[1] + 1
    (ours,) = adapt([lambda tokens, logits: logits + len(tokens)])
    assert torch.equal(run((ours,), tokens, logits), logits + len(tokens))


def test_pure_checks_the_shape():
    (wrapped,) = adapt([pure(lambda ids, scores: scores[0])])
    with pytest.raises(ConfigError, match=r"shape \[40\]; expected \[1, 40\]"):
        wrapped(PROMPT, torch.zeros(VOCAB))


@pytest.mark.parametrize(
    "processor, token",
    [
        (hf.SequenceBiasLogitsProcessor([[[VOCAB], 1.0]]), VOCAB),
        (hf.NoBadWordsLogitsProcessor([[4, VOCAB + 2]]), VOCAB + 2),
        (hf.SuppressTokensLogitsProcessor([4, -1]), -1),
    ],
)
def test_ids_outside_the_vocabulary_in_transformers_processors(processor, token):
    with pytest.raises(ConfigError, match=f"token id {token}; the target's ids are 0 .. 39"):
        run(adapt([processor]), PROMPT, torch.zeros(VOCAB))


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's reference gives them, token by token."""

    def __init__(self, presence: float, frequency: float, skip: int):
        self.presence, self.frequency, self.skip = presence, frequency, skip

    def __call__(self, input_ids, scores):
        output = input_ids[0, self.skip :].tolist()
        for token in set(output):
            scores[0, token] -= output.count(token) * self.frequency + self.presence
        return scores


def sampler(*processors: Processor, **settings: Any) -> Sampler:
    sampling = SamplingConfig(**settings)
    return Sampler.of(Request(PROMPT, sampling, prompt_id=7, processors=processors), EOS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_raw_logits_that_are_not_finite_keep_their_dtype(temperature, dtype, bad):
    """Processors work in float32; the one to blame is the model. A ban must not hide it, nor be blamed for it."""
    logits = torch.zeros(VOCAB, dtype=dtype)
    logits[5] = bad
    for settings in ({"repetition_penalty": 1.2}, {"min_tokens": 3}, {"bad_words": [[i] for i in range(VOCAB)]}):
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(FloatingPointError, match=f"target's logits are not finite in {name};"):
            sampler(temperature=temperature, **settings).choose(logits, len(PROMPT), PROMPT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings, processors, done",
    [
        ({"bad_words": [[i] for i in range(VOCAB) if i not in EOS], "min_tokens": 3}, (), "left no token"),
        ({}, (lambda tokens, logits: logits * math.nan,), "made a logit of nan"),
        ({}, (lambda tokens, logits: logits + math.inf,), "made a logit of inf"),
    ],
)
def test_processors_that_leave_no_token_are_to_blame(temperature, settings, processors, done):
    with pytest.raises(ConfigError, match=f"prompt 7: .* {done} at position 4;"):
        sampler(*processors, temperature=temperature, **settings).choose(torch.ones(VOCAB), len(PROMPT), PROMPT)


@pytest.mark.parametrize("settings", [{"logit_bias": ((300, 1.0),)}, {"bad_words": ((4, 300),)}])
def test_a_requests_own_ids_are_checked_before_it_runs(target, settings):
    with pytest.raises(ConfigError, match=r"prompt 0 has logit_bias or bad_words of token id 300; ids are 0 \.\. 299"):
        Engine(target).prepare([Request(PROMPT, SamplingConfig(**settings))])
    with pytest.raises(ConfigError, match="token id -1"):
        Engine(target).prepare([Request(PROMPT, SamplingConfig(bad_words=((-1,),)))])


def test_no_token_left_ends_the_run_as_an_error(target):
    """Through the engine, whose own words would blame the dtype."""
    words = [[i] for i in range(target.vocab_size)]
    request = Request([4, 5], SamplingConfig(bad_words=words), prompt_id=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"prompt 3: .* left no token at position 2"):
        Engine(target, random_head(target), TreeConfig(3, 2)).generate_one(request)


@pytest.fixture(scope="module")
def target() -> Target:
    return shifted_target("llama")


def generate(target: Target, prompt: list[int], **settings: Any) -> list[int]:
    """transformers' greedy output."""
    ids = torch.tensor([prompt])
    with target.stock() as model, torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0, **settings
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "settings, own",
    [
        ({"repetition_penalty": 1.5}, lambda out: {}),
        ({"presence_penalty": 2.0, "frequency_penalty": 1.5}, lambda out: {}),
        ({"no_repeat": 1}, lambda out: {}),
        ({}, lambda out: {"bad_words": [out[2:3], out[4:6], out[7:10]]}),
        ({}, lambda out: {"logit_bias": ((out[2], -9.0), (8, 4.0))}),
        ({"repetition_penalty": 0.7}, lambda out: {"bad_words": [out[3:4]], "logit_bias": ((out[2], -9.0),)}),
    ],
)
def test_engine_equals_generate(target, settings, own):
    """Greedy: each node of a tree is judged by its own path, so that whole paths are accepted and right."""
    prompt = random_prompts(target, 1)[0]
    plain = generate(target, prompt)
    settings = {**settings, **own(plain)}
    theirs: dict[str, Any] = {name: settings[name] for name in ("repetition_penalty",) if name in settings}
    custom: list[Any] = []
    if "presence_penalty" in settings:
        custom = [OutputPenalties(settings["presence_penalty"], settings["frequency_penalty"], len(prompt))]
    if (size := settings.pop("no_repeat", None)) is not None:
        custom = [hf.NoRepeatNGramLogitsProcessor(size)]
    if "bad_words" in settings:
        theirs["bad_words_ids"] = settings["bad_words"]
    if "logit_bias" in settings:
        theirs["sequence_bias"] = [[[token], bias] for token, bias in settings["logit_bias"]]
    reply = generate(target, prompt, **theirs, logits_processor=LogitsProcessorList(custom))
    assert reply != plain
    head = KnowingHead(random_head(target), prompt + reply, share=0.8)
    extra = () if "presence_penalty" in settings else tuple(custom)
    for tree in (TreeConfig.chain(3), TreeConfig(depth=4, top_k=3, nodes=12)):
        request = Request(prompt, SamplingConfig(**settings), max_new_tokens=32, processors=extra)
        result = Engine(target, head, tree).generate_one(request)
        assert result.token_ids == reply
        assert result.rounds < 24
