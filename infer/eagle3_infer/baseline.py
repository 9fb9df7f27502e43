"""Hugging Face `generate` on the same target, plain or drafting: the baselines that users would otherwise run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer.config import SamplingConfig
from eagle3_infer.metrics import now
from eagle3_infer.models import Assistant
from eagle3_infer.request import STAGES, Request, Result
from eagle3_infer.settings import HF, HF_ASSISTED, HF_PROMPT_LOOKUP
from eagle3_infer.stops import Stops

# what transformers' own examples take
LOOKUP_TOKENS = 10


@contextmanager
def hf_decoder(target: Target, kind: str = HF, assistant: Assistant | None = None) -> Iterator[Any]:
    """A function Requests -> Results that runs `generate` once, with transformers' own attention.

    The model's generation config is put aside meanwhile: its penalties and sampling defaults would give
    another distribution than the one asked for.

    Args:
        kind: HF, HF_PROMPT_LOOKUP (drafts are what followed the last tokens before) or HF_ASSISTED (of `assistant`).
            The last two take one request at a time.
    """
    model: Any = target.model
    drafting = _drafting(target, kind, assistant)
    with target.stock():
        own = model.generation_config
        model.generation_config = GenerationConfig()
        try:
            yield partial(hf_generate, target, model, drafting=drafting)
        finally:
            model.generation_config = own


def _drafting(target: Target, kind: str, assistant: Assistant | None) -> dict[str, Any]:
    """What `generate` is told beside the request's settings; nothing where it does not draft."""
    if kind == HF_PROMPT_LOOKUP:
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if kind != HF_ASSISTED:
        return {}
    assert assistant is not None
    # as many ids need not be the same ids
    alike = assistant.model.config.get_text_config().vocab_size == target.vocab_size
    if alike and assistant.tokenizer.get_vocab() == target.tokenizer.get_vocab():
        return {"assistant_model": assistant.model}
    # drafts are then carried over as text
    tokenizers = {"tokenizer": target.tokenizer, "assistant_tokenizer": assistant.tokenizer}
    return {"assistant_model": assistant.model, **tokenizers}


def hf_generate(
    target: Target, model: Any, requests: Sequence[Request], drafting: Mapping[str, Any] = MappingProxyType({})
) -> list[Result]:
    """Replies to requests that differ in their prompts alone, as one batch that runs until the last one is done.

    Prefill is the time to the first tokens, which charges it with generate's set-up; where that forward verified drafts
    as well, `split_seconds` parts the two. Each request has an equal share of the seconds.

    Raises:
        ConfigError: transformers does not draft for such a target or with such settings.
    """
    first = requests[0]
    ids, mask = left_padded([request.prompt_ids for request in requests], target.device)
    rounds = Rounds()
    torch.manual_seed(hash((first.sampling.seed, first.prompt_id, first.turn)) % 2**31)
    start = now(target.device)
    with rounds.counting(model), _refusing(drafting):
        rows = model.generate(
            ids,
            attention_mask=mask,
            generation_config=generation_config(target, first),
            logits_processor=extra_processors(first.sampling, ids.shape[1]),
            streamer=rounds,
            **stopping(target, first, ids.shape[1], bool(drafting)),
            **drafting,
        )
    prefill, decode = split_seconds(rounds.first - start, now(target.device) - rounds.first, rounds.runs)
    replies, share = rows[:, ids.shape[1] :].tolist(), len(requests)
    # behind a reply's end comes what the longer ones of its batch made necessary, or drafts past a stop string; the
    # reply of one that does not draft is shown as it is
    trim = share > 1 or bool(drafting)
    return [
        _as_result(target, request, reply, rounds.runs, prefill / share, decode / share, trim)
        for request, reply in zip(requests, replies, strict=True)
    ]


@contextmanager
def _refusing(drafting: Mapping[str, Any]) -> Iterator[None]:
    """What transformers says of drafting for this model is said of the flag."""
    try:
        yield
    except ValueError as error:
        if not drafting:
            raise
        name = "assisted" if "assistant_model" in drafting else "prompt_lookup"
        raise ConfigError(f"--hf {name}: transformers refuses it: {' '.join(str(error).split())}") from error


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, S]. A row is padded with its own first token, which the mask hides from the
    model: the repetition penalty, which knows no mask, then sees no token that the prompt lacks."""
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    ids = [[prompt[0]] * pad + list(prompt) for prompt, pad in zip(prompts, missing, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in missing]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def generation_config(target: Target, request: Request) -> GenerationConfig:
    """The request's settings and nothing of the model's defaults."""
    sampling = request.sampling
    eos = _eos_ids(target, request)
    filters: dict[str, Any] = {}
    if sampling.temperature > 0:
        filters = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        filters["min_p"] = sampling.min_p or None
    return GenerationConfig(
        do_sample=sampling.temperature > 0,
        max_new_tokens=request.max_new_tokens,
        # more cannot be reached, and transformers would say so of every prompt
        min_new_tokens=min(sampling.min_tokens, request.max_new_tokens) or None,
        repetition_penalty=sampling.repetition_penalty,
        bad_words_ids=[list(word) for word in sampling.bad_words] or None,
        sequence_bias=[[[token], value] for token, value in sampling.logit_bias] or None,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        **filters,
    )


def stopping(target: Target, request: Request, prompt_width: int, drafts: bool) -> dict[str, Any]:
    """What tells `generate` of the request's stop strings."""
    if not request.stop:
        return {}
    if drafts:
        return {"stopping_criteria": [StopStrings(target.tokenizer, request.stop, prompt_width)]}
    return {"tokenizer": target.tokenizer, "stop_strings": list(request.stop)}


class StopStrings(StoppingCriteria):
    """Anywhere in the reply, the columns from `prompt_width` on. transformers' own criterion looks at the end alone,
    which accepted drafts may have passed, and is handed to assistants without the tokenizer that it needs."""

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt_width: int):
        self.tokenizer, self.strings, self.prompt_width = tokenizer, strings, prompt_width

    def __call__(self, input_ids: Tensor, scores: Any, **more: Any) -> Tensor:  # type: ignore[override]
        replies = self.tokenizer.batch_decode(input_ids[:, self.prompt_width :], clean_up_tokenization_spaces=False)
        found = [any(string in reply for string in self.strings) for reply in replies]
        return torch.tensor(found, device=input_ids.device)


def extra_processors(sampling: SamplingConfig, prompt_width: int) -> list[LogitsProcessor]:
    """What transformers has no setting for."""
    if not sampling.presence_penalty and not sampling.frequency_penalty:
        return []
    return [OutputPenalties(sampling.presence_penalty, sampling.frequency_penalty, prompt_width)]


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties: counted over the output alone, the columns from `prompt_width` on."""

    def __init__(self, presence: float, frequency: float, prompt_width: int):
        self.presence, self.frequency, self.prompt_width = presence, frequency, prompt_width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[:, self.prompt_width :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class Rounds(BaseStreamer):
    """Notes how many tokens each forward of the target gave, and when the first were on the host.

    Attributes:
        runs: tokens per forward (of each row of a batch), the prefill's first.
    """

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.first = 0.0
        self._forwards = 0
        self._prompt_was_put = False

    @contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Count the model's forwards meanwhile, and hold the tokens against them."""

        def count(module: Any, args: Any) -> None:
            self._forwards += 1

        hook = model.register_forward_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()
        assert self._forwards == len(self.runs), (self._forwards, self.runs)

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_was_put:
            self._prompt_was_put = True
            return
        if not self.runs:
            self.first = time.perf_counter()
        # a draft's forward gives [1, tokens], any other one token of each row [B]
        self.runs.append(value.shape[1] if value.dim() == 2 else 1)

    def end(self) -> None:
        pass


def split_seconds(first: float, rest: float, runs: Sequence[int]) -> tuple[float, float]:
    """Prefill and decoding, of the seconds to the first tokens and those after them.

    A first forward that gave more than one token read the prompt and verified drafts in one: it is charged with a round
    of mean length, as `run_lengths` counts one. Where no round came after it nothing tells how long: it stays prefill.
    """
    if runs[0] == 1 or len(runs) == 1:
        return first, rest
    round_seconds = min(first, rest / (len(runs) - 1))
    return first - round_seconds, rest + round_seconds


def run_lengths(runs: Sequence[int], count: int) -> list[int]:
    """Of the rounds that gave `count` tokens, the first of them being the prefill's.

    A prefill that verified drafts as well, and gave more than one token, is also a round.
    """
    rounds = [runs[0] - 1, *runs[1:]] if runs[0] > 1 else list(runs[1:])
    kept, left = [], count - 1
    for run in rounds:
        if left > 0:
            kept.append(min(run, left))
            left -= run
    return kept


def _eos_ids(target: Target, request: Request) -> list[int]:
    return list(target.eos_ids if request.eos_ids is None else request.eos_ids)


def _as_result(
    target: Target, request: Request, row: list[int], runs: list[int], prefill: float, decode: float, trim: bool
) -> Result:
    stops = Stops(_eos_ids(target, request), request.stop, request.max_new_tokens, target.tokenizer)
    kept, reason = stops.keep([], row)
    tokens = row[:kept] if trim else row
    return Result(
        token_ids=tokens,
        finish_reason=reason or "stop",
        prompt_tokens=len(request.prompt_ids),
        run_lengths=run_lengths(runs, len(tokens)),
        seconds=dict.fromkeys(STAGES, 0.0) | {"prefill": prefill, "other": decode},
    )
