"""Prompt files: all three forms run, every broken line is named, and the shipped file is sound."""

import json

import pytest

from eagle3.errors import ConfigError, DataError
from eagle3_infer.prompts import Prompt, load_prompts, parse_prompt, render, shipped_prompts_path, word_ids


class Templated:
    """A tokenizer with a visible chat template; one id per character."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        assert add_generation_prompt
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        return [ord(c) for c in text] if tokenize else text

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}


class Plain(Templated):
    chat_template = None


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_the_three_forms(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "Hello"},
        "",
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "id": "m"},
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"], "reference": ["ignored"]},
    )
    first, second, third = load_prompts(path)
    assert first == Prompt("1", "all", ("Hello",), (), f"{path}:1")
    assert (second.id, second.turns) == ("m", ("Hi",))
    assert second.history == ({"role": "system", "content": "Be brief."},)
    assert (third.id, third.category, third.turns) == ("81", "writing", ("One", "Two"))


def test_history_grows_with_the_replies():
    prompt = Prompt("a", "all", ("One", "Two"), ({"role": "system", "content": "S"},))
    assert [m["content"] for m in prompt.messages([])] == ["S", "One"]
    assert [m["content"] for m in prompt.messages(["reply"])] == ["S", "One", "reply", "Two"]


def test_limits(tmp_path):
    path = write(tmp_path, {"turns": ["a", "b"]}, {"turns": ["c"]}, "broken")
    prompts = load_prompts(path, limit=2, max_turns=1)
    assert [p.turns for p in prompts] == [("a",), ("c",)]


@pytest.mark.parametrize(
    "line, told",
    [
        ("{broken", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "found only nothing"),
        ('{"text": "x"}', "found only 'text'"),
        ('{"prompt": "a", "turns": ["b"]}', "found prompt and turns"),
        ('{"prompt": ""}', "non-empty string"),
        ('{"prompt": 3}', "must be a string"),
        ('{"prompt": "\\ud800"}', "lone surrogate"),
        ('{"turns": []}', "at least one string"),
        ('{"turns": "a"}', "at least one string"),
        ('{"turns": ["a", null]}', "'turns'[1]"),
        ('{"messages": {}}', "must be a list"),
        ('{"messages": []}', "must end with the user message"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must end with the user message"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "role 'robot'; allowed"),
        ('{"messages": ["a"]}', "'role'"),
        ('{"messages": [{"role": "user"}]}', "messages[0]: 'content'"),
        ('{"messages": [{"role": "user", "content": ""}]}', "messages[0]: 'content' is empty"),
        ('{"prompt": "a", "category": 3}', "'category'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, told):
    path = write(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(DataError) as error:
        load_prompts(path)
    assert f"{path}:2" in str(error.value) and told in str(error.value)


def test_bad_files(tmp_path):
    for path, told in (
        (tmp_path, "is a folder"),
        (tmp_path / "none.jsonl", "no such file"),
        (write(tmp_path, "", "  "), "holds no prompt"),
    ):
        with pytest.raises(DataError, match=told):
            load_prompts(path)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(DataError, match="not UTF-8"):
        load_prompts(latin)


def test_an_id_is_used_once(tmp_path):
    path = write(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    with pytest.raises(DataError, match=rf"{path}:2.*{path}:1"):
        load_prompts(path)


def test_windows_lines_and_byte_order_mark(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [p.turns for p in load_prompts(path)] == [("a",), ("b",)]


def test_the_template_writes_the_special_tokens_once():
    """A template already holds BOS; adding it again shifts every position (seen in the field)."""
    text, ids = render(Templated(), [{"role": "user", "content": "Hi"}])
    assert text == "<user>Hi<assistant>"
    assert ids == [ord(c) for c in text]


def test_without_template_the_text_is_raw_and_keeps_special_tokens():
    text, ids = render(Plain(), [{"role": "user", "content": "Hi"}])
    assert text == "Hi" and ids == [1, ord("H"), ord("i")]


def test_template_options_reach_the_template():
    """Catches: a head that was trained without thinking, measured with it."""

    class Thinking(Templated):
        def apply_chat_template(self, messages, tokenize, enable_thinking=True, **rest):
            text = "<think>" if enable_thinking else "<done>"
            return [ord(c) for c in text] if tokenize else text

    for options, expected in ((None, "<think>"), ({"enable_thinking": False}, "<done>")):
        text, ids = render(Thinking(), [{"role": "user", "content": "Hi"}], options)
        assert text == expected and ids == [ord(c) for c in expected]
    with pytest.raises(ConfigError, match=r"no chat template that .*: leave out --template-options"):
        render(Plain(), [{"role": "user", "content": "Hi"}], {"enable_thinking": False})


def test_a_prompt_of_no_token():
    class Empty(Plain):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": []}

    with pytest.raises(DataError, match="no token"):
        render(Empty(), [{"role": "user", "content": "Hi"}])


def test_a_template_that_refuses_is_the_users_error():
    class Refusing(Templated):
        def apply_chat_template(self, *args, **keywords):
            raise ValueError("System role not supported")

    with pytest.raises(DataError, match="System role not supported"):
        render(Refusing(), [{"role": "system", "content": "a"}])


def test_shipped_prompts():
    prompts = load_prompts(shipped_prompts_path())
    assert len(prompts) >= 12
    assert len({p.category for p in prompts}) >= 6
    assert any(len(p.turns) > 1 for p in prompts)


def test_ids_may_be_numbers_and_default_to_the_place():
    assert parse_prompt('{"prompt": "a", "id": 5}', "f:1", "1").id == "5"
    assert parse_prompt('{"prompt": "a"}', "f:1", "1").id == "1"


def test_null_is_no_id(tmp_path):
    path = write(tmp_path, {"prompt": "a", "id": None}, {"prompt": "b", "id": None, "question_id": 7}, {"prompt": "c"})
    assert [p.id for p in load_prompts(path)] == ["1", "7", "3"]
    rows = [{"prompt": "a", "id": None}, {"prompt": "b", "id": None, "question_id": None}]
    assert [p.id for p in load_prompts(write(tmp_path, *rows))] == ["1", "2"]


def test_bad_words_are_met_with_and_without_a_blank():
    ids = word_ids(Templated(), ["ab", " c", "ab"])
    assert ids == ((97, 98), (32, 97, 98), (32, 99))
    assert word_ids(Templated(), []) == ()


def test_a_bad_word_of_no_token():
    class Deaf(Templated):
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": []}

    with pytest.raises(ConfigError, match="'x' is no token"):
        word_ids(Deaf(), ["x"])
