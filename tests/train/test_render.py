"""Rows from chat templates: the supervised text is the replies with their end-of-turn, on templates of many kinds."""

import copy

import pytest

from eagle3.chats import render_ids
from eagle3.embedded import embedded_model_path
from eagle3.errors import DataError
from eagle3_train.chats import Chat, Message
from eagle3_train.render import ChatRenderer

IM_END = 2

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Qwen3's habit: thinking of earlier turns is cut from history
DROPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}{% if '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# DeepSeek-R1's habit: the generation prompt opens a thought that the rendered turn does not have
OPENS_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
NO_END_OF_TURN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
SPACE_BEFORE_END = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|endoftext|>' }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
)
# Qwen3's habits: thinking is rendered after the last user message only, calls of tools as JSON, results as a user's
TOOLS_AND_THINKING = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function | tojson + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think></think>\n' }}{% endif %}{% endif %}"
)
# Llama 3.1's habit: a call of a tool has no content and ends with another token
CALL_ENDS_OTHERWISE = (
    "{% for m in messages %}{{ '<|header|>' + m.role + '\n' }}{% if m.tool_calls %}"
    "{{ '<|call|>' + m.tool_calls[0].function | tojson + '<|eom_id|>' }}{% else %}{{ m.content + '<|eot_id|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant\n' }}{% endif %}"
)
IGNORES_CONTENT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% endfor %}"


@pytest.fixture(scope="module")
def chatml():
    """The embedded target's tokenizer with its own template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture
def with_template(chatml):
    def make(template, special=()):
        tokenizer = copy.deepcopy(chatml)
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = template
        return tokenizer

    return make


def chat(*turns, **options):
    """Turns are contents, user first, or (role, content) pairs, or Messages."""
    messages = []
    for i, turn in enumerate(turns):
        if isinstance(turn, str):
            turn = Message(("user", "assistant")[i % 2], turn)
        messages.append(turn if isinstance(turn, Message) else Message(turn[0], turn[1]))
    return Chat(messages, source="chats.jsonl:7", **options)


def spans(tokenizer, row):
    """The decoded text of each span of a row."""
    ids = {n: [i for i, s in zip(row.input_ids, row.span_ids, strict=True) if s == n] for n in set(row.span_ids)}
    return [tokenizer.decode(ids[n]) for n in sorted(ids) if n]


def test_chatml_marks_replies_with_their_end_of_turn(chatml):
    row, *more = ChatRenderer(chatml, (IM_END,)).rows(chat("Hi", "Hello!", "And?", "That's all."))
    assert not more
    assert spans(chatml, row) == ["Hello!<|im_end|>", "That's all.<|im_end|>"]
    full = render_ids(chatml, chat("Hi", "Hello!", "And?", "That's all.").plain())
    assert row.input_ids == full[: len(row.input_ids)]
    assert chatml.decode(full[len(row.input_ids) :]) == "\n"


def test_span_begins_where_the_generation_prompt_ends(chatml):
    row, *_ = ChatRenderer(chatml, (IM_END,)).rows(chat("Hi", "Hello!"))
    prefix = render_ids(chatml, chat("Hi").plain(), add_generation_prompt=True)
    assert [n for n, s in enumerate(row.span_ids) if s] == list(range(len(prefix), len(row.input_ids)))
    assert row.input_ids[: len(prefix)] == row.prompt_ids == prefix


def test_markers_in_user_text_change_nothing(chatml):
    fake = "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>"
    row, *_ = ChatRenderer(chatml, (IM_END,)).rows(chat(fake, "real", "more <|im_start|>assistant\n", "last"))
    assert spans(chatml, row) == ["real<|im_end|>", "last<|im_end|>"]


def test_content_that_repeats_the_templates_tail_is_kept_whole(chatml):
    row, *_ = ChatRenderer(chatml, (IM_END,)).rows(chat("Hi", "a\n<|im_end|>\n", "b", "c<|im_end|>"))
    assert spans(chatml, row) == ["a\n<|im_end|>\n<|im_end|>", "c<|im_end|><|im_end|>"]


def test_llama3_like_template_that_trims(with_template):
    names = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = with_template(LLAMA3, names)
    eos = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    for eos_ids in ((eos,), ()):
        row, *more = ChatRenderer(tokenizer, eos_ids).rows(chat("Hi", "  \n Hello! \n", "And?", " Bye "))
        assert not more
        assert spans(tokenizer, row) == ["Hello!<|eot_id|>", "Bye<|eot_id|>"]


def test_pad_equal_to_eos_keeps_the_end_supervised(with_template, chatml):
    tokenizer = with_template(chatml.chat_template)
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == IM_END
    row, *_ = ChatRenderer(tokenizer, (tokenizer.eos_token_id,)).rows(chat("Hi", "Hello!"))
    assert row.input_ids[-1] == IM_END
    assert row.span_ids[-1] == 1


def test_template_that_rewrites_history_gives_one_row_per_rewritten_turn(with_template):
    tokenizer = with_template(DROPS_THINKING)
    turns = ("One?", "<think>hm</think>\n1", "Two?", "<think>hm hm</think>\n2", "Three?", "3")
    rows = ChatRenderer(tokenizer, (IM_END,)).rows(chat(*turns))
    expected = [["<think>hm</think>\n1<|im_end|>"], ["<think>hm hm</think>\n2<|im_end|>"], ["3<|im_end|>"]]
    assert [spans(tokenizer, row) for row in rows] == expected
    for turn, row in zip((1, 3, 5), rows, strict=True):
        prefix = render_ids(tokenizer, chat(*turns).plain(turn), add_generation_prompt=True)
        assert row.input_ids[: len(prefix)] == prefix
    assert len({tuple(row.prompt_ids) for row in rows}) == 1


def test_same_template_without_thinking_packs_all_turns(with_template):
    tokenizer = with_template(DROPS_THINKING)
    (row,) = ChatRenderer(tokenizer, (IM_END,)).rows(chat("One?", "1", "Two?", "2", "Three?", "3"))
    assert spans(tokenizer, row) == ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    assert sorted(set(row.span_ids)) == [0, 1, 2, 3]


def test_reply_that_merges_with_the_prompt_is_tokenised_apart(chatml):
    """ "assistant\\n" + "\\nHi" tokenises as one newline pair, which no generation from the prompt can give."""
    row, *_ = ChatRenderer(chatml, (IM_END,)).rows(chat("Hi", "\nHello!"))
    prefix = render_ids(chatml, chat("Hi").plain(), add_generation_prompt=True)
    assert row.input_ids[: len(prefix)] == prefix
    assert spans(chatml, row) == ["\nHello!<|im_end|>"]


def test_generation_prompt_that_the_turn_does_not_have(with_template):
    tokenizer = with_template(OPENS_THOUGHT)
    renderer = ChatRenderer(tokenizer, (IM_END,))
    with pytest.raises(DataError, match=r"chats\.jsonl:7: messages\[1\].*not a prefix.*token_ids"):
        renderer.rows(chat("Hi", "Hello!"))
    reply = tokenizer("hm</think>Hello!")["input_ids"]
    row, *_ = renderer.rows(chat("Hi", Message("assistant", "Hello!", reply)))
    assert spans(tokenizer, row) == ["hm</think>Hello!<|im_end|>"]
    assert tokenizer.decode(row.prompt_ids).endswith("<think>\n")


def test_template_without_end_of_turn_token(with_template):
    tokenizer = with_template(NO_END_OF_TURN)
    row, *more = ChatRenderer(tokenizer).rows(chat("Hi", "Hello", "And", "Bye"))
    assert not more
    assert spans(tokenizer, row) == ["Hello", "Bye"]


def test_end_ids_are_those_that_replies_end_with(with_template):
    """An end of turn that is no EOS of the target: a head that cannot draft it misses at every reply's end."""
    tokenizer = with_template(LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    renderer = ChatRenderer(tokenizer, (0,))
    assert renderer.end_ids == {0}
    renderer.rows(chat("Hi", "Hello", "And", "Bye", finished=False))
    assert renderer.end_ids == {0, end}
    silent = ChatRenderer(with_template(NO_END_OF_TURN), (0,))
    silent.rows(chat("Hi", "Hello"))
    assert silent.end_ids == {0}


def test_text_between_reply_and_end_of_turn_belongs_to_the_span(with_template):
    tokenizer = with_template(SPACE_BEFORE_END)
    row, *_ = ChatRenderer(tokenizer, (0,)).rows(chat("Hi", "Hello", "And", "Bye"))
    assert spans(tokenizer, row) == [" Hello <|endoftext|>", " Bye <|endoftext|>"]


def test_generated_ids_are_kept_exactly(chatml):
    """Ids that re-tokenising the text would not give: "Hello" letter by letter."""
    ids = [chatml.convert_tokens_to_ids(c) for c in "Hello"]
    assert chatml("Hello")["input_ids"] != ids
    renderer = ChatRenderer(chatml, (IM_END,))
    row, *_ = renderer.rows(chat("Hi", Message("assistant", "Hello", ids), "And?", "Bye"))
    assert [i for i, s in zip(row.input_ids, row.span_ids, strict=True) if s == 1] == [*ids, IM_END]
    assert spans(chatml, row)[1] == "Bye<|im_end|>"
    again, *_ = renderer.rows(chat("Hi", Message("assistant", "Hello", [*ids, IM_END])))
    assert again.input_ids == row.input_ids[: len(again.input_ids)]


@pytest.mark.parametrize("ids", [None, [19556, 17]])
def test_unfinished_reply_has_no_end_of_turn(chatml, ids):
    turns = ("Hi", Message("assistant", "Hello!", ids))
    renderer = ChatRenderer(chatml, (IM_END,))
    (cut,), (whole,) = renderer.rows(chat(*turns, finished=False)), renderer.rows(chat(*turns))
    assert whole.input_ids == [*cut.input_ids, IM_END]
    assert cut.span_ids[-1] == 1


def test_generated_id_beyond_the_tokenizer_raises(chatml):
    with pytest.raises(DataError, match=r"messages\[1\].*99999 is outside"):
        ChatRenderer(chatml, (IM_END,)).rows(chat("Hi", Message("assistant", "x", [99999])))


def test_assistant_first_is_history_only(chatml):
    renderer = ChatRenderer(chatml, (IM_END,))
    first = [("assistant", "Welcome."), ("user", "Hi"), ("assistant", "Hello!")]
    row, *_ = renderer.rows(chat(*first))
    assert spans(chatml, row) == ["Hello!<|im_end|>"]
    assert "Welcome." in chatml.decode(row.input_ids)
    assert renderer.rows(chat(("system", "s"), ("assistant", "Welcome."))) == []
    assert renderer.rows(chat(("user", "Hi"))) == []


def test_two_turns_of_one_role_in_a_row(chatml):
    renderer = ChatRenderer(chatml, (IM_END,))
    row, *_ = renderer.rows(chat(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")))
    assert spans(chatml, row) == ["c<|im_end|>", "d<|im_end|>"]


def test_what_the_template_refuses_names_the_turn(with_template):
    with pytest.raises(DataError, match=r"chats\.jsonl:7: messages\[2\].*roles must alternate"):
        ChatRenderer(with_template(STRICT)).rows(chat(("user", "a"), ("user", "b"), ("assistant", "c")))
    with pytest.raises(DataError, match="does not render this turn's content"):
        ChatRenderer(with_template(IGNORES_CONTENT)).rows(chat("Hi", "Hello!"))
    with pytest.raises(DataError, match="no chat template"):
        ChatRenderer(with_template(None))


def test_empty_contents(chatml):
    row, *_ = ChatRenderer(chatml, (IM_END,)).rows(chat("", "", "x", "y"))
    assert spans(chatml, row) == ["<|im_end|>", "y<|im_end|>"]


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
CALLED = '{"name": "f", "arguments": {"x": 1}}'
TOOL_CHAT = (
    ("system", "Be kind."),
    ("user", "f of 1?"),
    Message("assistant", "", extra=CALLS),
    Message("tool", "2", extra={"tool_call_id": "7"}),
    ("assistant", "It is 2."),
)


def test_calls_of_tools_are_supervised_and_their_results_are_not(with_template):
    tokenizer = with_template(TOOLS_AND_THINKING)
    renderer = ChatRenderer(tokenizer, (IM_END,))
    (row,) = renderer.rows(chat(*TOOL_CHAT, tools=[{"name": "f"}]))
    assert spans(tokenizer, row) == [f"<call>{CALLED}</call><|im_end|>", "It is 2.<|im_end|>"]
    text = tokenizer.decode(row.input_ids)
    assert text.startswith('<|im_start|>system\n[{"name": "f"}]<|im_end|>\n<|im_start|>system\nBe kind.')
    assert "<result>2</result>" in text
    assert not renderer.notes


def test_generated_ids_of_a_call(with_template):
    tokenizer = with_template(TOOLS_AND_THINKING)
    ids = tokenizer("<call>mine</call>")["input_ids"]
    for given in (ids, [*ids, IM_END]):
        row, *_ = ChatRenderer(tokenizer, (IM_END,)).rows(chat("Hi", Message("assistant", "", given, CALLS)))
        assert spans(tokenizer, row) == ["<call>mine</call><|im_end|>"]


def test_a_call_that_ends_with_another_token(with_template):
    """Catches: a call cut short or joined by a text's end of turn, or refused."""
    tokenizer = with_template(CALL_ENDS_OTHERWISE, ["<|header|>", "<|call|>", "<|eom_id|>", "<|eot_id|>"])
    eos = tokenizer.convert_tokens_to_ids(["<|eom_id|>", "<|eot_id|>"])
    renderer = ChatRenderer(tokenizer, eos)
    (row,) = renderer.rows(chat(*TOOL_CHAT))
    assert spans(tokenizer, row) == [f"<|call|>{CALLED}<|eom_id|>", "It is 2.<|eot_id|>"]
    ids = [*tokenizer("<|call|>mine")["input_ids"], eos[0]]
    (row,) = renderer.rows(chat("Hi", Message("assistant", "", ids, CALLS)))
    assert spans(tokenizer, row) == ["<|call|>mine<|eom_id|>"]


def test_thinking_beside_content_gives_a_row_per_turn(with_template):
    tokenizer = with_template(TOOLS_AND_THINKING)
    first, second = (Message("assistant", str(n), extra={"reasoning_content": f"hm {n}"}) for n in (1, 2))
    rows = ChatRenderer(tokenizer, (IM_END,)).rows(chat("One?", first, "Two?", second))
    expected = [["<think>hm 1</think>\n1<|im_end|>"], ["<think>hm 2</think>\n2<|im_end|>"]]
    assert [spans(tokenizer, row) for row in rows] == expected
    assert "hm 1" not in tokenizer.decode(rows[1].input_ids)


def test_thinking_between_calls_stays_in_one_row(with_template):
    """After the last user message nothing is rewritten: a chain of calls is one row."""
    tokenizer = with_template(TOOLS_AND_THINKING)
    thinking = Message("assistant", "", extra={**CALLS, "reasoning_content": "hm"})
    (row,) = ChatRenderer(tokenizer, (IM_END,)).rows(chat("f?", thinking, ("tool", "2"), ("assistant", "It is 2.")))
    assert spans(tokenizer, row) == [f"<think>hm</think>\n<call>{CALLED}</call><|im_end|>", "It is 2.<|im_end|>"]


def test_template_options_reach_the_template(with_template):
    tokenizer = with_template(TOOLS_AND_THINKING)
    renderer = ChatRenderer(tokenizer, (IM_END,), {"enable_thinking": False})
    row, *_ = renderer.rows(chat("Hi", "<think></think>\nHello"))
    assert tokenizer.decode(row.prompt_ids).endswith("assistant\n<think></think>\n")
    assert spans(tokenizer, row) == ["Hello<|im_end|>"]


def test_a_template_without_tools_is_told_of_or_refused(chatml):
    """Catches: turns that teach an empty reply, because the template skips what was called."""
    with pytest.raises(DataError, match=r"chats\.jsonl:7: messages\[2\].*does not render 'tool_calls'.*empty"):
        ChatRenderer(chatml, (IM_END,)).rows(chat(*TOOL_CHAT))
    renderer = ChatRenderer(chatml, (IM_END,))
    extra = {**CALLS, "reasoning_content": "hm"}
    for _ in range(2):
        (row,) = renderer.rows(chat("Hi", Message("assistant", "Hello!", extra=extra), tools=[{"name": "f"}]))
    assert spans(chatml, row) == ["Hello!<|im_end|>"]
    assert sorted(renderer.notes) == ["reasoning_content", "tool_calls", "tools"]
    assert "does not render 'tools' (first: chats.jsonl:7: messages[1])" in renderer.notes["tools"]
