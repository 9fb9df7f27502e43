"""How command lines are read: errors of one line, and the values that flags take."""

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from eagle3.errors import ConfigError
from eagle3_infer.settings import AUTO


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, naming the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        known, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return known
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else ""
        self.error(f"unknown argument {word!r}{hint}")


def words(text: str) -> tuple[str, ...]:
    """A comma list; each word once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def integers(text: str) -> tuple[int, ...]:
    return _list_of(int, text, "a whole number or a comma list of them")


def numbers(text: str) -> tuple[float, ...]:
    return _list_of(float, text, "a number or a comma list of them")


def nodes(text: str) -> tuple[int | str, ...]:
    """Sizes of trees, or the word for adaptive ones."""
    expected = f"a whole number, {AUTO!r} or a comma list of them"
    return _list_of(lambda word: AUTO if word.strip() == AUTO else int(word), text, expected)


def _list_of(kind: Callable[[str], Any], text: str, expected: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


def mapping(text: str) -> dict[str, Any]:
    """A YAML or JSON object."""
    import yaml

    try:
        value = yaml.safe_load(text)
    # ValueError: a date that is none
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object such as {{enable_thinking: false}}")
    return value


def bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, a token id and a number") from None
