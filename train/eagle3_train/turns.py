"""What the target reads before each turn that it writes, and what of its ids a row keeps. Knows no engine, no model.

Prompts are cut from the very rows that the trainer makes (render.py), so that both read and write the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3.chats import render_text
from eagle3.errors import DataError
from eagle3_train.chats import Chat, Message
from eagle3_train.conversations import Conversation
from eagle3_train.render import PROBES, ChatRenderer, shared_start


class Turns:
    """Where turns begin and end in one tokenizer's chat template, from render boundaries.

    Attributes:
        end_ids: what the template puts after a reply, as far as it belongs to it.
    """

    def __init__(self, renderer: ChatRenderer, template_options: dict[str, Any] | None = None):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self._options = template_options or {}
        ended = [Message("user", PROBES[0]), Message("assistant", PROBES[1], [])]
        self.end_ids = renderer.turn(Chat(ended), 1).reply

    def prompt_ids(self, chat: Conversation) -> list[int]:
        """What the target reads before its reply: the ids before the last span of the row that the trainer makes.

        Raises:
            DataError: the template refuses the messages.
        """
        messages = [*chat.awaited, Message("assistant", PROBES[0], [0])]
        answered = Chat(messages, finished=False, source=chat.id, tools=chat.tools)
        return self.renderer.rows(answered)[-1].input_ids[:-1]

    def reply_ids(self, ids: list[int], ended: bool) -> tuple[list[int], bool]:
        """A reply's ids as a row holds them, and whether it is finished: the trainer then puts `end_ids` back.

        A reply that ended with another EOS id keeps it, and counts as cut: the template would add an end that the
        target did not write.
        """
        end = self.end_ids
        if not ended or (end and ids[-1] != end[-1]):
            return ids, False
        return (ids[: -len(end)], True) if end and ids[-len(end) :] == end else (ids, True)

    def user_turn(self, system: str | None) -> UserTurn:
        """How the target writes a chat's first user turn.

        Raises:
            DataError: the template refuses it, or puts nothing before the user's text.
        """
        history = [] if system is None else [{"role": "system", "content": system}]
        texts = [
            render_text(
                self.tokenizer, [*history, {"role": "user", "content": p}], add_generation_prompt=True, **self._options
            )
            for p in PROBES
        ]
        before, after = shared_start(*texts), shared_start(*(text[::-1] for text in texts))[::-1]
        prefix, suffix = (self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, after))
        if not prefix:
            raise DataError("the chat template puts nothing before a user's text: the target cannot begin a chat")
        end = next((i for i in suffix if i in self.renderer.special_ids), None)
        stop = after.strip() if end is None else ""
        return UserTurn(prefix, () if end is None else (end,), (stop,) if stop else ())


@dataclass(frozen=True)
class UserTurn:
    """The ids before a user's text; the special token, else the string, that follows it."""

    prompt_ids: list[int]
    end_ids: tuple[int, ...]
    stop: tuple[str, ...]

    def text(self, decoded: str) -> str:
        """The user's text of what was written."""
        for stop in self.stop:
            decoded = decoded.split(stop)[0]
        return decoded.strip()
