"""What prompt files and training chats share: numbered JSON lines, checked messages, a conversation's token ids.

Knows neither schema: which keys a line must have is decided by its reader. Imports no torch.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError, DataError

ROLES = ("system", "user", "assistant")
# arguments of apply_chat_template that are no variables of a template, and what it hands to templates itself
_OF_THE_CALL = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    )
)


def read_lines(file: str | Path) -> Iterator[tuple[str, str]]:
    """Yield (`file:line`, text) of the lines of a `.jsonl` or `.jsonl.gz` file that are not blank.

    Raises:
        DataError: no such file, a folder, unreadable, damaged or not UTF-8 (a byte order mark is dropped).
    """
    path, number = Path(file), 0
    if path.is_dir():
        raise DataError(f"{file} is a folder; name its .jsonl or .jsonl.gz files")
    if not path.exists():
        raise DataError(f"{file}: no such file")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for raw in lines:
                number += 1
                # decoded line by line, so that the number is the broken line's
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{file}:{number}", text
    except UnicodeDecodeError as error:
        raise DataError(f"{file}:{number}: not UTF-8 text ({error.reason})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}:{number + 1}: cannot be read ({error})") from None


def parse_object(line: str, source: str) -> dict[str, Any]:
    """The JSON object of a line; DataError names `source`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{source}: expected a JSON object, found {kind(row)}")
    return row


def check_message(message: Any, where: str, roles: Sequence[str] = ROLES) -> tuple[str, str]:
    """(role, content) of a message; DataError names `where`.

    Content is a string or a list of text parts, which are joined. An assistant's may be null or missing beside
    `tool_calls`.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where} must be an object with 'role' and 'content', found {kind(message)}")
    content, role = message.get("content"), message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise DataError(f"{where} has role {role!r}; allowed: {', '.join(roles)}")
    if content is None and role == "assistant" and message.get("tool_calls"):
        return role, ""
    if "content" not in message:
        raise DataError(f"{where}: 'content' must be a string, found no such key")
    if isinstance(content, list):
        return role, "".join(_text_part(part, f"{where}: content[{i}]") for i, part in enumerate(content))
    return role, check_text(content, f"{where}: 'content'")


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise DataError(f'{where} must be a text part {{"type": "text", "text": ...}}, found {kind(part)}')
    return check_text(part.get("text"), f"{where}: 'text'")


def check_text(text: Any, what: str) -> str:
    """`text` if a tokenizer can take it; DataError begins with `what`."""
    if not isinstance(text, str):
        raise DataError(f"{what} must be a string, found {kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds a lone surrogate, which is no character") from None
    return text


def kind(value: Any) -> str:
    """Type and beginning of a JSON value, for messages about it."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def check_template_options(name: str, options: Any) -> None:
    """Raises ConfigError unless setting `name` maps variables of a chat template to values.

    What would change how the template is called, not what it renders, is refused.
    """
    if not isinstance(options, dict):
        raise ConfigError(f"{name} is {kind(options)}, expected an object such as {{enable_thinking: false}}")
    for key in options:
        if not isinstance(key, str):
            # YAML takes on, off, yes, no and numbers for something else than text
            raise ConfigError(f"{name} has the key {key!r}, expected the name of a variable: quote it if it is one")
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is nothing that JSON can hold ({error})") from None
    if taken := sorted(_OF_THE_CALL & options.keys()):
        raise ConfigError(f"{name} sets {', '.join(taken)}, expected variables of the chat template alone")


def render_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **options: Any
) -> str:
    """Render messages through the tokenizer's chat template; DataError where the template refuses them."""
    return _apply(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt, **options)


def render_ids(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False, **options: Any
) -> list[int]:
    """Render messages through the tokenizer's chat template to a flat list of ids; special tokens are its own.

    Raises:
        DataError: the template refuses the messages, or does not give ids.
    """
    # transformers 5 returns a BatchEncoding by default (its len() is 2): the result is checked, not assumed
    settings = {"tokenize": True, "add_generation_prompt": add_generation_prompt, "return_dict": False}
    out = _apply(tokenizer, messages, **settings, **options)
    return flat_ids(out["input_ids"] if hasattr(out, "keys") else out)


def flat_ids(ids: Any) -> list[int]:
    """`ids` if they are a flat list of token ids, else DataError."""
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise DataError(f"the tokenizer returned {kind(ids)}, expected a flat list of token ids")
    return ids


def _apply(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **settings)
    # a template is foreign code: it may raise anything
    except Exception as error:
        raise DataError(f"the chat template failed: {type(error).__name__}: {error}") from error
