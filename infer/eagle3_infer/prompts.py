"""Prompt files and their rendering: JSON lines -> prompts -> token ids of a turn. Knows no model.

A line is one of `{"prompt": str}`, `{"messages": [{"role", "content"}, ...]}` or
`{"question_id", "category", "turns": [str, ...]}` (FastChat); all may have `id` and `category`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from eagle3.chats import check_message, check_text, flat_ids, parse_object, read_lines, render_ids, render_text
from eagle3.errors import ConfigError, DataError

Message = dict[str, str]
NO_CATEGORY = "all"


@dataclass(frozen=True)
class Prompt:
    """One conversation to run: fixed `history`, then one user message per turn.

    Args:
        source: `file:line`.
        prompt_set: the name of its set, where a run has several.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    source: str = ""
    prompt_set: str = ""

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
    """The first `limit` prompts of a `.jsonl` or `.jsonl.gz` file, each cut to `max_turns`.

    Raises:
        DataError: no such file, a folder, not UTF-8, no prompt in it, or a line that is none of the three
            forms; names file and line.
    """
    prompts: list[Prompt] = []
    for where, line in read_lines(path):
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(parse_prompt(line, where, str(len(prompts) + 1), max_turns))
    if not prompts:
        raise DataError(f"{path} holds no prompt, expected one JSON object per line")
    _check_unique(prompts)
    return prompts


def parse_prompt(line: str, where: str, default_id: str, max_turns: int | None = None) -> Prompt:
    """One line of a prompt file. Raises DataError starting with `where`."""
    row = parse_object(line, where)
    forms = [name for name in ("prompt", "messages", "turns") if name in row]
    if len(forms) != 1:
        found = " and ".join(forms) or f"only {', '.join(map(repr, row)) or 'nothing'}"
        raise DataError(f"{where}: expected one of 'prompt', 'messages', 'turns', found {found}")
    history, turns = _PARSERS[forms[0]](row[forms[0]], where)
    # null is no id
    name = next(given for given in (row.get("id"), row.get("question_id"), default_id) if given is not None)
    category = row.get("category") or NO_CATEGORY
    if not isinstance(category, str):
        raise DataError(f"{where}: 'category' is {category!r}, expected a string")
    return Prompt(str(name), category, turns[:max_turns], history, where)


def _parse_text(text: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    return (), (_filled(text, f"{where}: 'prompt'"),)


def _parse_turns(turns: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: 'turns' must be a list of at least one string")
    return (), tuple(_filled(turn, f"{where}: 'turns'[{i}]") for i, turn in enumerate(turns))


def _parse_messages(messages: Any, where: str) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(messages, list):
        raise DataError(f"{where}: 'messages' must be a list")
    rows = [_checked_message(message, f"{where}: messages[{i}]") for i, message in enumerate(messages)]
    if not rows or rows[-1]["role"] != "user":
        last = rows[-1]["role"] if rows else "nothing"
        raise DataError(f"{where}: 'messages' must end with the user message to reply to, found {last}")
    return tuple(rows[:-1]), (rows[-1]["content"],)


_PARSERS = {"prompt": _parse_text, "turns": _parse_turns, "messages": _parse_messages}


def _checked_message(message: Any, where: str) -> Message:
    role, content = check_message(message, where)
    return {"role": role, "content": _filled(content, f"{where}: 'content'")}


def _filled(text: Any, what: str) -> str:
    if not check_text(text, what):
        raise DataError(f"{what} is empty, expected a non-empty string")
    return text


def _check_unique(prompts: list[Prompt]) -> None:
    seen: dict[str, Prompt] = {}
    for prompt in prompts:
        if (first := seen.setdefault(prompt.id, prompt)) is not prompt:
            raise DataError(f"{prompt.source}: id {prompt.id!r} was used before, in {first.source}")


def has_template(tokenizer: Any) -> bool:
    return bool(tokenizer.chat_template)


def render(
    tokenizer: Any, messages: list[Message], template_options: Mapping[str, Any] | None = None
) -> tuple[str, list[int]]:
    """Text and token ids of a conversation that awaits the assistant's reply.

    Through the tokenizer's own chat template; without one the contents are joined by blank lines, as text.

    Args:
        template_options: extra variables for the template, as in training.
    Raises:
        ConfigError: template options, and no template.
        DataError: the template refuses the conversation, or nothing comes of it.
    """
    options = dict(template_options or {})
    if has_template(tokenizer):
        text = render_text(tokenizer, messages, add_generation_prompt=True, **options)
        ids = render_ids(tokenizer, messages, add_generation_prompt=True, **options)
    elif options:
        raise ConfigError(
            "the target's tokenizer has no chat template that could read template options: leave out --template-options"
        )
    else:
        text = "\n\n".join(message["content"] for message in messages)
        ids = flat_ids(tokenizer(text)["input_ids"])
    if not ids:
        raise DataError("the prompt renders to no token at all")
    return text, ids


def word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words that are not to be emitted: as each is, and after a blank, where most words are met.

    Raises ConfigError for a text that is no token at all.
    """
    forms = [form for word in words for form in (word, word if word[0].isspace() else f" {word}")]
    ids = [tuple(flat_ids(tokenizer(form, add_special_tokens=False)["input_ids"])) for form in forms]
    if () in ids:
        raise ConfigError(f"--bad-word {forms[ids.index(())]!r} is no token of the target's tokenizer")
    return tuple(dict.fromkeys(ids))
