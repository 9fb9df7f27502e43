"""The engine inside transformers: `model.generate(**inputs, custom_generate=generator(head))`, pipelines included.

Does what `generate` would have done, or raises: of `generate` only its prepared inputs, processors and criteria are
taken, so nothing that was set anywhere can be missed. Knows nothing of how the engine decodes.
"""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from eagle3.checkpoint.reference import load_head
from eagle3.errors import ConfigError
from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, RuleConfig, TreeConfig
from eagle3_infer.engine import Engine
from eagle3_infer.hf_model import Engines, driven
from eagle3_infer.hf_prepared import (
    Endings,
    Row,
    checked_inputs,
    join_rows,
    make_requests,
    read_endings,
    refuse_other_modes,
    split_rows,
)
from eagle3_infer.request import Request


def generator(
    head: DraftHead | str | Path,
    tokenizer: Any = None,
    streamer: Any = None,
    tree: TreeConfig | None = None,
    rule: RuleConfig | None = None,
    config: EngineConfig | None = None,
) -> "Generator":
    """A callable for `model.generate(**inputs, custom_generate=...)` that drafts with `head`.

    Rows of the batch are requests of their own, which leave when they end. The model's attention, mode and parameters
    are as they were when the call returns or raises. torch's global seed governs sampling, with other draws than
    `generate`'s own.

    A prompt that with its new tokens is longer than the model's `max_position_embeddings` raises ConfigError, where
    `generate` runs on. An `assistant_model` has no effect: transformers drops it, with its tokenizer, before this
    callable could refuse it, and the drafts are the head's.

    The engine stays on the model for the next call, with its K/V pools and feature buffer: memory for the largest
    batch so far. It goes with this callable or the model, whichever is dropped first (`del model._eagle3` frees all).
    A batch larger than any before makes a new engine, where `config` does not say how many slots to have; an adaptive
    tree then measures the machine again and forgets what it has learned.

    Args:
        head: the folder of a head, or a loaded one on the model's device.
        tokenizer: needed for `stop_strings`, which go to `generate` as usual (not in a GenerationConfig: transformers
            would ask for a tokenizer of its own, and drops it).
        streamer: gets the prompt, then every token of the one row, then the end (a streamer given to `generate`
            itself gets the prompt only: transformers drops it too).
        tree: None = the default tree.
        rule: how drafts are drawn and accepted; None = match. All but `threshold` draw from the model's own law.
        config: None = as many slots as there are rows.
    """
    return Generator(head, tokenizer, streamer, tree or TreeConfig(), rule, config)


class Generator:
    """What `generator` returns; transformers reads the names in `__call__` to see which arguments it takes."""

    def __init__(
        self,
        head: DraftHead | str | Path,
        tokenizer: Any,
        streamer: Any,
        tree: TreeConfig,
        rule: RuleConfig | None,
        config: EngineConfig | None,
    ):
        self.head, self.tokenizer, self.streamer = head, tokenizer, streamer
        self.tree, self.rule, self.config = tree, rule, config

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | list[str] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate` calls once everything is prepared.

        Returns:
            Sequences [rows, width], right-padded; in a GenerateDecoderOnlyOutput where that was asked for.
        Raises:
            ConfigError: something is set that changes the output and that the engine cannot honour.
        """
        refuse_other_modes(generation_config)
        rows = split_rows(input_ids, **checked_inputs(model_kwargs))
        endings = read_endings(stopping_criteria)
        if stop_strings:
            endings.asked.append(self._stop_string_criteria(stop_strings))
        pad = generation_config._pad_token_tensor
        if len(rows) > 1:
            self._check_batch(endings, pad)
        requests = make_requests(rows, logits_processor, generation_config, endings)
        with driven(model) as (target, engines):
            self._run(self._engine(target, engines, len(rows)), requests, rows, endings)
        sequences: Any = join_rows(rows, input_ids, pad)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _stop_string_criteria(self, strings: str | list[str]) -> StopStringCriteria:
        if self.tokenizer is None:
            raise ConfigError("stop_strings need a tokenizer: eagle3_infer.generator(head, tokenizer=tokenizer)")
        return StopStringCriteria(self.tokenizer, strings)

    def _check_batch(self, endings: Endings, pad: Tensor | None) -> None:
        if self.streamer is not None:
            raise ConfigError("a streamer takes one row; give one prompt and num_return_sequences=1, or no streamer")
        if endings.asked and pad is None:
            raise ConfigError("rows may end at different lengths, and nothing fills them up: set pad_token_id")

    def _engine(self, target: Target, engines: Engines, rows: int) -> Engine:
        """The engine on this model, made once; anew where more slots are needed than it has."""
        slots, engine = engines.get(self, (0, None))
        if engine is None or (self.config is None and slots < rows):
            head = load_head(self.head, target) if isinstance(self.head, str | Path) else self.head
            config = self.config or EngineConfig(slots=rows)
            engine = Engine(target, head, self.tree, config, self.rule)
            engines[self] = config.slots, engine
        return engine

    def _run(self, engine: Engine, requests: list[Request], rows: list[Row], endings: Endings) -> None:
        """Append to every row what its request emits, up to where a criterion ends it."""
        engine.prepare(requests)
        self._tell([[rows[0].prompt]])
        # closing: a streamer that raises ends the run too
        with closing(engine.stream(requests)) as updates:
            for update in updates:
                row = rows[update.number]
                self._tell([token] for token in row.take(update.token_ids, endings.asked))
                if update.result is not None:
                    row.ended = True
                elif row.ended:
                    engine.cancel(update.number)
                if all(each.ended for each in rows):
                    break
        if self.streamer is not None:
            self.streamer.end()

    def _tell(self, pieces: Iterable[list[Any]]) -> None:
        """The streamer gets a prompt [1, n] or tokens [1], as from `generate`."""
        if self.streamer is not None:
            for piece in pieces:
                self.streamer.put(torch.tensor(piece))
