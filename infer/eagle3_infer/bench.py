"""Times every mode over the same turns in one process. Prints nothing but progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

from eagle3.environment import load_average
from eagle3.errors import ConfigError, DataError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.baseline import hf_decoder
from eagle3_infer.config import EngineConfig
from eagle3_infer.engine import Engine
from eagle3_infer.memory import peak_bytes, reset_peak
from eagle3_infer.metrics import now
from eagle3_infer.models import Assistant
from eagle3_infer.prompts import Prompt, render, word_ids
from eagle3_infer.report import ModeRun, Output
from eagle3_infer.request import STAGES, Request, Result
from eagle3_infer.settings import HF, HF_KEYS, ModePlan, RunSettings, flag

WARM_UP_TOKENS = 16

OnResult = Callable[[int, Result], None]


class Decoder(NamedTuple):
    """How a mode runs requests, telling (index, result) of each as it ends, and what it does before, untimed."""

    decode: Callable[[Sequence[Request], OnResult], Any]
    prepare: Callable[[Sequence[Request]], None]


class Shows(Protocol):
    def show(self, text: str) -> None: ...
    def clear(self) -> None: ...


@dataclass(frozen=True)
class Turn:
    """One request, as every mode gets it."""

    prompt: Prompt
    turn: int
    request: Request


class Bench:
    """Runs the modes. A later turn's history holds the FIRST mode's replies (plain, where it is run), in every
    mode, so that all modes answer the very same requests even where rounding parts them.

    With --batch, all first turns are one group that runs on so many slots, then all second turns, and so on; else a
    prompt's turns follow one another, a group each.

    Attributes:
        modes: what was measured so far, also after an interrupt.
        notes: what the reader must know (turns left out).
        load_before: of the machine, before anything was run.
    """

    def __init__(
        self,
        settings: RunSettings,
        target: Target,
        head: Eagle3Head | None,
        prompts: Sequence[Prompt],
        progress: Shows,
        assistant: Assistant | None = None,
    ):
        """`assistant` drafts for Hugging Face's assisted generation, where that is a mode."""
        self.assistant = assistant
        self.settings, self.target, self.head = settings, target, head
        self.tokenizer: Any = target.tokenizer
        # words that are not to be emitted, as the target's token ids
        words = word_ids(target.tokenizer, settings.bad_words)
        self.sampling = replace(settings.sampling, bad_words=words)
        self.prompts, self.progress = prompts, progress
        self.plans = settings.plans() + settings.hf_plans()
        self.modes = [ModeRun(plan.key, plan.settings) for plan in self.plans]
        self.groups: list[list[Turn]] = []
        self.notes: list[str] = []
        self.interrupted = False
        self.first_text = ""
        self.load_before = load_average()

    @property
    def turns(self) -> list[Turn]:
        return [turn for group in self.groups for turn in group]

    def prepare(self) -> None:
        """Render every first turn, so that what cannot run is known before anything is timed.

        Raises:
            ConfigError: a tree deeper than the target has positions, or ids that the target lacks.
            DataError: a prompt with its new tokens does not fit the target's positions.
        """
        for plan in self.plans:
            if plan.tree is not None:
                plan.tree.check_positions(self.target.max_positions)
        self.first_text, _ = render(self.tokenizer, self.prompts[0].messages([]), self.settings.template_options)
        plain = Engine(self.target)
        for index, prompt in enumerate(self.prompts):
            turn = self._turn(index, 0, [])
            if (excess := self._excess(turn)) > 0:
                raise DataError(
                    f"{prompt.source}: the prompt has {len(turn.request.prompt_ids)} tokens; with "
                    f"{self.settings.max_new_tokens} new ones that is {excess} more than the target's "
                    f"{self.target.max_positions} positions: shorten it or lower --max-new-tokens"
                )
            with in_flags():
                plain.scheduler.check(turn.request)

    def first_requests(self) -> list[Request]:
        """The first turn of every prompt."""
        return [self._turn(index, 0, []).request for index in range(len(self.prompts))]

    def run(self) -> None:
        """Warm up and time every mode, `repeats` times; Ctrl-C ends it and keeps what was finished."""
        try:
            for _ in range(self.settings.repeats):
                for plan, mode in zip(self.plans, self.modes, strict=True):
                    self._run_mode(plan, mode)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.progress.clear()

    def _run_mode(self, plan: ModePlan, mode: ModeRun) -> None:
        with self._decoder(plan) as decoder:
            self._warm_up(decoder)
            outputs: list[Output] = []
            mode.repeats.append(outputs)
            reset_peak(self.target.device)
            for group in self._each_group(outputs):
                self._run_group(plan.key, group, decoder, outputs)
            peaks = mode.peak_memory_bytes, peak_bytes(self.target.device)
            mode.peak_memory_bytes = max((peak for peak in peaks if peak is not None), default=None)

    @contextmanager
    def _decoder(self, plan: ModePlan) -> Iterator[Decoder]:
        if plan.kind in HF_KEYS:
            at_once = self.settings.batch if plan.kind == HF else 1
            with hf_decoder(self.target, plan.kind, self.assistant) as generate:
                yield Decoder(in_batches(generate, at_once), lambda requests: None)
        else:
            s = self.settings
            config = EngineConfig(slots=s.batch, prefill_rows=s.prefill_rows, graphs=s.graphs)
            engine = Engine(self.target, self.head if plan.tree else None, plan.tree, config, plan.rule)
            yield Decoder(engine.generate, engine.prepare)

    def _warm_up(self, decoder: Decoder) -> None:
        self.progress.show("warming up")
        tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        at_once = range(min(self.settings.batch, len(self.prompts)))
        requests = [replace(self._turn(index, 0, []).request, max_new_tokens=tokens) for index in at_once]
        decoder.decode(requests, lambda index, result: None)

    # the turns: made from the replies as they come in the first pass, the same ones ever after

    def _each_group(self, outputs: list[Output]) -> Iterator[list[Turn]]:
        if self.modes[0].repeats and outputs is not self.modes[0].repeats[0]:
            yield from self.groups
            return
        all_prompts = list(range(len(self.prompts)))
        for indices in [all_prompts] if self.settings.batch > 1 else [[index] for index in all_prompts]:
            yield from self._first_pass(indices, outputs)

    def _first_pass(self, indices: list[int], outputs: list[Output]) -> Iterator[list[Turn]]:
        """Turn after turn of these prompts, as long as one has another."""
        replies: dict[int, list[str]] = {index: [] for index in indices}
        while group := [turn for index in replies if (turn := self._next_turn(index, replies[index]))]:
            self.groups.append(group)
            yield group
            said = {output.id: output.text for output in outputs[-len(group) :]}
            replies = {
                index: [*known, said[self.prompts[index].id]]
                for index, known in replies.items()
                if self.prompts[index].id in said
            }

    def _next_turn(self, index: int, replies: Sequence[str]) -> Turn | None:
        prompt = self.prompts[index]
        if len(replies) == len(prompt.turns):
            return None
        turn = self._turn(index, len(replies), replies)
        if self._excess(turn) > 0:
            self.notes.append(f"prompt {prompt.id}: turn {turn.turn + 1} left out, longer than the target allows")
            return None
        return turn

    def _turn(self, index: int, number: int, replies: Sequence[str]) -> Turn:
        settings, prompt = self.settings, self.prompts[index]
        _, ids = render(self.tokenizer, prompt.messages(replies), settings.template_options)
        request = Request(
            prompt_ids=ids,
            sampling=self.sampling,
            max_new_tokens=settings.max_new_tokens,
            stop=settings.stop,
            prompt_id=index,
            turn=number,
            logprobs=settings.logprobs,
        )
        return Turn(prompt, number, request)

    def _excess(self, turn: Turn) -> int:
        return len(turn.request.prompt_ids) + self.settings.max_new_tokens - self.target.max_positions

    # one group

    def _run_group(self, mode: str, group: list[Turn], decoder: Decoder, outputs: list[Output]) -> None:
        """Time the group and append its outputs, in its order; of an interrupted one those that were finished."""
        requests, results = [turn.request for turn in group], {}

        def done(index: int, result: Result) -> None:
            results[index] = result
            self.progress.show(f"{mode}: turn {group[0].turn + 1}, {len(results)} of {len(group)} prompts")

        self.progress.show(f"{mode}: prompt {group[0].prompt.id} turn {group[0].turn + 1}")
        decoder.prepare(requests)
        start = now(self.target.device)
        try:
            decoder.decode(requests, done)
        finally:
            wall = now(self.target.device) - start
            booked = sum(sum(result.seconds.values()) for result in results.values())
            # what the engine's own clocks do not see is still time that the user waits
            rest = 0.0 if mode in HF_KEYS or len(results) < len(group) else max(0.0, wall - booked)
            outputs += [
                self._output(mode, group[index], results[index], rest / len(group)) for index in sorted(results)
            ]

    def _output(self, mode: str, turn: Turn, result: Result, rest: float) -> Output:
        seconds = {stage: result.seconds.get(stage, 0.0) for stage in STAGES}
        seconds["other"] += rest
        return Output(
            **{**vars(result), "seconds": seconds},
            mode=mode,
            id=turn.prompt.id,
            category=turn.prompt.category,
            prompt_set=turn.prompt.prompt_set,
            turn=turn.turn,
            text=self.tokenizer.decode(result.token_ids, skip_special_tokens=True),
        )


def in_batches(
    generate: Callable[[Sequence[Request]], list[Result]], size: int
) -> Callable[[Sequence[Request], OnResult], None]:
    """One batch after the other, each as long as its longest reply: how `generate` serves many prompts."""

    def decode(requests: Sequence[Request], done: OnResult) -> None:
        numbered = iter(enumerate(requests))
        while batch := list(islice(numbered, size)):
            numbers, each = zip(*batch, strict=True)
            for number, result in zip(numbers, generate(each), strict=True):
                done(number, result)

    return decode


@contextmanager
def in_flags() -> Iterator[None]:
    """What is wrong with a request's settings is said of the flags that set them."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("logit_bias", flag("logit_bias")).replace("bad_words", flag("bad_word"))
        raise ConfigError(text) from error
