"""The target's tokenizer without the target: loading it, and what identifies it."""

import hashlib
import json
from typing import Any

from eagle3.errors import ConfigError


def load_tokenizer(target: str) -> tuple[Any, tuple[int, ...]]:
    """(tokenizer, EOS ids) of the embedded target by name, of a local folder or of a hub id.

    Raises:
        ConfigError: `target` names no tokenizer and config.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from eagle3.target import eos_ids, resolve_path

    path = resolve_path(target)
    try:
        # the config first: what is wrong with it is told more clearly than by the tokenizer
        config, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target {target!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    return tokenizer, eos_ids(config, generation, tokenizer)


def tokenizer_hash(tokenizer: Any) -> str:
    """Short hash of how text becomes ids: vocabulary, merges, rules, special tokens. The template is not in it."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        rules = json.loads(backend.to_str())
        # a call's own settings, which the last call leaves behind
        rules.pop("truncation", None)
        rules.pop("padding", None)
    else:
        rules = tokenizer.get_vocab()
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _digest([type(tokenizer).__name__, rules, named])


def template_hash(tokenizer: Any) -> str:
    """Short hash of the chat template."""
    return _digest(tokenizer.chat_template)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
