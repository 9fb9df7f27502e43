"""Chats whose replies the target writes: settings, what it reads before each turn, the rows that come of them.

What the target read and wrote is what the trainer's rows hold: prompts are cut from those rows (render.py), and the
generated ids are kept. Knows no engine and no model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from eagle3.chats import render_text
from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError, DataError
from eagle3_train.chats import Chat, Message
from eagle3_train.render import ChatRenderer
from eagle3_train.reply_file import SUFFIXES

AUTO, PLAIN, CHAIN, TREE = "auto", "plain", "chain", "tree"
MODES = (AUTO, PLAIN, CHAIN, TREE)
# contents that have nothing in common
_PROBES = ("Alpha", "Omega!")


@dataclass(frozen=True)
class RegenerateConfig:
    """Let the target answer prompts, or write its own chats, as training data.

    Args:
        target: folder, hub id, or smollm2-135m-instruct (the embedded default).
        prompts: JSON lines (or .jsonl.gz) of `prompt`, `turns`, or `messages`, whose replies are written anew.
        self: the target writes so many chats, user turns included, instead of answering prompts.
        system: system message of the chats that the target writes itself.
        output: .jsonl or .jsonl.gz file; a run that was stopped goes on with it.
        limit: only the first so many prompts.
        temperature: of the replies that are sampled.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the most likely tokens that reach this mass; 1 = all.
        greedy_share: share of the chats, by a hash of their ids, whose replies are greedy.
        self_temperature: of user turns that the target writes.
        self_top_k: of user turns that the target writes.
        max_new_tokens: of each turn; a reply that reaches it ends its chat.
        max_prompt_tokens: longer prompts are counted and left out; None = what the target holds.
        draft: folder of a head, or shipped: speculative decoding, whose tokens are the same.
        mode: plain, chain, tree, or auto (plain without a draft, adaptive trees with one).
        tree_depth: levels below the root, at most.
        tree_top_k: children kept per level.
        tree_nodes: draft nodes verified per round, at most; None = tree_top_k * tree_depth.
        batch: replies written at once.
        template_options: extra variables for the chat template (such as enable_thinking).
        dtype: auto (the target's own), float32, bfloat16, float16.
        device: auto, cpu, cuda, cuda:1; of several processes each takes the GPU of its local rank.
        threads: torch threads; None leaves torch's choice.
        seed: with it and a chat's id alone, a reply is determined.
    """

    target: str = EMBEDDED
    prompts: str | None = None
    self: int | None = None
    system: str | None = None
    output: str = "replies.jsonl.gz"
    limit: int | None = None
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    greedy_share: float = 0.6
    self_temperature: float = 0.9
    self_top_k: int = 100
    max_new_tokens: int = 224
    max_prompt_tokens: int | None = None
    draft: str | None = None
    mode: str = AUTO
    tree_depth: int = 4
    tree_top_k: int = 4
    tree_nodes: int | None = None
    batch: int = 32
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self):
        for name in ("self", "limit", "max_new_tokens", "max_prompt_tokens", "batch", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        if (self.prompts is None) == (self.self is None):
            raise ConfigError("give either --prompts FILE or --self N, the number of chats that the target writes")
        if self.self is None and self.system is not None:
            raise ConfigError("system belongs to --self; prompts bring their own system messages")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share is {self.greedy_share}; it must be between 0 and 1")
        if not self.output.endswith(SUFFIXES):
            raise ConfigError(f"output {self.output!r} must end in {' or '.join(SUFFIXES)}")
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use {', '.join(MODES)}")
        if self.draft is None and self.mode in (CHAIN, TREE):
            raise ConfigError(f"mode is {self.mode}; it needs a --draft")
        if self.draft is not None and self.mode == PLAIN:
            raise ConfigError("mode is plain, which needs no --draft; leave one of them out")
        for name in ("prompts", "output"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.expanduser(path))

    def determines(self) -> dict[str, Any]:
        """The settings that a row depends on, besides target, prompts and its id."""
        names = ["system", "temperature", "top_k", "top_p", "greedy_share", "max_new_tokens", "seed"]
        names += ["self_temperature", "self_top_k"] if self.self else []
        return {name: getattr(self, name) for name in (*names, "template_options")}


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


class Turns:
    """Where turns begin and end in one tokenizer's chat template, from render boundaries.

    Attributes:
        end_ids: what the template puts after a reply, as far as it belongs to it.
    """

    def __init__(self, renderer: ChatRenderer, template_options: dict[str, Any] | None = None):
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self._options = template_options or {}
        ended = [Message("user", _PROBES[0]), Message("assistant", _PROBES[1], [])]
        self.end_ids = renderer.turn(Chat(ended), 1).reply

    def prompt_ids(self, chat: Conversation) -> list[int]:
        """What the target reads before its reply: the ids before the last span of the row that the trainer makes.

        Raises:
            DataError: the template refuses the messages.
        """
        messages = [*chat.awaited, Message("assistant", _PROBES[0], [0])]
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
            for p in _PROBES
        ]
        before, after = _common_prefix(*texts), _common_prefix(*(text[::-1] for text in texts))[::-1]
        prefix, suffix = (self.tokenizer(t, add_special_tokens=False)["input_ids"] for t in (before, after))
        if not prefix:
            raise DataError("the chat template puts nothing before a user's text: the target cannot begin a chat")
        end = next((i for i in suffix if i in self.renderer.special_ids), None)
        stop = after.strip() if end is None else ""
        return UserTurn(prefix, () if end is None else (end,), (stop,) if stop else ())


def _common_prefix(a: str, b: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(letter for letter, _ in same)


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
