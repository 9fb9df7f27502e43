"""The same prompts sent to an OpenAI-compatible server: it renders and decodes; measured are its streams from outside,
and its own counters around the run. Prints nothing but progress."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from eagle3_infer.config import SamplingConfig
from eagle3_infer.endpoint import METRICS, Endpoint, ServerError
from eagle3_infer.metrics_page import Series, count, find_engine, parse_page
from eagle3_infer.prompts import Message, Prompt
from eagle3_infer.server_report import Answer, Repeat, token_count
from eagle3_infer.settings import RunSettings

WARM_UP = "Say hello."
WARM_UP_TOKENS = 16
# so many failures one after the other end the run
MOST_FAILURES = 5
# counters may come a moment after the reply that they count
_SETTLE_TRIES, _SETTLE_SECONDS = 4, 0.5


def chat_body(settings: RunSettings, model: str, messages: Sequence[Message], most: int) -> dict[str, Any]:
    """A request's JSON. What is no part of OpenAI's API (top_k, min_p, ...) is sent only where it is set."""
    sampling, default = settings.sampling, SamplingConfig()
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
    given = {name: value for name in names if (value := getattr(sampling, name)) != getattr(default, name)}
    if sampling.logit_bias:
        given["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if settings.template_options:
        given["chat_template_kwargs"] = settings.template_options
    if settings.stop:
        given["stop"] = list(settings.stop)
    if sampling.temperature > 0:
        given["seed"] = sampling.seed
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": most,
        "temperature": sampling.temperature,
        **given,
    }


class ServerBench:
    """Sends all prompts `repeats` times, `batch` conversations at once; a later turn's history holds the replies.

    Attributes:
        repeats: what was measured so far, also after an interrupt.
        notes: what the reader must know.
    """

    def __init__(self, settings: RunSettings, endpoint: Endpoint, model: str, prompts: Sequence[Prompt], progress: Any):
        self.settings, self.endpoint, self.model = settings, endpoint, model
        self.prompts, self.progress = prompts, progress
        self.repeats: list[Repeat] = []
        self.notes: list[str] = []
        self.interrupted = self.gave_up = False
        self._in_a_row, self._began = 0, 0.0
        # where the engine shows its counters, once it is known
        self.metrics_path: str | None = None

    def run(self) -> None:
        """Warm up and measure; Ctrl-C and a server that fails again and again end it and keep what was finished.

        Raises:
            ServerError: the very first request fails.
        """
        self._warm_up()
        try:
            for _ in range(self.settings.repeats):
                if not self.gave_up:
                    self._repeat()
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self.progress.clear()
        self.notes += self._notes()

    def _warm_up(self) -> None:
        """Not with the prompts themselves: the server may remember what it has read."""
        self.progress.show("warming up")
        message = {"role": "user", "content": WARM_UP}
        most = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        self.endpoint.chat(chat_body(self.settings, self.model, [message], most))

    def _repeat(self) -> None:
        repeat = Repeat()
        self.repeats.append(repeat)
        before = self._pages()
        self._began = time.perf_counter()
        tries = 1
        try:
            self._converse_all(repeat)
            tries = _SETTLE_TRIES
        finally:
            order = {prompt.id: place for place, prompt in enumerate(self.prompts)}
            repeat.answers.sort(key=lambda answer: (order[answer.prompt.id], answer.turn))
            if before:
                self._count(repeat, before, tries)

    def _converse_all(self, repeat: Repeat) -> None:
        with ThreadPoolExecutor(self.settings.batch) as pool:
            try:
                futures = [pool.submit(self._converse, prompt, repeat) for prompt in self.prompts]
                for done, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    self.progress.show(f"server: {done} of {len(futures)} prompts, {len(repeat.failures)} failed")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.endpoint.abort()
                raise

    def _converse(self, prompt: Prompt, repeat: Repeat) -> None:
        """Turn after turn; a turn that fails ends the conversation."""
        replies: list[str] = []
        while len(replies) < len(prompt.turns) and not self.gave_up:
            body = chat_body(self.settings, self.model, prompt.messages(replies), self.settings.max_new_tokens)
            began = self._elapsed()
            try:
                reply = self.endpoint.chat(body)
            except ServerError as error:
                repeat.lost.append((began, self._elapsed()))
                self._failed(repeat, f"prompt {prompt.id}, turn {len(replies) + 1}: {error}")
                return
            repeat.answers.append(Answer(prompt, len(replies), reply))
            repeat.seconds = self._elapsed()
            self._in_a_row = 0
            replies.append(reply.text)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _failed(self, repeat: Repeat, what: str) -> None:
        if self.endpoint.aborted:
            return
        repeat.failures.append(what)
        self._in_a_row += 1
        self.gave_up = self.gave_up or self._in_a_row >= MOST_FAILURES

    def _pages(self) -> dict[str, list[Series]]:
        """The pages that answer, by path: that of the engine's counters alone, once it is known."""
        pages = {}
        for path in METRICS if self.metrics_path is None else (self.metrics_path,):
            if (text := self.endpoint.page(path)) is None:
                continue
            pages[path] = parse_page(text)
            if find_engine(pages[path]):
                self.metrics_path = path
                break
        return pages

    def _count(self, repeat: Repeat, before: dict[str, list[Series]], tries: int) -> None:
        told = token_count(repeat.answers) or 0
        for attempt in range(tries):
            if attempt:
                time.sleep(_SETTLE_SECONDS)
            after = self._pages()
            path = self.metrics_path or ""
            both = path in before and path in after
            repeat.counted = count(before[path], after[path], self.model) if both else None
            if repeat.counted is None or (repeat.counted.tokens or 0) >= told:
                return

    def _notes(self) -> list[str]:
        notes = []
        failed = sum(len(repeat.failures) for repeat in self.repeats)
        if failed and not self.interrupted:
            first = next(repeat.failures[0] for repeat in self.repeats if repeat.failures)
            notes.append(f"{failed} requests failed, the figures are without them; the first: {first}")
        if self.gave_up:
            notes.append(f"gave up after {MOST_FAILURES} failures in a row")
        if any(token_count(repeat.answers) is None for repeat in self.repeats):
            notes.append("the server tells no usage, or one that cannot be: its tokens are not counted")
        if thoughts := sum(answer.reply.only_thoughts for repeat in self.repeats for answer in repeat.answers):
            notes.append(
                f"{thoughts} replies are thoughts alone: their text, and their place in a later turn's history, is "
                "empty; a larger --max-new-tokens may leave room for an answer"
            )
        if self.settings.repeats > 1:
            notes.append("a server that caches prefixes answers later repeats' first tokens sooner")
        if any(repeat.counted and repeat.counted.all_models for repeat in self.repeats):
            notes.append(f"the server's counters know no model {self.model}: they are of all its models")
        return notes + self._foreign()

    def _foreign(self) -> list[str]:
        """Counters are of all clients, and of replies that never came whole; that of the warm-up may come late."""
        for repeat in self.repeats:
            told = token_count(repeat.answers)
            tokens = repeat.counted.tokens if repeat.counted else None
            if told is not None and tokens is not None and tokens > told + WARM_UP_TOKENS and not repeat.lost:
                return [
                    f"the engine counted {tokens} tokens and this run got {told}: others used the server meanwhile, "
                    "and its acceptance is of their requests, too"
                ]
        return []
