"""Texts that others wrote (prompts, ids, categories), as a terminal or a page may show them. Knows characters alone."""

import re
import unicodedata

# controls but newline and tab: they move the cursor, clear the screen, turn the text around; and what is no character
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def name_unseen(text: str) -> str:
    """What has no glyph, or would act on what stands around it, by its name: [U+001B]."""
    return _UNSEEN.sub(lambda found: f"[U+{ord(found[0]):04X}]", text)


def cut_middle(text: str, most: int) -> str:
    """Its beginning and its end, and how much lies between, where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def columns(text: str) -> int:
    """How many columns of a terminal a line takes: wide characters two, those drawn onto others none."""
    return sum(_columns(letter) for letter in text)


def _columns(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
