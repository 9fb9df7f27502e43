"""Rows of training data to checked chats, in any of three forms. Knows nothing of tokenizers or tokens' meaning.

A row has exactly one of these keys; `conversations` may hold messages too:

    messages       [{"role": system | developer | user | assistant | tool, "content"}, ...]
    conversations  ShareGPT: [{"from": human | gpt | system | ..., "value"}, ...], perhaps a `system` text beside it
    turns          FastChat: the user's turns; the replies stand beside them in `choices`, as [{"turns": [...]}]

Content is text or a list of text parts. All other keys of a message (tool_calls, reasoning_content, ...) are handed to
the chat template. Optional keys of a row: `tools` (a list of JSON schemas, or one JSON text of it); `finished` (default
true: the last reply ended by itself); `temperature` (0 = the reply is the target's greedy one); the generated ids, end
of turn excluded, as an assistant message's `token_ids` or, of the last one, the row's `reply_ids`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.chats import check_message, check_text, kind
from eagle3.errors import DataError
from eagle3_train.sources import open_sources

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
}


@dataclass(frozen=True)
class Message:
    """One turn; `token_ids` are the generated ids of an assistant turn, None where only its text is known.

    `extra` holds all that a template may read beside role and content.
    """

    role: str
    content: str
    token_ids: list[int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Chat:
    """One conversation; `source` is `file:line`, for messages about it; `form` is the key that it was read from."""

    messages: list[Message]
    finished: bool = True
    greedy: bool = False
    source: str = ""
    tools: list[dict[str, Any]] | None = None
    form: str = "messages"

    def plain(self, stop: int | None = None) -> list[dict[str, Any]]:
        """The first `stop` messages as a chat template takes them."""
        return [m.plain() for m in self.messages[:stop]]


def read_chats(files: Iterable[str]) -> Iterator[Chat]:
    """Yield the chats of several sources (see eagle3_train.sources) in order.

    Raises:
        DataError: naming `file:line`, for the first row that is not a chat.
    """
    for source in open_sources(files):
        for place, row in source.rows():
            yield parse_chat(row, place)


def parse_chat(row: dict[str, Any], source: str) -> Chat:
    """Check one row and return it as a Chat; DataError names `source`."""
    forms = [form for form in _FORMS if row.get(form) is not None]
    if len(forms) != 1:
        found = "both " + " and ".join(map(repr, forms)) if forms else f"keys {sorted(map(str, row))}"
        raise DataError(f"{source}: a chat has one of {', '.join(map(repr, _FORMS))}; found {found}")
    messages = _FORMS[forms[0]](row, source)
    if row.get("reply_ids") is not None:
        _attach_reply_ids(messages, row["reply_ids"], source)
    greedy = _temperature(row, source) == 0
    return Chat(messages, _finished(row, source), greedy, source, _tools(row, source), forms[0])


def _messages(row: dict, source: str) -> list[Message]:
    return [_message(m, where) for m, where in _items(row, "messages", source)]


def _conversations(row: dict, source: str) -> list[Message]:
    if row["conversations"] == []:
        # ShareGPT's dumps hold such: a chat without a reply
        return []
    parsed = [
        _message(m if isinstance(m, dict) and "from" not in m else _from_sharegpt(m, where), where)
        for m, where in _items(row, "conversations", source)
    ]
    system = row.get("system")
    if system and parsed[0].role != "system":
        parsed.insert(0, Message("system", check_text(system, f"{source}: 'system'")))
    return parsed


def _turns(row: dict, source: str) -> list[Message]:
    asked = [check_text(text, where) for text, where in _items(row, "turns", source)]
    choices = row.get("choices")
    if not choices:
        raise DataError(
            f"{source}: 'turns' are the user's alone and no reply stands in 'choices': let the target write replies "
            "with train/regenerate.py"
        )
    if not isinstance(choices, list) or not isinstance(choices[0], dict):
        raise DataError(f"{source}: 'choices' must be [{{\"turns\": [...]}}], found {kind(choices)}")
    replies = [check_text(text, where) for text, where in _items(choices[0], "turns", f"{source}: choices[0]")]
    if len(replies) != len(asked):
        raise DataError(f"{source}: {len(asked)} 'turns', but {len(replies)} replies in choices[0]")
    pairs = zip(asked, replies, strict=True)
    return [m for user, reply in pairs for m in (Message("user", user), Message("assistant", reply))]


_FORMS = {"messages": _messages, "conversations": _conversations, "turns": _turns}


def _items(row: dict, key: str, source: str) -> list[tuple[Any, str]]:
    """(item, its place) of the list at `key`."""
    items = row.get(key)
    if not isinstance(items, list) or not items:
        raise DataError(f"{source}: {key!r} must be a non-empty list, found {kind(items)}")
    return [(item, f"{source}: {key}[{i}]") for i, item in enumerate(items)]


def _from_sharegpt(turn: Any, where: str) -> dict[str, Any]:
    """The message that a ShareGPT turn stands for."""
    if not isinstance(turn, dict):
        raise DataError(f"{where} must be an object with 'from' and 'value', found {kind(turn)}")
    speaker, extra = turn["from"], {k: v for k, v in turn.items() if k not in ("from", "value")}
    if not isinstance(speaker, str) or speaker not in _SHAREGPT:
        raise DataError(f"{where} is from {speaker!r}; allowed: {', '.join(_SHAREGPT)}")
    if "value" not in turn:
        raise DataError(f"{where}: 'value' must be a string, found no such key")
    if speaker == "function_call":
        call = _json(turn["value"], f"{where}: 'value'")
        calls = [{"type": "function", "function": c} for c in (call if isinstance(call, list) else [call])]
        return {"role": "assistant", "content": "", "tool_calls": calls, **extra}
    return {"role": _SHAREGPT[speaker], "content": turn["value"], **extra}


def _message(message: Any, where: str) -> Message:
    role, content = check_message(message, where, ROLES)
    extra = {k: v for k, v in message.items() if k not in ("role", "content", "token_ids") and v is not None}
    if "tool_calls" in extra:
        extra["tool_calls"] = _tool_calls(extra["tool_calls"], where)
    ids = message.get("token_ids")
    if ids is not None and role != "assistant":
        raise DataError(f"{where}: 'token_ids' belongs to assistant messages, this one is from {role!r}")
    return Message(role, content, None if ids is None else _token_ids(ids, where), extra)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: templates write them as JSON, and would quote a JSON text again."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}: 'tool_calls' must be a list of objects, found {kind(calls)}")
    return [_with_parsed_arguments(call, where) for call in calls]


def _with_parsed_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_parsed_arguments(call["function"], where)}
    if isinstance(call.get("arguments"), str):
        return {**call, "arguments": _json(call["arguments"] or "{}", f"{where}: the arguments of a tool call")}
    return call


def _tools(row: dict, source: str) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, f"{source}: 'tools'") if tools.strip() else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise DataError(f"{source}: 'tools' must be a list of JSON schemas, found {kind(tools)}")
    tools = [_json(t, f"{source}: tools[{i}]") if isinstance(t, str) else t for i, t in enumerate(tools)]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DataError(f"{source}: tools[{i}] must be a JSON schema, found {kind(tool)}")
    return tools


def _json(text: Any, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{what} must be JSON, found {kind(text)} ({error})") from None


def _attach_reply_ids(messages: list[Message], ids: Any, source: str) -> None:
    last = max((i for i, m in enumerate(messages) if m.role == "assistant"), default=None)
    if last is None:
        raise DataError(f"{source}: 'reply_ids' given, but there is no assistant message")
    messages[last] = replace(messages[last], token_ids=_token_ids(ids, f"{source}: reply_ids"))


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
