"""From files to rows: broken lines, counts, truncation, duplicates, splits, token counts."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from eagle3.errors import ConfigError, DataError, EmptyLossMaskError
from eagle3.vocab import VocabMap
from eagle3_train.chats import parse_chat, read_chats
from eagle3_train.data import DataReport, build_rows, load_data, split_rows, token_counts
from eagle3_train.render import ChatRenderer, Row

DEMO = Path(__file__).parents[2] / "recipes/data/smollm2_selfgen_demo.jsonl.gz"


class Letters(ChatRenderer):
    """One token per character; user text, then the last reply as span 1. No tokenizer, no template."""

    def __init__(self):
        pass

    def rows(self, chat):
        if chat.messages[-1].role != "assistant":
            return []
        prompt = [ord(c) for m in chat.messages[:-1] for c in m.content]
        reply = [ord(c) for c in chat.messages[-1].content]
        return [Row(prompt + reply, [0] * len(prompt) + [1] * len(reply), prompt)]


def write(path, *rows):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return str(path)


def line(prompt, reply="", **more):
    messages = [{"role": "user", "content": prompt}]
    if reply:
        messages.append({"role": "assistant", "content": reply})
    return {"messages": messages, **more}


@pytest.mark.parametrize(
    "text, found",
    [
        ("{oops", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"conversations": []}', r"'messages' must be a non-empty list, found keys \['conversations'\]"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": "hi"}', "non-empty list"),
        ('{"messages": ["hi"]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "role 'tool'; allowed: system, user, assistant"),
        ('{"messages": [{"content": "x"}]}', "role None"),
        ('{"messages": [{"role": "user"}]}', "'content' must be a string, found no such key"),
        ('{"messages": [{"role": "user", "content": null}]}', "found null"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "found list"),
        ('{"messages": [{"role": "user", "content": "x", "token_ids": [1]}]}', "belongs to assistant"),
        ('{"messages": [{"role": "assistant", "content": "x", "token_ids": [1.5]}]}', "flat list of integers"),
        ('{"messages": [{"role": "assistant", "content": "x", "token_ids": [-1]}]}', "flat list of integers"),
        ('{"messages": [{"role": "user", "content": "x"}], "reply_ids": [1]}', "no assistant message"),
        ('{"messages": [{"role": "user", "content": "x"}], "finished": "yes"}', "'finished' must be true"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}', "'temperature' must be"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "'temperature' must be"),
    ],
)
def test_broken_line_is_named(tmp_path, text, found):
    file = write(tmp_path / "chats.jsonl", line("a", "bcd"), "\n", text + "\n")
    with pytest.raises(DataError, match=rf"chats\.jsonl:3.*{found}"):
        build_rows([file], Letters(), 100)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        list(read_chats([str(tmp_path / "missing.jsonl")]))
    with pytest.raises(DataError, match="is a folder"):
        list(read_chats([str(tmp_path)]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}\n')
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_chats([str(tmp_path / "latin.jsonl")]))
    write(tmp_path / "fake.jsonl.gz", line("a", "b"))
    with pytest.raises(DataError, match=r"fake\.jsonl\.gz:1: cannot be read"):
        list(read_chats([str(tmp_path / "fake.jsonl.gz")]))
    whole = gzip.compress(json.dumps(line("a" * 1000, "b")).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-10])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz:1: cannot be read"):
        list(read_chats([str(tmp_path / "cut.jsonl.gz")]))
    (tmp_path / "spoiled.jsonl.gz").write_bytes(whole[:10] + b"\xff" * 20 + whole[30:])
    with pytest.raises(DataError, match=r"spoiled\.jsonl\.gz:1: cannot be read"):
        list(read_chats([str(tmp_path / "spoiled.jsonl.gz")]))
    with pytest.raises(DataError, match="no chats in"):
        build_rows([write(tmp_path / "empty.jsonl", "\n")], Letters(), 100)
    with pytest.raises(DataError, match="no data files"):
        build_rows([], Letters(), 100)


def test_windows_lines_and_byte_order_mark(tmp_path):
    text = b"\xef\xbb\xbf" + json.dumps(line("a", "b")).encode() + b"\r\n"
    (tmp_path / "chats.jsonl").write_bytes(text)
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress(text))
    assert len(list(read_chats([str(file) for file in sorted(tmp_path.iterdir())]))) == 2


def test_optional_fields_of_a_chat():
    chat = parse_chat(json.dumps(line("a", "b", reply_ids=[1, 2], finished=False, temperature=0)), "f:1")
    assert (chat.messages[1].token_ids, chat.finished, chat.greedy) == ([1, 2], False, True)
    chat = parse_chat(json.dumps(line("a", "b", category="x")), "f:1")
    assert (chat.messages[1].token_ids, chat.finished, chat.greedy) == (None, True, False)


def test_every_row_is_counted(tmp_path):
    file = write(
        tmp_path / "chats.jsonl",
        line("ab", "cde", temperature=0.0),
        line("ab", "cde"),  # a duplicate
        line("no reply"),
        line("ab", "c"),  # one token: nothing to predict after the root
        line("a prompt of twenty...", "lost"),
        line("abcdef", "ghijklm"),  # truncated
    )
    dataset, report = build_rows([file], Letters(), 10)
    assert [bytes(ids) for ids in dataset["input_ids"]] == [b"abcde", b"abcdefghij"]
    assert dataset["span_ids"][1] == [0] * 6 + [1] * 4
    expected = {"chats_read": 6, "rows_rendered": 5, "rows_kept": 2, "rows_truncated": 1, "greedy_rows": 1}
    expected |= {"dropped_no_reply": 2, "dropped_after_truncation": 1, "dropped_duplicate": 1}
    expected |= {"tokens": 15, "supervised_tokens": 2 + 3}
    assert expected.items() <= report.as_dict().items()
    assert "dropped after truncation" in str(report)


def test_nothing_left_to_supervise_is_an_error(tmp_path):
    file = write(tmp_path / "chats.jsonl", line("a long prompt", "reply"), line("none"))
    with pytest.raises(EmptyLossMaskError, match=r"0 of 2 chats kept: 1 without a reply.*1 lost it.*raise max_length"):
        build_rows([file], Letters(), 10)
    with pytest.raises(ConfigError, match="max_length is 2"):
        build_rows([file], Letters(), 2)


def test_changed_file_of_one_name_is_read_anew(tmp_path):
    for reply in ("first", "other"):
        dataset, _ = build_rows([write(tmp_path / "chats.jsonl", line("ab", reply))], Letters(), 100)
        assert bytes(dataset[0]["input_ids"]) == b"ab" + reply.encode()


def chats(count, seed=""):
    return [line(f"prompt {seed}{i}", f"reply {i}", temperature=0.0 if i % 3 else 0.8) for i in range(count)]


def prompts(dataset):
    return {bytes(row["input_ids"]).split(b"reply")[0] for row in dataset}


def test_split_ignores_order_and_other_rows(tmp_path):
    rows = chats(60)
    file, reverse = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[::-1])
    more = write(tmp_path / "c.jsonl", *rows, *chats(60, "more"))
    first, again, third = (load_data([f], Letters(), 100, eval_fraction=0.3) for f in (file, reverse, more))
    assert prompts(first[1]) == prompts(again[1]) <= prompts(third[1])
    assert prompts(first[0]) == prompts(again[0]) <= prompts(third[0])
    assert 5 < len(first[1]) < 25


def test_held_out_rows_are_greedy_and_share_no_prompt_with_training(tmp_path):
    rows = [line(f"p{i // 3} ", f"reply {i}", temperature=0.0 if i % 3 else 0.8) for i in range(90)]
    train, held_out, report = load_data([write(tmp_path / "a.jsonl", *rows)], Letters(), 100, eval_rows=20)
    assert all(held_out["greedy"])
    assert not all(train["greedy"])
    assert not prompts(train) & prompts(held_out)
    assert len(held_out) == report.eval_rows == 20
    assert len(train) + len(held_out) + report.eval_rows_not_greedy == 90


def test_without_greedy_replies_all_are_held_out_and_it_is_said(tmp_path, capsys):
    rows = [line(f"p{i}", f"reply {i}") for i in range(20)]
    _, held_out, report = load_data([write(tmp_path / "a.jsonl", *rows)], Letters(), 100, eval_rows=5)
    assert (len(held_out), report.train_rows) == (5, 15)
    assert capsys.readouterr().out.count("no reply is marked greedy") == 1


def test_bad_splits_are_config_errors(tmp_path):
    dataset, _ = build_rows([write(tmp_path / "a.jsonl", *chats(4))], Letters(), 100)
    assert [len(part) for part in split_rows(dataset)] == [4, 0]
    for fraction, rows in ((1.0, 0), (0.0, -1), (0.1, 1)):
        with pytest.raises(ConfigError, match="eval_fraction in"):
            split_rows(dataset, eval_fraction=fraction, eval_rows=rows)
    with pytest.raises(DataError, match="eval_rows is 4"):
        split_rows(dataset, eval_rows=4)


def test_token_counts_are_of_predicted_tokens(tmp_path):
    """The first token of a reply is the root, never predicted; prompts do not count."""
    dataset, report = build_rows([write(tmp_path / "a.jsonl", line("aaa", "bcc"), line("b", "ad"))], Letters(), 9)
    counts = token_counts(dataset, 128)
    assert {chr(i): int(counts[i]) for i in counts.nonzero()} == {"c": 2, "d": 1}
    assert counts.dtype == torch.int64
    assert counts.sum() == report.supervised_tokens
    assert VocabMap(torch.tensor([ord("c")]), counts > 1).coverage(counts) == pytest.approx(2 / 3)
    with pytest.raises(DataError, match="outside the target's vocabulary of 100"):
        token_counts(dataset, 100)


def test_shipped_demo_chats():
    shipped = list(read_chats([str(DEMO)]))
    assert len(shipped) == 600
    assert sum(c.greedy for c in shipped) == 420
    assert all(c.messages[-1].token_ids for c in shipped)
    assert DEMO.stat().st_size < 350_000


def test_report_starts_at_zero():
    assert set(DataReport().as_dict().values()) == {0}
