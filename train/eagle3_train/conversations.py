"""Chats whose replies the target writes: their order of turns, their ids, the rows that come of them, and their tally.

Knows no tokenizer, no engine and no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from eagle3.errors import DataError
from eagle3_train.chats import Chat, Message


@dataclass
class Conversation:
    """A chat in the making.

    Args:
        messages: so far; a chat begins with what is said before the first user turn.
        turns: user turns that were not asked yet.
        self_written: the target writes the next user turn itself.
        user_ids: the ids of a user turn that it wrote.
        tools: JSON schemas that the template shows.
        finished: whether the last reply ended by itself.
    """

    id: str
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    category: str | None = None
    self_written: bool = False
    user_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    finished: bool = True

    @property
    def replies(self) -> list[Message]:
        """Those that the target wrote."""
        return [message for message in self.messages if message.token_ids is not None]

    @property
    def awaited(self) -> list[Message]:
        """The messages that the next reply answers."""
        return [*self.messages, Message("user", self.turns[0])]

    def reply(self, text: str, ids: list[int], finished: bool) -> None:
        """Add the reply to the next turn; one that did not end by itself ends the chat: nothing follows it in truth."""
        self.messages = [*self.awaited, Message("assistant", text, ids)]
        self.turns, self.finished = self.turns[1:] if finished else [], finished

    def row(self, temperature: float, seed: int) -> dict[str, Any]:
        """The line that the trainer reads."""
        said = [m.plain() if m.token_ids is None else {**m.plain(), "token_ids": m.token_ids} for m in self.messages]
        row = {"id": self.id, "messages": said, "finished": self.finished, "temperature": temperature, "seed": seed}
        more = {"category": self.category, "user_ids": self.user_ids, "tools": self.tools}
        return row | {name: value for name, value in more.items() if value is not None}


def conversation(chat: Chat, name: str | None, category: str | None) -> Conversation:
    """A chat to be answered anew: its replies are dropped, what comes before its first user turn stays.

    It ends before a message of a tool or the like, which goes back to a reply that is dropped.

    Raises:
        DataError: no user turn.
    """
    roles = [message.role for message in chat.messages]
    if "user" not in roles:
        raise DataError(f"{chat.source}: no user message to reply to")
    first = roles.index("user")
    asked = takewhile(lambda message: message.role in ("user", "assistant"), chat.messages[first:])
    turns = [message.content for message in asked if message.role == "user"]
    return named(Conversation("", chat.messages[:first], turns, category, tools=chat.tools), name)


def named(chat: Conversation, name: str | None) -> Conversation:
    """Give it the id of its file, or one of its content, so that an id never depends on order."""
    chat.id = name or f"prompt-{content_hash(chat):016x}"
    return chat


def content_hash(chat: Conversation) -> int:
    said = [message.plain() for message in chat.messages]
    return _hash(json.dumps([said, chat.turns, chat.tools], sort_keys=True))


def deduplicated(chats: Iterable[Conversation]) -> tuple[list[Conversation], int]:
    """The first chat of each content, and how many others there were.

    Raises:
        DataError: one id for two contents.
    """
    kept: dict[int, Conversation] = {}
    ids: dict[str, int] = {}
    count = 0
    for chat in chats:
        count += 1
        content = content_hash(chat)
        if ids.setdefault(chat.id, content) != content:
            raise DataError(f"id {chat.id!r} stands for two prompts; give each its own id, or none")
        kept.setdefault(content, chat)
    return list(kept.values()), count - len(kept)


def is_greedy(name: str, share: float) -> bool:
    """Whether the chat of this id is among the share that is greedy."""
    return _hash("greedy", name) < share * 2**64


def noise_key(name: str) -> int:
    """What stands for a chat's id in the engine's noise."""
    return _hash("noise", name) >> 1


def _hash(*words: str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        data = word.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


@dataclass
class Tally:
    """What became of the chats of one run; `tokens` are those of replies, their ends included."""

    chats: int = 0
    replies: int = 0
    tokens: int = 0
    user_tokens: int = 0
    finished: int = 0
    looping: int = 0
    too_long: int = 0
    failed: int = 0
    duplicates: int = 0
    first_failure: str | None = None
    _prompts: set[int] = field(default_factory=set)

    def add(self, chat: Conversation) -> None:
        self.chats += 1
        self._prompts.add(_hash(*(m.content for m in chat.messages if m.role == "user")))

    def add_reply(self, tokens: int, finished: bool, looping: bool) -> None:
        self.replies, self.tokens = self.replies + 1, self.tokens + tokens
        self.finished, self.looping = self.finished + finished, self.looping + looping

    def fail(self, why: object) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or str(why)

    def report(self, seconds: float) -> str:
        """The closing line, and one for what was left out."""
        replies = max(self.replies, 1)
        lines = [
            f"{self.chats:,} chats of {len(self._prompts):,} distinct prompts, {self.replies:,} replies, "
            f"{self.tokens:,} tokens, {(self.tokens + self.user_tokens) / max(seconds, 1e-9):.1f} tok/s; mean length "
            f"{self.tokens / replies:.1f}, finished {self.finished / replies:.1%}, "
            f"with a repetition loop {self.looping / replies:.1%}"
        ]
        left_out = {"too long": self.too_long, "failed": self.failed, "duplicates": self.duplicates}
        if any(left_out.values()):
            lines.append("left out: " + ", ".join(f"{count:,} {name}" for name, count in left_out.items() if count))
        if self.first_failure:
            lines.append(f"first failure: {self.first_failure}")
        return "\n".join(lines)
