"""Prompt files and their rendering: JSON lines -> prompts -> token ids of a turn. Knows no model.

A line is one of `{"prompt": str}`, `{"messages": [{"role", "content"}, ...]}` or
`{"question_id", "category", "turns": [str, ...]}` (FastChat); all may have `id` and `category`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from eagle3.errors import DataError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
NO_CATEGORY = "all"


@dataclass(frozen=True)
class Prompt:
    """One conversation to run: fixed `history`, then one user message per turn."""

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    source: str = ""

    def messages(self, replies: Sequence[str]) -> list[Message]:
        """The conversation up to the turn that follows `replies`."""
        messages = list(self.history)
        for turn, text in enumerate(self.turns[: len(replies) + 1]):
            messages.append({"role": "user", "content": text})
            if turn < len(replies):
                messages.append({"role": "assistant", "content": replies[turn]})
        return messages


def shipped_prompts_path() -> Path:
    return Path(str(resources.files("eagle3_infer") / "assets" / "prompts.jsonl"))


def load_prompts(path: Path, limit: int | None = None, max_turns: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file, each cut to `max_turns`.

    Raises:
        DataError: no such file, a folder, not UTF-8, no prompt in it, or a line that is none of the three
            forms; names file and line.
    """
    prompts: list[Prompt] = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(parse_prompt(line, f"{path}:{number}", str(len(prompts) + 1), max_turns))
    if not prompts:
        raise DataError(f"{path} holds no prompt, expected one JSON object per line")
    _check_unique(prompts)
    return prompts


def parse_prompt(line: str, where: str, default_id: str, max_turns: int | None = None) -> Prompt:
    """One line of a prompt file. Raises DataError starting with `where`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
    forms = [name for name in ("prompt", "messages", "turns") if name in row]
    if len(forms) != 1:
        found = " and ".join(forms) or f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise DataError(f"{where}: expected one of 'prompt', 'messages', 'turns', found {found}")
    history, turns = _PARSERS[forms[0]](row[forms[0]], where)
    name = row.get("id", row.get("question_id", default_id))
    category = row.get("category") or NO_CATEGORY
    if not isinstance(category, str):
        raise DataError(f"{where}: 'category' is {category!r}, expected a string")
    return Prompt(str(name), category, turns[:max_turns], history, where)


def _parse_text(text: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    return (), (_checked_text(text, where, "'prompt'"),)


def _parse_turns(turns: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: 'turns' must be a list of at least one string")
    return (), tuple(_checked_text(turn, where, f"'turns'[{i}]") for i, turn in enumerate(turns))


def _parse_messages(messages: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(messages, list):
        raise DataError(f"{where}: 'messages' must be a list")
    rows = [_checked_message(message, where, i) for i, message in enumerate(messages)]
    if not rows or rows[-1]["role"] != "user":
        last = rows[-1]["role"] if rows else "nothing"
        raise DataError(f"{where}: 'messages' must end with the user message to reply to, found {last}")
    return tuple(rows[:-1]), (rows[-1]["content"],)


_PARSERS = {"prompt": _parse_text, "turns": _parse_turns, "messages": _parse_messages}


def _checked_message(message: Any, where: str, index: int) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise DataError(f"{where}: 'messages'[{index}] must have a 'role' of {', '.join(ROLES)}")
    text = _checked_text(message.get("content"), where, f"'messages'[{index}]['content']")
    return {"role": message["role"], "content": text}


def _checked_text(text: Any, where: str, name: str) -> str:
    if not isinstance(text, str) or not text:
        raise DataError(f"{where}: {name} is {text!r}, expected a non-empty string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {name} holds a lone surrogate, which is no character") from None
    return text


def _check_unique(prompts: list[Prompt]) -> None:
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        if (first := seen.setdefault(prompt.id, prompt)) is not prompt:
            raise DataError(f"{prompt.source}: id {prompt.id!r} was used before, in {first.source}")


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise DataError(f"{path} is a folder, expected a JSONL file of prompts")
    if not path.exists():
        raise DataError(f"{path} does not exist, expected a JSONL file of prompts")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def has_template(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template)


def render(tokenizer: Any, messages: list[Message]) -> tuple[str, list[int]]:
    """Text and token ids of a conversation that awaits the assistant's reply.

    Through the tokenizer's own chat template; without one the contents are joined by blank lines, as text.
    Raises DataError when the template refuses the conversation.
    """
    if not has_template(tokenizer):
        text = "\n\n".join(message["content"] for message in messages)
        return text, flat_ids(tokenizer(text)["input_ids"])
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # jinja's errors and whatever a template raises on a role it does not know
        raise DataError(f"the target's chat template refuses this conversation: {error}") from error
    # the template has written every special token itself
    return text, flat_ids(tokenizer(text, add_special_tokens=False)["input_ids"])


def flat_ids(ids: Any) -> list[int]:
    """Token ids of one row; transformers may nest them in a batch of one."""
    if len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    ids = [int(token) for token in ids]
    if not ids:
        raise DataError("the prompt renders to no token at all")
    return ids
