"""Turn a chat into rows of token ids with the assistant spans marked, from render boundaries alone.

The span of an assistant turn is what a head must draft: everything after the rendered history with its
generation prompt, up to and including the end-of-turn token. Text is never searched for markers and no
template tag is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3.chats import render_ids, render_text
from eagle3.errors import DataError
from eagle3_train.chats import Chat

# contents that have nothing in common
PROBES = ("Alpha", "Omega!")
# rows of the same chats change with it: prepared rows of another rule are not used
MASK_RULE = 2
# a template that leaves these out renders another reply than the one that was given
_REPLY_KEYS = ("tool_calls", "reasoning_content")


@dataclass(frozen=True)
class Row:
    """`input_ids` [T]; `span_ids` [T]: 0 = not supervised, n = inside the n-th assistant span of this row.

    `prompt_ids` are the ids up to the chat's first reply: rows that share them belong to one split.
    """

    input_ids: list[int]
    span_ids: list[int]
    prompt_ids: list[int]


@dataclass(frozen=True)
class Turn:
    """One assistant turn: its history, its reply with the end-of-turn, both as the template renders them."""

    prefix: list[int]
    reply: list[int]
    rendered: list[int]


@dataclass(frozen=True)
class TurnEnd:
    """Ids of the template's text after an assistant's content; the first `kept` of them end the reply."""

    ids: list[int]
    kept: int


# ids that were found to end turns, and notes
Learned = tuple[frozenset[int], dict[str, str]]


class ChatRenderer:
    """Renders chats of one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        eos_ids: the target's EOS ids; the first of them after a reply ends its span. Where the template puts none
            there, the first special token does; where there is none either, the span ends with the reply's text.
        template_options: extra variables for the template (such as `enable_thinking`).

    `notes` (key -> sentence) gathers what the template leaves out of the chats.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = (), template_options: dict | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the target's tokenizer has no chat template: chats cannot be rendered")
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = frozenset(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)
        self.vocab_size = len(tokenizer)
        self.notes: dict[str, str] = {}
        self._options = template_options or {}
        self._ends: dict[tuple, TurnEnd] = {}
        self._seen: set[str] = set()
        self._others_end_ids: frozenset[int] = frozenset()

    @property
    def end_ids(self) -> frozenset[int]:
        """EOS ids, and the last token of every turn's end that was met: a draft vocabulary needs them all."""
        own = {end.ids[end.kept - 1] for end in self._ends.values() if end.kept}
        return self.eos_ids | self._others_end_ids | own

    @property
    def learned(self) -> Learned:
        """What the chats that were rendered so far taught, for another renderer of the same settings."""
        return self.end_ids, self.notes

    def merge(self, learned: Learned) -> None:
        """Take over what another one learned; of two notes the one that was there stays."""
        end_ids, notes = learned
        self._others_end_ids |= end_ids
        self.notes = {**notes, **self.notes}

    def rows(self, chat: Chat) -> list[Row]:
        """Render one chat to one row, or to more where the template rewrites history.

        A turn joins the running row as long as the history that the template renders for it continues that
        row; where it does not (templates that drop earlier thinking), the row is closed and the turn starts a
        new one, its history rendered as at inference and not supervised. Generated ids stay in place in later
        history. Assistant turns before the first user turn answer nothing: they are history only. A row ends
        with its last span, so template text after the last end-of-turn and messages without a reply are left
        out.

        Raises:
            DataError: naming the chat and the turn, if the template fails or the reply cannot be located.
        """
        rows: list[Row] = []
        before: Turn | None = None
        for index in self._reply_indexes(chat):
            turn = self.turn(chat, index)
            joined = before is not None and turn.prefix[: len(before.rendered)] == before.rendered
            history = turn.prefix[len(before.rendered) :] if joined and before else turn.prefix
            span = 1 + max(rows[-1].span_ids) if joined else 1
            ids, spans = history + turn.reply, [0] * len(history) + [span] * len(turn.reply)
            if joined:
                ids, spans = rows[-1].input_ids + ids, rows.pop().span_ids + spans
            first = rows[0].prompt_ids if rows else ids[: spans.index(1)] if 1 in spans else ids
            rows.append(Row(ids, spans, first))
            before = turn
        return rows

    def turn(self, chat: Chat, index: int) -> Turn:
        """Render assistant turn `index` of a chat."""
        where = f"{chat.source or 'chat'}: messages[{index}]"
        prefix = self._render(chat, index, where, add_generation_prompt=True)
        full = self._render(chat, index + 1, where)
        self._note_what_is_left_out(chat, index, where)
        end, rendered_end = self._locate_end(chat, index, full, where)
        rendered = full[:rendered_end]
        finished = chat.finished or any(m.role == "assistant" for m in chat.messages[index + 1 :])
        ids = chat.messages[index].token_ids
        if ids is not None:
            return Turn(prefix, self._generated(ids, end, finished, where), rendered)
        content_end = rendered_end if finished else rendered_end - end.kept
        if full[: len(prefix)] == prefix:
            return Turn(prefix, full[len(prefix) : content_end], rendered)
        reply = self._reply_alone(chat, index, where) + (end.ids[: end.kept] if finished else [])
        return Turn(prefix, reply, rendered)

    def _reply_indexes(self, chat: Chat) -> list[int]:
        roles = [m.role for m in chat.messages]
        asked = roles.index("user") if "user" in roles else len(roles)
        return [i for i, role in enumerate(roles) if role == "assistant" and i > asked]

    def _note_what_is_left_out(self, chat: Chat, index: int, where: str) -> None:
        """DataError if the template renders nothing of a reply; else a note on the first use of what it ignores."""
        message, full = chat.messages[index], None
        for key in _REPLY_KEYS:
            empty = key == "tool_calls" and not message.content and message.token_ids is None
            if key not in message.extra or (key in self._seen and not empty):
                continue
            self._seen.add(key)
            full = full or self._text(chat, index + 1, where)
            extra = {k: v for k, v in message.extra.items() if k != key}
            if self._text(chat, index, where, [replace(message, extra=extra).plain()]) != full:
                continue
            if empty:
                raise DataError(
                    f"{where}: the chat template does not render {key!r}, so this turn would be empty; use a target "
                    "whose template does, or leave such chats out"
                )
            self.notes[key] = f"the chat template does not render {key!r} (first: {where}): replies lack it"
        if chat.tools and "tools" not in self._seen:
            self._seen.add("tools")
            if self._text(replace(chat, tools=None), index + 1, where) == self._text(chat, index + 1, where):
                self.notes["tools"] = f"the chat template does not render 'tools' (first: {where}): prompts lack them"

    def _generated(self, ids: list[int], end: TurnEnd, finished: bool, where: str) -> list[int]:
        if ids and max(ids) >= self.vocab_size:
            raise DataError(f"{where}: token id {max(ids)} is outside the tokenizer's {self.vocab_size} tokens")
        ends = self.eos_ids | {end.ids[end.kept - 1]} if end.kept else self.eos_ids
        if not finished or (ids and ids[-1] in ends):
            return ids
        return ids + end.ids[: end.kept]

    def _locate_end(self, chat: Chat, index: int, full: list[int], where: str) -> tuple[TurnEnd, int]:
        """The turn's end and the index in `full` just behind its last kept token."""
        key = (*(m.role for m in chat.messages[: index + 1]), bool(chat.tools))
        for attempt in range(2):
            if attempt or key not in self._ends:
                self._ends[key] = self._probe_end(chat, index, where)
            end = self._ends[key]
            stop = len(full) - (len(end.ids) - end.kept)
            # a special token splits the text before tokenising, so what follows it has the same ids always
            checked = end.ids[end.kept - 1 :] if end.kept else end.ids
            if full[len(full) - len(checked) :] == checked:
                return end, stop
        if "tool_calls" in chat.messages[index].extra and full[-1] in self.eos_ids:
            # Llama 3.1's habit: a call of a tool ends with another token than a text
            return TurnEnd(full[-1:], 1), len(full)
        raise DataError(f"{where}: the end of this turn cannot be located: its text merges with the template's")

    def _probe_end(self, chat: Chat, index: int, where: str) -> TurnEnd:
        """Find the text after a reply as what two renderings with different replies end in."""
        texts = self._probe_texts(chat, index, where)
        if texts[0] == texts[1]:
            raise DataError(f"{where}: the chat template does not render this turn's content")
        length = _common_suffix(*texts)
        ids = self.tokenizer(texts[0][len(texts[0]) - length :], add_special_tokens=False)["input_ids"]
        kept = next((i + 1 for i, token in enumerate(ids) if token in self.eos_ids), 0)
        kept = kept or next((i + 1 for i, token in enumerate(ids) if token in self.special_ids), 0)
        return TurnEnd(ids, kept)

    def _probe_texts(self, chat: Chat, index: int, where: str) -> list[str]:
        return [self._text(chat, index, where, [{"role": "assistant", "content": p}]) for p in PROBES]

    def _reply_alone(self, chat: Chat, index: int, where: str) -> list[int]:
        """Tokenise the reply apart from its history, where the tokenizer would merge the two."""
        before = self._text(chat, index, where, add_generation_prompt=True)
        full = self._text(chat, index + 1, where)
        if not full.startswith(before):
            raise DataError(
                f"{where}: the history with the generation prompt is not a prefix of this rendered turn, so "
                "its first token is unknown; give the generated 'token_ids', or matching template options"
            )
        reply = full[len(before) : len(full) - _common_suffix(*self._probe_texts(chat, index, where))]
        return self.tokenizer(reply, add_special_tokens=False)["input_ids"]

    def _render(self, chat: Chat, stop: int, where: str, **options: Any) -> list[int]:
        try:
            return render_ids(self.tokenizer, chat.plain(stop), **options, **self._options_of(chat))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _text(self, chat: Chat, stop: int, where: str, then: Sequence[dict] = (), **options: Any) -> str:
        """The first `stop` messages, and `then` others."""
        try:
            return render_text(self.tokenizer, [*chat.plain(stop), *then], **options, **self._options_of(chat))
        except DataError as error:
            raise DataError(f"{where}: {error}") from error

    def _options_of(self, chat: Chat) -> dict[str, Any]:
        return {**self._options, "tools": chat.tools} if chat.tools else self._options


def shared_start(a: str, b: str) -> str:
    """What two texts begin with in common."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(letter for letter, _ in same)


def _common_suffix(a: str, b: str) -> int:
    return len(shared_start(a[::-1], b[::-1]))
