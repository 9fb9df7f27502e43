"""Rows of the three forms to chats: roles, content, tools, ids; every fault names row and place."""

import json

import pytest

from eagle3.errors import DataError
from eagle3_train.chats import parse_chat, read_chats

ASKED = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def chat(row):
    return parse_chat(row, "f:7")


def told(row):
    """(role, content) of the messages."""
    return [(m.role, m.content) for m in chat(row).messages]


def test_messages_of_every_role():
    roles = ["system", "developer", "user", "assistant", "tool"]
    row = {"messages": [{"role": role, "content": role[0]} for role in roles]}
    assert told(row) == [(role, role[0]) for role in roles]


def test_sharegpt():
    speakers = ["system", "human", "gpt", "user", "chatgpt", "human", "bing", "human", "assistant", "tool"]
    row = {"conversations": [{"from": speaker, "value": speaker} for speaker in speakers]}
    expected = ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user", "assistant", "tool"]
    assert told(row) == list(zip(expected, speakers, strict=True))
    assert chat(row).form == "conversations"


def test_sharegpt_with_messages_and_a_system_text():
    row = {"system": "Be kind.", "conversations": [ASKED, {"role": "assistant", "content": "Hello", "token_ids": [1]}]}
    assert told(row) == [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello")]
    assert chat(row).messages[2].token_ids == [1]
    row["conversations"].insert(0, {"role": "system", "content": "Mine."})
    assert told(row)[0] == ("system", "Mine.")


def test_empty_conversations_of_sharegpts_dumps():
    assert told({"conversations": []}) == []
    assert told({"conversations": [], "system": "Be kind."}) == []


def test_sharegpt_function_calls():
    turns = [("human", "?"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'), ("observation", "2")]
    row = {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}
    assert told(row) == [("user", "?"), ("assistant", ""), ("tool", "2")]
    assert chat(row).messages[1].extra == {"tool_calls": [CALL]}


def test_fastchat_turns_with_replies():
    """As of a question file joined with an answer file."""
    row = {"question_id": 1, "turns": ["a", "b"], "choices": [{"index": 0, "turns": ["A", "B"]}]}
    assert told(row) == [("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "B")]


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert told({"messages": [{"role": "user", "content": parts}]}) == [("user", "one two")]


def test_what_a_template_may_read_is_kept():
    """Catches: tool calls, thinking and unknown keys that are silently dropped."""
    calls = [{**CALL, "function": {"name": "f", "arguments": '{"x": 1}'}}, {"name": "g", "arguments": ""}]
    reply = {
        "role": "assistant",
        "content": None,
        "tool_calls": calls,
        "reasoning_content": "hm",
        "own": 3,
        "name": None,
    }
    answer = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    plain = chat({"messages": [ASKED, reply, answer]}).plain()
    called = [CALL, {"name": "g", "arguments": {}}]
    assert plain[1] == {"role": "assistant", "content": "", "tool_calls": called, "reasoning_content": "hm", "own": 3}
    assert plain[2] == answer


@pytest.mark.parametrize("tools", [[CALL], json.dumps([CALL]), [json.dumps(CALL)]])
def test_tools(tools):
    assert chat({"messages": [ASKED], "tools": tools}).tools == [CALL]


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_no_tools(tools):
    assert chat({"messages": [ASKED], "tools": tools}).tools is None


def test_optional_keys():
    messages = [ASKED, {"role": "assistant", "content": "b"}]
    parsed = chat({"messages": messages, "reply_ids": [1, 2], "finished": False, "temperature": 0})
    assert (parsed.messages[1].token_ids, parsed.finished, parsed.greedy) == ([1, 2], False, True)
    parsed = chat({"messages": messages, "category": "x", "conversations": None})
    assert (parsed.messages[1].token_ids, parsed.finished, parsed.greedy) == (None, True, False)


@pytest.mark.parametrize(
    "row, found",
    [
        ({"prompt": "x", "id": 1}, r"one of 'messages', 'conversations', 'turns'; found keys \['id', 'prompt'\]"),
        ({"messages": None}, r"found keys \['messages'\]"),
        ({"messages": [ASKED], "turns": ["x"]}, "found both 'messages' and 'turns'"),
        ({"messages": []}, "'messages' must be a non-empty list"),
        ({"messages": "hi"}, "'messages' must be a non-empty list, found str 'hi'"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "role 'robot'; allowed: system, developer, user, assistant",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"has role \['user'\]"),
        ({"messages": [{"content": "x"}]}, "role None"),
        ({"messages": [{"role": "user"}]}, "'content' must be a string, found no such key"),
        ({"messages": [{"role": "user", "content": None}]}, "found null"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "found null"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\] must be a text part"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\]: 'text' must be a string"),
        ({"messages": [{**ASKED, "token_ids": [1]}]}, "belongs to assistant"),
        ({"messages": [{"role": "assistant", "content": "x", "token_ids": [1.5]}]}, "flat list of integers"),
        ({"messages": [{"role": "assistant", "content": "x", "token_ids": [-1]}]}, "flat list of integers"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": "f"}]}, "'tool_calls' must be a list"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": "{"}]}]}, "must be JSON"),
        ({"messages": [ASKED], "reply_ids": [1]}, "no assistant message"),
        ({"messages": [ASKED], "finished": "yes"}, "'finished' must be true"),
        ({"messages": [ASKED], "temperature": "hot"}, "'temperature' must be"),
        ({"messages": [ASKED], "temperature": float("nan")}, "'temperature' must be"),
        ({"messages": [ASKED], "tools": "{"}, "'tools' must be JSON"),
        ({"messages": [ASKED], "tools": {"name": "f"}}, "'tools' must be a list"),
        ({"messages": [ASKED], "tools": [3]}, r"tools\[0\] must be a JSON schema"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "from 'alien'; allowed: system, human"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, r"from \['gpt'\]"),
        ({"conversations": [{"from": "gpt"}]}, "'value' must be a string, found no such key"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "found null"),
        ({"conversations": ["x"]}, r"conversations\[0\] must be an object"),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, "'value' must be JSON"),
        ({"turns": ["a", "b"]}, "user's alone.*train/regenerate.py"),
        ({"turns": [{"a": 1}], "choices": [{"turns": ["x"]}]}, r"turns\[0\] must be a string"),
        ({"turns": ["a", "b"], "choices": [{"turns": ["x"]}]}, "2 'turns', but 1 replies"),
        ({"turns": ["a"], "choices": ["x"]}, "'choices' must be"),
    ],
)
def test_a_broken_row_is_named(row, found):
    with pytest.raises(DataError, match=rf"^f:7.*{found}"):
        chat(row)


def test_files_of_several_forms(tmp_path):
    rows = [{"messages": [ASKED]}, {"conversations": [{"from": "human", "value": "Hi"}]}, {"turns": ["Hi"]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (tmp_path / "b.json").write_text(json.dumps(rows[2:]))
    chats = read_chats([str(tmp_path)])
    assert [next(chats).plain(), next(chats).plain()] == [[ASKED]] * 2
    with pytest.raises(DataError, match=r"b\.json:1: 'turns'"):
        next(chats)
