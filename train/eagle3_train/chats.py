"""Read chats from JSONL files and check every line. Knows nothing of tokenizers or tokens' meaning.

A line is `{"messages": [{"role", "content"}, ...]}` with the roles system, user, assistant. Optional: an
assistant message's `token_ids` (the generated ids, end-of-turn excluded), or the row's `reply_ids` for the
last one; `finished` (default true: the last reply ended by itself); `temperature` (0 = the reply is the
target's greedy one).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3.chats import check_message, kind, parse_object, read_lines
from eagle3.errors import DataError


@dataclass(frozen=True)
class Message:
    """One turn; `token_ids` are the generated ids of an assistant turn, None where only its text is known."""

    role: str
    content: str
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class Chat:
    """One conversation; `source` is `file:line`, for messages about it."""

    messages: list[Message]
    finished: bool = True
    greedy: bool = False
    source: str = ""

    def plain(self, stop: int | None = None) -> list[dict[str, str]]:
        """The first `stop` messages as a chat template takes them."""
        return [{"role": m.role, "content": m.content} for m in self.messages[:stop]]


def read_chats(files: list[str]) -> Iterator[Chat]:
    """Yield the chats of several `.jsonl` / `.jsonl.gz` files in order.

    Raises:
        DataError: naming `file:line`, for the first line that is not a chat.
    """
    for file in files:
        for source, line in read_lines(file):
            yield parse_chat(line, source)


def parse_chat(line: str, source: str) -> Chat:
    """Check one JSON line and return it as a Chat; DataError names `source`."""
    row = parse_object(line, source)
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        found = f"keys {sorted(row)}" if messages is None else kind(messages)
        raise DataError(f"{source}: 'messages' must be a non-empty list, found {found}")
    parsed = [_message(message, f"{source}: messages[{i}]") for i, message in enumerate(messages)]
    if row.get("reply_ids") is not None:
        _attach_reply_ids(parsed, row["reply_ids"], source)
    return Chat(parsed, _finished(row, source), _temperature(row, source) == 0, source)


def _message(message: Any, where: str) -> Message:
    role, content = check_message(message, where)
    ids = message.get("token_ids")
    if ids is not None and role != "assistant":
        raise DataError(f"{where}: 'token_ids' belongs to assistant messages, this one is from {role!r}")
    return Message(role, content, None if ids is None else _token_ids(ids, where))


def _attach_reply_ids(messages: list[Message], ids: Any, source: str) -> None:
    last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=None)
    if last is None:
        raise DataError(f"{source}: 'reply_ids' given, but there is no assistant message")
    messages[last] = Message("assistant", messages[last].content, _token_ids(ids, f"{source}: reply_ids"))


def _token_ids(ids: Any, where: str) -> list[int]:
    if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
        raise DataError(f"{where}: token ids must be a flat list of integers >= 0")
    return ids


def _finished(row: dict, source: str) -> bool:
    finished = row.get("finished", True)
    if not isinstance(finished, bool):
        raise DataError(f"{source}: 'finished' must be true or false, found {finished!r}")
    return finished


def _temperature(row: dict, source: str) -> float | None:
    value = row.get("temperature")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise DataError(f"{source}: 'temperature' must be a number >= 0, found {value!r}")
    return value
