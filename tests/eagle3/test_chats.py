"""Lines, messages and rendering that both tools share: every fault names its place, ids are flat or refused."""

import gzip
import inspect
import re

import pytest
from transformers import PreTrainedTokenizerBase

from eagle3.chats import (
    check_message,
    check_template_options,
    flat_ids,
    parse_object,
    read_lines,
    render_ids,
    render_text,
)
from eagle3.errors import ConfigError, DataError

LINES = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"b": "caf\xc3\xa9"}'


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.jsonl.gz"])
def test_lines(tmp_path, name):
    """Catches: a byte order mark or Windows line ends inside a line, blank lines that shift the numbers."""
    file = tmp_path / name
    file.write_bytes(gzip.compress(LINES) if name.endswith(".gz") else LINES)
    assert [(source, parse_object(line, source)) for source, line in read_lines(file)] == [
        (f"{file}:1", {"a": 1}),
        (f"{file}:4", {"b": "café"}),
    ]


def test_the_broken_line_is_named(tmp_path):
    """Catches: the number of the block that a decoder read ahead."""
    (tmp_path / "latin.jsonl").write_bytes(b"{}\n" * 500 + b'{"a": "\xe9"}\n{}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:501: not UTF-8"):
        list(read_lines(tmp_path / "latin.jsonl"))


def test_damaged_archives_are_named(tmp_path):
    """Catches: zlib's and gzip's errors as tracebacks."""
    whole, file = gzip.compress(b'{"a": 1}\n' * 1000), tmp_path / "a.jsonl.gz"
    for content in (b"{}\n", whole[:-10], whole[:20] + b"\xff" * 20):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: cannot be read"):
            list(read_lines(file))


@pytest.mark.parametrize("line", ["{oops", "[1]", "null", "[" * 100_000])
def test_no_object(line):
    """Catches: JSON that is no object, or too deep for the parser."""
    with pytest.raises(DataError, match=r"^f:7: "):
        parse_object(line, "f:7")


@pytest.mark.parametrize(
    "message, told",
    [
        ("hi", "must be an object with 'role' and 'content', found str"),
        ({"content": "x"}, "role None; allowed: system, user, assistant"),
        ({"role": ["user"], "content": "x"}, "has role ['user']"),
        ({"role": "user"}, "found no such key"),
        ({"role": "user", "content": None}, "found null"),
        ({"role": "user", "content": "\ud800"}, "lone surrogate"),
    ],
)
def test_a_wrong_message(message, told):
    """Catches: content that a tokenizer cannot take."""
    with pytest.raises(DataError, match=f"^f:1.*{re.escape(told)}"):
        check_message(message, "f:1: messages[0]")


class Template:
    """A tokenizer whose template returns `out`, or raises it."""

    def __init__(self, out):
        self.out = out

    def apply_chat_template(self, messages, **settings):
        if isinstance(self.out, Exception):
            raise self.out
        return self.out


def test_ids_are_flat_or_refused():
    """Catches: transformers 5's BatchEncoding, whose len() is 2; ids nested in a batch."""
    messages = [{"role": "user", "content": "Hi"}]
    assert render_ids(Template([1, 2, 3]), messages) == render_ids(Template({"input_ids": [1, 2, 3]}), messages)
    for odd in ({"input_ids": [[1, 2]]}, [[1]], [1.0], "text"):
        with pytest.raises(DataError, match="flat list"):
            render_ids(Template(odd), messages)
    assert flat_ids([]) == []


@pytest.mark.parametrize("render", [render_ids, render_text])
def test_a_template_that_refuses(render):
    """Catches: jinja's errors reaching the user."""
    with pytest.raises(DataError, match="the chat template failed: KeyError: 'tools'"):
        render(Template(KeyError("tools")), [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "options, told",
    [
        ([], "options is list '\\[\\]', expected an object"),
        ({"on": 1, True: True}, "options has the key True, expected the name of a variable"),
        ({"tokenize": False}, "options sets tokenize, expected variables"),
        ({"day": object()}, "options is nothing that JSON can hold"),
        ({"x": float("nan")}, "options is nothing that JSON can hold"),
    ],
)
def test_what_are_no_template_options(options, told):
    with pytest.raises(ConfigError, match=told):
        check_template_options("options", options)


def test_every_argument_of_the_call_is_known():
    """Catches: an argument of a later transformers that an option would set unseen."""
    names = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    # these are handed to the template
    for name in sorted(names - {"self", "kwargs", "tools", "documents"}):
        with pytest.raises(ConfigError, match=name):
            check_template_options("options", {name: None})
    check_template_options("options", {"tools": [], "documents": [], "enable_thinking": False})
