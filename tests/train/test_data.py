"""From chats to rows: broken lines, counts, truncation, duplicates, splits, token counts."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from eagle3.errors import ConfigError, DataError, EmptyLossMaskError
from eagle3.vocab import VocabMap
from eagle3_train import data
from eagle3_train.chats import read_chats
from eagle3_train.data import split_rows, token_counts
from eagle3_train.data_report import DataReport
from eagle3_train.render import ChatRenderer, Row
from eagle3_train.sources import open_sources
from oracles.tiny import tiny_tokenizer

DEMO = Path(__file__).parents[2] / "recipes/data/smollm2_selfgen_demo.jsonl.gz"


class Letters(ChatRenderer):
    """One token per character; user text, then the last reply as span 1. No tokenizer, no template."""

    def __init__(self):
        self.notes = {}

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


def build_rows(file, max_length=100):
    return data.build_rows(open_sources([file]), Letters(), max_length, Path(f"{file}.arrow"))


def load_data(file, **how):
    """(train, held-out, report)"""
    dataset, report = build_rows(file)
    return *split_rows(dataset, report, **how), report


def test_the_broken_line_is_named(tmp_path):
    file = write(tmp_path / "chats.jsonl", line("a", "bcd"), "\n", '{"messages": []}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl:3: 'messages' must be a non-empty list"):
        build_rows(file)
    with pytest.raises(DataError, match=r"no chats in .*empty\.jsonl"):
        build_rows(write(tmp_path / "empty.jsonl", "\n"))


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
    dataset, report = build_rows(file, 10)
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
        build_rows(file, 10)
    with pytest.raises(ConfigError, match="max_length is 2"):
        build_rows(file, 2)


def test_an_empty_conversation_is_a_chat_without_a_reply(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": []}, line("a", "bcd")]))
    sources = open_sources([str(tmp_path / "a.json")])
    _, report = data.build_rows(sources, ChatRenderer(tiny_tokenizer()), 100, tmp_path / "rows.arrow")
    assert (report.chats_read, report.rows_kept, report.dropped_no_reply) == (2, 1, 1)


def test_changed_file_of_one_name_is_read_anew(tmp_path):
    for reply in ("first", "other"):
        dataset, _ = build_rows(write(tmp_path / "chats.jsonl", line("ab", reply)))
        assert bytes(dataset[0]["input_ids"]) == b"ab" + reply.encode()


def chats(count, seed=""):
    return [line(f"prompt {seed}{i}", f"reply {i}", temperature=0.0 if i % 3 else 0.8) for i in range(count)]


def prompts(dataset):
    return {bytes(row["input_ids"]).split(b"reply")[0] for row in dataset}


def test_split_ignores_order_and_other_rows(tmp_path):
    rows = chats(60)
    file, reverse = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[::-1])
    more = write(tmp_path / "c.jsonl", *rows, *chats(60, "more"))
    first, again, third = (load_data(f, eval_fraction=0.3) for f in (file, reverse, more))
    assert prompts(first[1]) == prompts(again[1]) <= prompts(third[1])
    assert prompts(first[0]) == prompts(again[0]) <= prompts(third[0])
    assert 5 < len(first[1]) < 25


def test_held_out_rows_are_greedy_and_share_no_prompt_with_training(tmp_path):
    rows = [line(f"p{i // 3} ", f"reply {i}", temperature=0.0 if i % 3 else 0.8) for i in range(90)]
    train, held_out, report = load_data(write(tmp_path / "a.jsonl", *rows), eval_rows=20)
    assert all(held_out["greedy"])
    assert not all(train["greedy"])
    assert not prompts(train) & prompts(held_out)
    assert len(held_out) == report.eval_rows == 20
    assert len(train) + len(held_out) + report.eval_rows_not_greedy == 90


def test_without_greedy_replies_all_are_held_out_and_it_is_said(tmp_path):
    rows = [line(f"p{i}", f"reply {i}") for i in range(20)]
    _, held_out, report = load_data(write(tmp_path / "a.jsonl", *rows), eval_rows=5)
    assert (len(held_out), report.train_rows) == (5, 15)
    assert str(report).count("no reply is marked greedy") == 1


def test_bad_splits_are_config_errors(tmp_path):
    dataset, _ = build_rows(write(tmp_path / "a.jsonl", *chats(4)))
    assert [len(part) for part in split_rows(dataset)] == [4, 0]
    for fraction, rows in ((1.0, 0), (0.0, -1), (0.1, 1)):
        with pytest.raises(ConfigError, match="eval_fraction in"):
            split_rows(dataset, eval_fraction=fraction, eval_rows=rows)
    with pytest.raises(DataError, match="eval_rows is 4"):
        split_rows(dataset, eval_rows=4)


def test_token_counts_are_of_predicted_tokens(tmp_path):
    """The first token of a reply is the root, never predicted; prompts do not count."""
    dataset, report = build_rows(write(tmp_path / "a.jsonl", line("aaa", "bcc"), line("b", "ad")), 9)
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


def test_report_tells_each_source_and_survives_json(tmp_path):
    """Catches: a source whose chats were all dropped, hidden in the sums."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write(good, line("a", "bcd"), {"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "fgh"}]})
    write(bad, line("no reply"), line("a", "bcd"))
    _, report = data.build_rows(open_sources([str(good), str(bad)]), Letters(), 100, tmp_path / "rows.arrow")
    assert f"{good}: 1 x messages, 1 x conversations; rows kept 2, dropped 0" in str(report)
    assert f"{bad}: 2 x messages; rows kept 0, dropped 2" in str(report)
    assert DataReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report


class Dying(Letters):
    def rows(self, chat):
        os.kill(os.getpid(), signal.SIGKILL)


def test_rows_of_several_processes_are_the_same(tmp_path):
    """Catches: another order, end ids or notes that stay in the other processes."""
    rows = [{**line(f"p{i % 150}", f"reply {i % 150}"), "tools": [{"name": "f"}]} for i in range(300)]
    file = write(tmp_path / "a.jsonl", *rows)
    tokenizer = tiny_tokenizer()
    got = []
    for workers in (1, 2):
        renderer = ChatRenderer(tokenizer)
        dataset, report = data.build_rows(open_sources([file]), renderer, 100, tmp_path / f"{workers}.arrow", workers)
        got.append((dataset[:], report, renderer.end_ids))
    assert got[0] == got[1]
    assert got[0][2] == {tokenizer.eos_token_id}
    assert len(got[0][1].notes) == 1
    write(tmp_path / "b.jsonl", *rows[:9], {"messages": []}, "broken")
    with pytest.raises(DataError, match=r"b\.jsonl:10: 'messages'"):
        data.build_rows(
            open_sources([str(tmp_path / "b.jsonl")]), ChatRenderer(tokenizer), 100, tmp_path / "b.arrow", 2
        )


@pytest.mark.full
def test_a_rendering_process_that_dies(tmp_path):
    """Catches: a wait for ever."""
    file = write(tmp_path / "a.jsonl", line("a", "bcd"))
    with pytest.raises(DataError, match=r"renders chats died: too little memory for data\.workers"):
        data.build_rows(open_sources([file]), Dying(), 100, tmp_path / "c.arrow", 2)
