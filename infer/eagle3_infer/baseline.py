"""Hugging Face `generate` on the same target: the baseline that users would otherwise run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from eagle3.target import Target
from eagle3_infer.metrics import now
from eagle3_infer.request import STAGES, Request, Result


@contextmanager
def hf_decoder(target: Target) -> Iterator[Any]:
    """A function Request -> Result that runs `generate` with transformers' own attention.

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


def hf_generate(target: Target, model: Any, request: Request) -> Result:
    """One reply. Prefill is the time to the first token, which charges it with generate's set-up."""
    ids = torch.tensor([request.prompt_ids], device=target.device)
    clock = FirstTokenClock()
    torch.manual_seed(hash((request.sampling.seed, request.prompt_id, request.turn)) % 2**31)
    start = now(target.device)
    row = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=generation_config(target, request),
        streamer=clock,
        **({"tokenizer": target.tokenizer} if request.stop else {}),
    )
    end = now(target.device)
    tokens = row[0, ids.shape[1] :].tolist()
    return _as_result(request, tokens, clock.first - start, end - clock.first, _eos_ids(target, request))


def generation_config(target: Target, request: Request) -> GenerationConfig:
    """The request's settings and nothing of the model's defaults."""
    sampling = request.sampling
    eos = _eos_ids(target, request)
    filters: dict[str, Any] = {}
    if sampling.temperature > 0:
        filters = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return GenerationConfig(
        do_sample=sampling.temperature > 0,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        stop_strings=list(request.stop) or None,
        **filters,
    )


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


def _as_result(request: Request, tokens: list[int], prefill: float, decode: float, eos: list[int]) -> Result:
    """Every forward after the prefill is a round of one token."""
    if tokens[-1] in eos:
        reason = "eos"
    else:
        reason = "length" if len(tokens) >= request.max_new_tokens else "stop"
    return Result(
        token_ids=tokens,
        finish_reason=reason,
        prompt_tokens=len(request.prompt_ids),
        run_lengths=[1] * (len(tokens) - 1),
        seconds=dict.fromkeys(STAGES, 0.0) | {"prefill": prefill, "other": decode},
    )
