"""Hugging Face `generate` on the same target: the baseline that users would otherwise run."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from eagle3.target import Target
from eagle3_infer.config import SamplingConfig
from eagle3_infer.metrics import now
from eagle3_infer.request import STAGES, Request, Result
from eagle3_infer.stops import Stops


@contextmanager
def hf_decoder(target: Target) -> Iterator[Any]:
    """A function Requests -> Results that runs `generate` once, with transformers' own attention.

    The model's generation config is put aside meanwhile: its penalties and sampling defaults would give
    another distribution than the one asked for.
    """
    model: Any = target.model
    with target.stock():
        own = model.generation_config
        model.generation_config = GenerationConfig()
        try:
            yield partial(hf_generate, target, model)
        finally:
            model.generation_config = own


def hf_generate(target: Target, model: Any, requests: Sequence[Request]) -> list[Result]:
    """Replies to requests that differ in their prompts alone, as one batch that runs until the last one is done.

    Prefill is the time to the first tokens, which charges it with generate's set-up. Each request has an equal share
    of the seconds.
    """
    first = requests[0]
    ids, mask = left_padded([request.prompt_ids for request in requests], target.device)
    clock = FirstTokenClock()
    torch.manual_seed(hash((first.sampling.seed, first.prompt_id, first.turn)) % 2**31)
    start = now(target.device)
    rows = model.generate(
        ids,
        attention_mask=mask,
        generation_config=generation_config(target, first),
        logits_processor=extra_processors(first.sampling, ids.shape[1]),
        streamer=clock,
        **({"tokenizer": target.tokenizer} if first.stop else {}),
    )
    prefill, decode = clock.first - start, now(target.device) - clock.first
    replies, share = rows[:, ids.shape[1] :].tolist(), len(requests)
    return [
        _as_result(target, request, reply, prefill / share, decode / share, share > 1)
        for request, reply in zip(requests, replies, strict=True)
    ]


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
        stop_strings=list(request.stop) or None,
        **filters,
    )


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


class FirstTokenClock(BaseStreamer):
    """Notes when the first new token is on the host; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.puts = 0
        self.first = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def _eos_ids(target: Target, request: Request) -> list[int]:
    return list(target.eos_ids if request.eos_ids is None else request.eos_ids)


def _as_result(
    target: Target, request: Request, row: list[int], prefill: float, decode: float, batched: bool
) -> Result:
    """Every forward after the prefill is a round of one token."""
    stops = Stops(_eos_ids(target, request), request.stop, request.max_new_tokens, target.tokenizer)
    kept, reason = stops.keep([], row)
    # behind a reply's end comes what the longer ones of its batch made necessary; one alone is shown as it is
    tokens = row[:kept] if batched else row
    return Result(
        token_ids=tokens,
        finish_reason=reason or "stop",
        prompt_tokens=len(request.prompt_ids),
        run_lengths=[1] * (len(tokens) - 1),
        seconds=dict.fromkeys(STAGES, 0.0) | {"prefill": prefill, "other": decode},
    )
