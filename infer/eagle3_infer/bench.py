"""Times every mode over the same turns in one process. Prints nothing but progress."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

from eagle3.errors import DataError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.baseline import hf_decoder
from eagle3_infer.engine import Engine
from eagle3_infer.memory import peak_bytes, reset_peak
from eagle3_infer.metrics import now
from eagle3_infer.prompts import Prompt, render
from eagle3_infer.report import ModeRun, Output
from eagle3_infer.request import STAGES, Request, Result
from eagle3_infer.settings import HF, ModePlan, RunSettings

WARM_UP_TOKENS = 16


class Decoder(NamedTuple):
    """How a mode runs a request, and what it does before, untimed."""

    decode: Callable[[Request], Result]
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

    Attributes:
        modes: what was measured so far, also after an interrupt.
        notes: what the reader must know (turns left out).
    """

    def __init__(
        self,
        settings: RunSettings,
        target: Target,
        head: Eagle3Head | None,
        prompts: Sequence[Prompt],
        progress: Shows,
    ):
        self.settings, self.target, self.head = settings, target, head
        self.tokenizer: Any = target.tokenizer
        self.prompts, self.progress = prompts, progress
        self.plans = settings.plans() + ([ModePlan(HF, HF)] if settings.hf else [])
        self.modes = [ModeRun(plan.key, asdict(plan.tree) if plan.tree else {}) for plan in self.plans]
        self.turns: list[Turn] = []
        self.notes: list[str] = []
        self.interrupted = False
        self.first_text = ""

    def prepare(self) -> None:
        """Render every first turn, so that what cannot run is known before anything is timed.

        Raises:
            ConfigError: a tree deeper than the target has positions.
            DataError: a prompt with its new tokens does not fit the target's positions.
        """
        for plan in self.plans:
            if plan.tree is not None:
                plan.tree.check_positions(self.target.max_positions)
        self.first_text, _ = render(self.tokenizer, self.prompts[0].messages([]))
        for index, prompt in enumerate(self.prompts):
            turn = self._turn(index, prompt, 0, [])
            if (excess := self._excess(turn)) > 0:
                raise DataError(
                    f"{prompt.source}: the prompt has {len(turn.request.prompt_ids)} tokens; with "
                    f"{self.settings.max_new_tokens} new ones that is {excess} more than the target's "
                    f"{self.target.max_positions} positions: shorten it or lower --max-new-tokens"
                )

    def run(self) -> None:
        """Warm up and time every mode, `repeats` times; Ctrl-C ends it and keeps what was finished."""
        try:
            for repeat in range(self.settings.repeats):
                for plan, mode in zip(self.plans, self.modes, strict=True):
                    self._run_mode(plan, mode, warm_up=repeat == 0)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.progress.clear()

    def _run_mode(self, plan: ModePlan, mode: ModeRun, warm_up: bool) -> None:
        outputs: list[Output] = []
        with self._decoder(plan) as decoder:
            if warm_up:
                self._warm_up(decoder)
            mode.repeats.append(outputs)
            reset_peak(self.target.device)
            for turn in self._requests(outputs):
                self.progress.show(f"{plan.key}: prompt {turn.prompt.id} turn {turn.turn + 1}")
                outputs.append(self._timed(plan.key, turn, decoder))
            peaks = mode.peak_memory_bytes, peak_bytes(self.target.device)
            mode.peak_memory_bytes = max((peak for peak in peaks if peak is not None), default=None)

    @contextmanager
    def _decoder(self, plan: ModePlan) -> Iterator[Decoder]:
        if plan.kind == HF:
            with hf_decoder(self.target) as decode:
                yield Decoder(decode, lambda requests: None)
        else:
            engine = Engine(self.target, self.head if plan.tree else None, plan.tree)
            yield Decoder(engine.generate_one, engine.prepare)

    def _warm_up(self, decoder: Decoder) -> None:
        request = self._turn(0, self.prompts[0], 0, []).request
        self.progress.show("warming up")
        decoder.decode(replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens)))

    def _requests(self, outputs: list[Output]) -> Iterator[Turn]:
        """The turns to run: made from the replies as they come in the first pass, the same ones ever after."""
        if self.modes[0].repeats and outputs is not self.modes[0].repeats[0]:
            yield from self.turns
            return
        for index, prompt in enumerate(self.prompts):
            replies: list[str] = []
            for number in range(len(prompt.turns)):
                turn = self._turn(index, prompt, number, replies)
                if self._excess(turn) > 0:
                    self.notes.append(f"prompt {prompt.id}: turn {number + 1} left out, longer than the target allows")
                    break
                self.turns.append(turn)
                yield turn
                replies.append(outputs[-1].text)

    def _turn(self, index: int, prompt: Prompt, number: int, replies: Sequence[str]) -> Turn:
        settings = self.settings
        _, ids = render(self.tokenizer, prompt.messages(replies))
        request = Request(
            prompt_ids=ids,
            sampling=settings.sampling,
            max_new_tokens=settings.max_new_tokens,
            stop=settings.stop,
            prompt_id=index,
            turn=number,
        )
        return Turn(prompt, number, request)

    def _excess(self, turn: Turn) -> int:
        return len(turn.request.prompt_ids) + self.settings.max_new_tokens - self.target.max_positions

    def _timed(self, mode: str, turn: Turn, decoder: Decoder) -> Output:
        decoder.prepare([turn.request])
        start = now(self.target.device)
        result = decoder.decode(turn.request)
        return self._output(mode, turn, result, now(self.target.device) - start)

    def _output(self, mode: str, turn: Turn, result: Result, wall: float) -> Output:
        seconds = {stage: result.seconds.get(stage, 0.0) for stage in STAGES}
        if mode != HF:
            # what the engine's own clocks do not see is still time that the user waits
            seconds["other"] += max(0.0, wall - sum(seconds.values()))
        return Output(
            **{**vars(result), "seconds": seconds},
            mode=mode,
            id=turn.prompt.id,
            category=turn.prompt.category,
            turn=turn.turn,
            text=self.tokenizer.decode(result.token_ids, skip_special_tokens=True),
        )
