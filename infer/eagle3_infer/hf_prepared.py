"""What transformers' `generate` prepared, as requests. Refuses what cannot be honoured.

`generate` hands its finished lists over: they hold the user's own processors and criteria at their places, so nothing
that was set anywhere can be missed. Knows nothing of models and engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from eagle3.errors import ConfigError
from eagle3_infer.config import SamplingConfig
from eagle3_infer.processors import Processor, adapt
from eagle3_infer.request import Request

# what generate hands to the model's forward and the engine makes itself
_OWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
_EXTRA_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# settings that choose another way to decode
_MODES = (
    *("num_beams", "num_beam_groups", "constraints", "force_words_ids", "penalty_alpha", "dola_layers"),
    *("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"),
)
# in the order in which generate appends them and the engine applies them
_FILTERS = (
    ("temperature", TemperatureLogitsWarper),
    ("top_k", TopKLogitsWarper),
    ("top_p", TopPLogitsWarper),
    ("min_p", MinPLogitsWarper),
)


@dataclass
class Row:
    """One row: left padding and prompt as `generate` has them, and the output so far."""

    pads: list[int]
    prompt_ids: list[int]
    output: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def prompt(self) -> list[int]:
        return [*self.pads, *self.prompt_ids]

    def take(self, tokens: Sequence[int], asked: Sequence[Callable[..., Tensor]]) -> list[int]:
        """Append tokens, one by one, until a criterion says so; returns what was appended."""
        before = len(self.output)
        for token in tokens:
            if self.ended:
                break
            self.output.append(token)
            self.ended = bool(asked) and self._ends(asked)
        return self.output[before:]

    def _ends(self, asked: Sequence[Callable[..., Tensor]]) -> bool:
        ids: Any = torch.tensor([[*self.prompt, *self.output]])
        return any(bool(criterion(ids, None)) for criterion in asked)


@dataclass
class Endings:
    """Where rows end: natively at a length (padding counts, as in `generate`) and at EOS ids, else by asking."""

    max_length: int
    eos_ids: tuple[int, ...]
    asked: list[Any]


def read_endings(criteria: StoppingCriteriaList) -> Endings:
    """The prepared criteria, the user's own among them.

    Raises:
        ConfigError: a criterion whose class is not known to look at its own row alone.
    """
    lengths, eos, asked = [], set(), []
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif kind is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        elif kind in (StopStringCriteria, MaxTimeCriteria):
            asked.append(criterion)
        else:
            raise ConfigError(
                f"stopping criterion {kind.__name__} is not supported: rows are checked one by one, without scores; "
                "supported are MaxLengthCriteria, MaxTimeCriteria, EosTokenCriteria and StopStringCriteria"
            )
    return Endings(min(lengths), tuple(sorted(eos)), asked)


def refuse_other_modes(config: GenerationConfig) -> None:
    for name in _EXTRA_OUTPUTS:
        if getattr(config, name):
            raise ConfigError(f"{name}=True is not supported; drop it, or generate without custom_generate")
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        found = {name: vars(config).get(name) for name in _MODES}
        named = ", ".join(f"{name}={value!r}" for name, value in found.items() if value not in (None, False, 0, 1))
        raise ConfigError(f"generation mode {mode.value} ({named}) is not supported: greedy search or sampling only")


def checked_inputs(model_kwargs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Mask and positions among the inputs of the model's forward; nothing else may be there."""
    odd = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _OWN_INPUTS)
    if odd:
        raise ConfigError(f"model inputs {', '.join(odd)} are not supported; give input_ids and attention_mask")
    cache = model_kwargs.get("past_key_values")
    # generate marks a cache that is not its own, also an empty one that it would have filled
    if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
        raise ConfigError(
            f"past_key_values holds {cache.get_seq_length()} tokens and cannot be read or filled; give the whole "
            "prompt and no cache"
        )
    return {"mask": model_kwargs.get("attention_mask"), "positions": model_kwargs.get("position_ids")}


def split_rows(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[Row]:
    """Rows without their left padding.

    Args:
        input_ids, mask: [rows, width].
        positions: broadcastable to that.
    Raises:
        ConfigError: a mask that hides more than left padding, or positions that do not count from the first token.
    """
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if real.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask has shape {list(real.shape)}, input_ids {list(input_ids.shape)}; both must agree"
        )
    left = real[:, -1] & (real[:, 1:] >= real[:, :-1]).all(1)
    if not left.all():
        raise ConfigError(
            f"attention_mask of row {int((~left).nonzero()[0])} hides tokens behind or among others; only left padding "
            "is supported: tokenizer.padding_side = 'left', and attention_mask given where the prompt has pad ids"
        )
    if positions is not None and not ((positions == real.cumsum(1) - 1) | ~real).all():
        raise ConfigError("position_ids are not supported, unless they count each row's tokens from 0")
    counts = real.sum(1).tolist()
    return [Row(ids[:-count], ids[-count:]) for ids, count in zip(input_ids.tolist(), counts, strict=True)]


def make_requests(
    rows: Sequence[Row], processors: LogitsProcessorList, config: GenerationConfig, endings: Endings
) -> list[Request]:
    """A request per row; rows of one prompt are samples of it."""
    rest, filters = _split_filters(processors, bool(config.do_sample))
    seed = int(torch.randint(2**31 - 1, ())) if config.do_sample else 0
    sampling, adapted = SamplingConfig(seed=seed, **filters), adapt(rest)
    return [
        Request(
            prompt_ids=row.prompt_ids,
            sampling=sampling,
            # generate emits a token before it asks its criteria
            max_new_tokens=max(1, endings.max_length - len(row.prompt)),
            prompt_id=number // config.num_return_sequences,
            sample=number % config.num_return_sequences,
            eos_ids=endings.eos_ids,
            processors=tuple(_behind(row.pads, each) for each in adapted),
        )
        for number, row in enumerate(rows)
    ]


def _split_filters(processors: LogitsProcessorList, do_sample: bool) -> tuple[list[Any], dict[str, Any]]:
    """The processors but for the engine's own filters at their end, and those.

    Other warpers stay processors, with all that stand before them: the engine then filters no more.
    """
    rest, filters = list(processors), {"temperature": float(do_sample)}
    for name, kind in reversed(_FILTERS) if do_sample else ():
        # normalised at the end, logits give the same draws
        while rest and type(rest[-1]) is LogitNormalization:
            rest.pop()
        if rest and type(rest[-1]) is kind and _is_plain(rest[-1]):
            filters[name] = getattr(rest.pop(), name)
    return rest, filters


def _is_plain(warper: Any) -> bool:
    settings = vars(warper)
    return settings.get("min_tokens_to_keep", 1) == 1 and settings.get("filter_value", -torch.inf) == -torch.inf


def _behind(pads: list[int], processor: Processor) -> Processor:
    """The processor sees a row as in `generate`, where padding takes part in lengths and repetitions."""
    return (lambda tokens, logits: processor([*pads, *tokens], logits)) if pads else processor


def join_rows(rows: Sequence[Row], like: Tensor, pad: Tensor | None) -> Tensor:
    """Prompts and outputs [rows, width], short outputs filled up."""
    longest = max(len(row.output) for row in rows)
    fill = 0 if pad is None else int(pad)
    outputs = [row.output + [fill] * (longest - len(row.output)) for row in rows]
    return torch.cat([like, torch.tensor(outputs, dtype=like.dtype, device=like.device)], 1)
