"""`train/regenerate.py` on tiny targets: what it writes is what the target says, and what the trainer supervises."""

import functools
import gzip
import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import ConfigError, DataError, Eagle3Error
from eagle3.target import Target
from eagle3_infer.models import load_target
from eagle3_infer.settings import RunSettings
from eagle3_train.chats import Chat, Message, parse_chat, read_chats
from eagle3_train.conversations import Conversation, deduplicated, is_greedy, named, noise_key
from eagle3_train.regenerate_config import RegenerateConfig
from eagle3_train.render import ChatRenderer
from eagle3_train.reply_file import ReplyFile, all_parts, check_manifest, part_path, read_ids
from eagle3_train.turns import Turns
from oracles.script import ROOT
from oracles.tiny import greedy, tiny_folder, tiny_tokenizer

SCRIPT = ROOT / "train/regenerate.py"
NEW_TOKENS = 12
PROMPTS = [
    {"prompt": "hello"},
    {"id": "named", "turns": ["one", "two", "three"], "category": "math"},
    {"prompt": "hello"},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "an old reply"},
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": "another"},
        ]
    },
    *({"prompt": f"{i * i} {chr(97 + i)}"} for i in range(12)),
]
# an equal one was before
DISTINCT = len(PROMPTS) - 1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`target` (a folder) whose replies often end by themselves, and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    target = Target.load(folder / "target")
    with torch.no_grad():
        target.lm_head.weight[target.tokenizer.eos_token_id] *= 2.5
    with target.stock() as model:
        model.save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


@pytest.fixture(scope="module")
def loaded():
    """Targets that were loaded before, as most tests use the same."""
    load = functools.lru_cache(lambda path, dtype, device: load_target(RunSettings(path, dtype=dtype), device))
    return lambda settings, device: load(settings.target, settings.dtype, device)


@pytest.fixture
def regenerate(made, loaded, tmp_path, capsys, monkeypatch):
    """Call main; the rows that it wrote to `output`, by id. `code` is what main must return."""
    monkeypatch.setattr("eagle3_infer.models.load_target", loaded)
    main = runpy.run_path(str(SCRIPT))["main"]

    def call(output="replies.jsonl", code=0, **changes):
        settings: dict[str, Any] = {
            "target": made / "target",
            "output": tmp_path / output,
            "max_new_tokens": NEW_TOKENS,
            "device": "cpu",
            **({} if "self" in changes else {"prompts": made / "prompts.jsonl"}),
            **changes,
        }
        flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        capsys.readouterr()
        assert main(flags) == code
        call.out, call.err = capsys.readouterr()
        return rows_by_id(tmp_path / output)

    return call


def rows_by_id(path: Path) -> dict[str, dict]:
    if not path.exists():
        return {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def replies(row: dict) -> list[dict]:
    return [m for m in row["messages"] if "token_ids" in m]


def test_every_prompt_is_answered_once_in_the_trainers_form(regenerate):
    rows = regenerate()
    assert len(rows) == DISTINCT
    assert "left out: 1 duplicates" in regenerate.out
    assert rows["named"]["category"] == "math"
    chat = next(row for row in rows.values() if row["messages"][0]["role"] == "system")
    assert next(m["content"] for m in chat["messages"] if m["role"] == "user") == "first"
    assert "an old reply" not in str(chat)
    assert {row["temperature"] for row in rows.values()} == {0.0, 0.8}
    # a reply that was cut ends its chat; one that ended by itself is followed by the next turn
    for row in rows.values():
        lengths = [len(m["token_ids"]) for m in replies(row)]
        assert all(length < NEW_TOKENS for length in lengths[:-1])
        assert row["finished"] == (lengths[-1] < NEW_TOKENS)
    assert any(len(replies(row)) > 1 for row in rows.values())
    assert {row["finished"] for row in rows.values()} == {True, False}


def test_generated_ids_survive_the_trainers_pipeline(regenerate, made, tmp_path):
    """Every supervised id of the trainer's rows is one that the target generated: its greedy choice at T = 0."""
    assert len(regenerate("replies.jsonl.gz", greedy_share=1)) == DISTINCT
    target = Target.load(made / "target")
    renderer = ChatRenderer(target.tokenizer, target.eos_ids)
    chats = list(read_chats([str(tmp_path / "rep*.jsonl.gz")]))
    assert len(chats) == DISTINCT
    for chat in chats:
        assert chat.greedy
        for made_row in renderer.rows(chat):
            spans = torch.tensor(made_row.span_ids)
            for span in range(1, int(spans.max()) + 1):
                at = (spans == span).nonzero().flatten().tolist()
                prompt, reply = made_row.input_ids[: at[0]], made_row.input_ids[at[0] : at[-1] + 1]
                assert greedy(target, prompt, NEW_TOKENS) == reply


@pytest.mark.parametrize("changes", [{"batch": 1}, {"batch": 3}, {"limit": 9}, {"draft": "random"}])
def test_a_reply_depends_on_seed_and_id_alone(regenerate, changes):
    """Sampled ones too, whatever the batch, the other prompts or the mode of decoding."""
    expected = regenerate("expected.jsonl")
    rows = regenerate("rows.jsonl", **changes)
    assert rows
    assert rows == {name: expected[name] for name in rows}


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_speculative_modes_write_the_same(regenerate, mode):
    assert regenerate(draft="random", mode=mode, limit=6) == regenerate("plain.jsonl", mode="plain", limit=6)


def test_another_seed_changes_sampled_replies_alone(regenerate):
    first, second = regenerate("a.jsonl"), regenerate("b.jsonl", seed=1)
    differing = [row for name, row in first.items() if row["messages"] != second[name]["messages"]]
    assert len(differing) > 2
    assert {row["temperature"] for row in differing} == {0.8}


def test_order_of_prompts_changes_nothing(regenerate, made, tmp_path):
    lines = (made / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    assert regenerate("a.jsonl") == regenerate("b.jsonl", prompts=tmp_path / "reversed.jsonl")


def test_the_target_writes_its_own_chats(regenerate, made):
    rows = regenerate(self=12, system="Be brief.", greedy_share=1)
    target = Target.load(made / "target")
    renderer = ChatRenderer(target.tokenizer, target.eos_ids)
    # an empty user turn is no chat
    assert set(rows) <= {f"self-{i}" for i in range(12)}
    assert len(rows) > 6
    for row in rows.values():
        assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]
        end = [i for i in row["user_ids"] if i not in target.eos_ids]
        assert row["messages"][1]["content"] == target.tokenizer.decode(end, skip_special_tokens=True).strip()
        (made_row,) = renderer.rows(parse_chat(row, row["id"]))
        cut = made_row.span_ids.index(1)
        assert greedy(target, made_row.input_ids[:cut], NEW_TOKENS) == made_row.input_ids[cut:]
    assert len({row["messages"][1]["content"] for row in rows.values()}) > 1
    more = regenerate(self=20, system="Be brief.", greedy_share=1)
    assert {name: more[name] for name in rows} == rows
    assert len(more) > len(rows)


def test_self_written_chats_do_not_depend_on_batch_or_mode(regenerate):
    expected = regenerate("a.jsonl", self=8)
    assert regenerate("b.jsonl", self=8, batch=2) == expected
    assert regenerate("c.jsonl", self=8, draft="random", batch=3) == expected


# going on


@pytest.mark.parametrize("output", ["replies.jsonl", "replies.jsonl.gz"])
def test_a_file_cut_at_any_byte_is_completed(regenerate, tmp_path, output):
    expected = regenerate(f"expected-{output}")
    regenerate(output, limit=5)
    regenerate(output, limit=8)
    whole = (tmp_path / output).read_bytes()
    for size in [0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1]:
        (tmp_path / output).write_bytes(whole[:size])
        assert regenerate(output) == expected


def test_nothing_is_made_twice(regenerate, tmp_path):
    expected = regenerate()
    before = (tmp_path / "replies.jsonl").read_bytes()
    assert regenerate() == expected
    assert f"{DISTINCT} of {DISTINCT} chats done, 0 to write" in regenerate.out
    assert (tmp_path / "replies.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": 0.7}, "temperature 0.8 (now 0.7)"),
        ({"max_new_tokens": 13}, "max_new_tokens 12 (now 13)"),
        ({"seed": 5}, "seed 0 (now 5)"),
        ({"self": 3}, "prompts"),
        ({"dtype": "bfloat16"}, "dtype float32 (now bfloat16)"),
    ],
)
def test_other_settings_do_not_go_on_with_a_file(regenerate, tmp_path, changes, message):
    regenerate(limit=1)
    before = (tmp_path / "replies.jsonl").read_bytes()
    regenerate(code=2, **changes)
    assert message in regenerate.err
    assert (tmp_path / "replies.jsonl").read_bytes() == before


def test_another_target_or_other_prompts_do_not_go_on_with_a_file(regenerate, made, tmp_path):
    regenerate(limit=1)
    tiny_folder(tmp_path / "other", seed=1)
    regenerate(code=2, target=tmp_path / "other")
    assert "target" in regenerate.err
    (tmp_path / "more.jsonl").write_text((made / "prompts.jsonl").read_text() + '{"prompt": "one more"}\n')
    regenerate(code=2, prompts=tmp_path / "more.jsonl")
    assert "prompts" in regenerate.err


@pytest.mark.parametrize("sent, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_what_is_finished_is_written_before_a_signal_ends_the_run(regenerate, tmp_path, monkeypatch, sent, code):
    """Then the same command goes on, and nothing tells that it was stopped."""
    add, before = ReplyFile.add, signal.getsignal(signal.SIGTERM)

    def add_and_signal(file, row):
        add(file, row)
        if len(file._pending) == 3:
            os.kill(os.getpid(), sent)

    monkeypatch.setattr(ReplyFile, "add", add_and_signal)
    written = regenerate("replies.jsonl.gz", code=code)
    assert "the same command goes on" in regenerate.err
    assert signal.getsignal(signal.SIGTERM) == before
    assert 3 <= len(written) < DISTINCT
    monkeypatch.setattr(ReplyFile, "add", add)
    rows = regenerate("replies.jsonl.gz")
    assert {name: rows[name] for name in written} == written
    assert rows == regenerate("expected.jsonl")


def test_a_full_disk_is_told_and_the_run_goes_on_later(regenerate, monkeypatch):
    written, write = [], os.pwrite

    def filling(file, data, offset):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(data)
        return write(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr("eagle3_train.reply_file.FLUSH_ROWS", 1)
        patch.setattr(os, "pwrite", filling)
        assert len(regenerate(code=2)) == 2
    assert "No space left on device" in regenerate.err
    assert regenerate.err.count("\n") == 1
    assert regenerate() == regenerate("expected.jsonl")


def test_several_processes_share_the_prompts(regenerate, tmp_path, monkeypatch):
    expected = regenerate("expected.jsonl")
    parts: dict[str, dict] = {}
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        regenerate("replies.jsonl.gz")
        rows = rows_by_id(tmp_path / f"replies.rank{rank}of3.jsonl.gz")
        assert len(rows) == DISTINCT // 3
        parts |= rows
    assert parts == expected
    # one process more or less later: what the others wrote is not made again
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert not regenerate("replies.jsonl.gz")


# what is left out


def test_prompts_that_are_too_long_are_counted_and_left_out(regenerate, made, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": "long", "prompt": "%s"}\n{"id": "short", "prompt": "a"}\n' % ("x" * 600))
    assert set(regenerate(prompts=tmp_path / "p.jsonl")) == {"short"}
    assert "left out: 1 too long" in regenerate.out
    assert set(regenerate("all.jsonl", max_prompt_tokens=30, prompts=tmp_path / "p.jsonl")) == {"short"}
    assert set(regenerate("none.jsonl", max_prompt_tokens=3, prompts=tmp_path / "p.jsonl")) == set()
    assert "left out: 2 too long" in regenerate.out


def test_a_later_turn_that_is_too_long_ends_its_chat(regenerate, tmp_path):
    line = {"id": "a", "turns": ["hello", "x" * 600]}
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    rows = regenerate(prompts=tmp_path / "p.jsonl", max_new_tokens=100, greedy_share=1)
    assert [m["role"] for m in rows["a"]["messages"]] == ["user", "assistant"]
    assert rows["a"]["finished"] is True
    assert "left out: 1 too long" in regenerate.out


def test_conversations_that_the_template_refuses_are_counted(regenerate, made, tmp_path):
    folder = tmp_path / "strict"
    tiny_folder(folder)
    template = "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('no bad words') }}{% endif %}"
    file = folder / "chat_template.jinja"
    file.write_text(template + "{% endfor %}" + file.read_text())
    lines = [{"id": "a", "prompt": "bad"}, {"id": "b", "prompt": "good"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert set(regenerate(target=folder, prompts=tmp_path / "p.jsonl")) == {"b"}
    assert "left out: 1 failed" in regenerate.out
    assert "no bad words" in regenerate.out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"prompts": os.devnull}, "holds no prompt"),
        ({"self": 3, "prompts": "x.jsonl"}, "either --prompts FILE or --self N"),
        ({"system": "S"}, "system belongs to --self"),
        ({"greedy_share": 1.5}, "greedy_share is 1.5"),
        ({"mode": "tree"}, "mode is tree; it needs a --draft"),
        ({"mode": "plain", "draft": "random"}, "needs no --draft"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"output": "replies.json"}, "must end in .jsonl"),
        ({"batch": 0}, "batch is 0"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"draft": "/nowhere"}, "--draft /nowhere does not exist"),
        ({"target": "/nowhere"}, "/nowhere"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(regenerate, changes, message):
    regenerate(code=2, **changes)
    assert message in regenerate.err
    assert regenerate.err.count("\n") == 1


@pytest.mark.parametrize(
    "lines, message",
    [
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "id 'a' stands for two prompts"),
        ('{"prompt": "x"}\n{"messages": [{"role": "system", "content": "x"}]}\n', "p.jsonl:2: no user message"),
        ('{"prompt": "x"}\n{"text": "x"}\n', "p.jsonl:2"),
        ('{"prompt": "x"}\nnonsense\n', "p.jsonl:2: not valid JSON"),
    ],
)
def test_a_broken_line_is_named(regenerate, tmp_path, lines, message):
    (tmp_path / "p.jsonl").write_text(lines)
    regenerate(code=2, prompts=tmp_path / "p.jsonl")
    assert message in regenerate.err


# the file


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_cut_of_a_file_keeps_whole_rows(tmp_path, name):
    """Rows flushed apart are kept apart: a cut loses what comes after it, and nothing before."""
    path, ends = tmp_path / name, [0]
    for i in range(4):
        with ReplyFile(path) as file:
            file.add({"id": f"é{i}", "text": "line\u2028two"})
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = max(i for i, end in enumerate(ends) if end <= size)
        with ReplyFile(path) as file:
            assert file.ids == {f"é{i}" for i in range(kept)}
        assert path.stat().st_size == ends[kept]
        with ReplyFile(path) as file:
            file.add({"id": "new"})
        assert list(rows_by_id(path)) == [*(f"é{i}" for i in range(kept)), "new"]


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    path, write = tmp_path / "a.jsonl", os.pwrite

    def full(file, data, offset):
        write(file, data[:3], offset)
        raise OSError(28, "No space left on device")

    with ReplyFile(path) as file:
        file.add({"id": "kept"})
        file.flush()
        monkeypatch.setattr(os, "pwrite", full)
        file.add({"id": "lost"})
        with pytest.raises(Eagle3Error, match="No space left on device; the 1 newest rows are lost"):
            file.flush()
    monkeypatch.undo()
    assert list(rows_by_id(path)) == ["kept"]


def test_a_signal_within_a_flush_writes_no_row_twice(tmp_path, monkeypatch):
    path, write = tmp_path / "a.jsonl", os.pwrite

    def interrupted(*arguments):
        write(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    with ReplyFile(path) as file:
        file.add({"id": "a"})
        monkeypatch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.flush()
    assert list(rows_by_id(path)) == ["a"]


def test_two_writers_of_one_file_are_refused(tmp_path):
    with ReplyFile(tmp_path / "a.jsonl"), pytest.raises(ConfigError, match="written by another process"):
        ReplyFile(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_damage_before_the_end_is_told(tmp_path, name):
    path = tmp_path / name
    for i in range(2):
        with ReplyFile(path) as file:
            file.add({"id": str(i)})
    whole = path.read_bytes()
    path.write_bytes(b"?" + whole[1:])
    with pytest.raises(DataError, match=r"a\.jsonl"):
        ReplyFile(path)


def test_parts_are_found_whatever_their_number(tmp_path):
    output = tmp_path / "a[1].jsonl.gz"
    paths = [output, part_path(output, 0, 2), part_path(output, 1, 2), part_path(output, 2, 3)]
    for path in [*paths, tmp_path / "a[1].jsonl", tmp_path / "a1.rank0of2.jsonl.gz"]:
        path.touch()
    assert all_parts(output) == paths
    assert part_path(output, 0, 1) == output


def test_rows_of_unknown_origin_are_not_added_to(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(ConfigError, match=r"exists, but not a\.jsonl\.manifest"):
        check_manifest(tmp_path / "a.jsonl", {"seed": 0}, {})


# turns


@pytest.mark.parametrize(
    "ended, generated, kept, finished",
    [
        (True, [5, 6, 256], [5, 6], True),
        (True, [256], [], True),
        # another EOS id than the template's
        (True, [5, 258], [5, 258], False),
        (False, [5, 6], [5, 6], False),
    ],
)
def test_the_trainer_supervises_exactly_what_was_generated(ended, generated, kept, finished):
    tokenizer = tiny_tokenizer()
    turns = Turns(ChatRenderer(tokenizer, [tokenizer.eos_token_id]))
    assert turns.end_ids == [tokenizer.eos_token_id] == [256]
    assert turns.reply_ids(generated, ended) == (kept, finished)
    chat = Chat([Message("user", "a"), Message("assistant", "b", kept)], finished)
    (row,) = turns.renderer.rows(chat)
    assert [i for i, span in zip(row.input_ids, row.span_ids, strict=True) if span] == generated


def test_a_user_turn_begins_and_ends_where_the_template_says():
    tokenizer = tiny_tokenizer()
    turn = Turns(ChatRenderer(tokenizer, [])).user_turn("<|im_start|>user\n")
    text = "<|im_start|>system\n<|im_start|>user\n<|im_end|>\n<|im_start|>user\n"
    assert tokenizer.decode(turn.prompt_ids) == text
    assert (turn.end_ids, turn.stop) == ((256,), ())


def test_a_template_without_special_tokens_ends_user_turns_by_its_text():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    turn = Turns(ChatRenderer(tokenizer, [256])).user_turn(None)
    assert (tokenizer.decode(turn.prompt_ids), turn.end_ids, turn.stop) == ("[INST] ", (), ("[/INST]",))
    assert turn.text(" what is it? [/INST] and") == "what is it?"


def test_a_template_that_rewrites_history_is_read_as_at_inference():
    """What the target reads before the second reply is the row that the trainer makes of it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = Turns(ChatRenderer(tokenizer, [256]))
    chat = Conversation("c", turns=["one", "two"])
    for text in ("<think>hm</think>A", "B"):
        prompt = turns.prompt_ids(chat)
        chat.reply(text, tokenizer(text)["input_ids"], True)
        row = turns.renderer.rows(Chat(chat.messages))[-1]
        assert row.input_ids[: len(prompt)] == prompt
        assert row.span_ids.index(max(row.span_ids)) == len(prompt)
    assert "<think>" not in tokenizer.decode(turns.renderer.rows(Chat(chat.messages))[-1].input_ids)


def test_messages_of_tools_end_what_can_be_answered_anew(regenerate, tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    line = {
        "id": "a",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "messages": [
            {"role": "user", "content": "one"},
            call,
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "42"},
            {"role": "user", "content": "two"},
        ],
    }
    (tmp_path / "p.jsonl").write_text(json.dumps(line) + "\n")
    row = regenerate(prompts=tmp_path / "p.jsonl")["a"]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["tools"] == line["tools"]


# ids


def test_greedy_share_is_of_ids_and_near_what_was_asked():
    names = [f"prompt-{i}" for i in range(2000)]
    assert abs(sum(is_greedy(name, 0.6) for name in names) / 2000 - 0.6) < 0.04
    assert not any(is_greedy(name, 0) for name in names)
    assert all(is_greedy(name, 1) for name in names)
    # a larger share keeps those of a smaller one
    assert all(is_greedy(name, 0.8) for name in names if is_greedy(name, 0.3))
    assert len({noise_key(name) for name in names}) == 2000
    assert all(0 <= noise_key(name) < 2**63 for name in names)


def test_ids_are_of_content_and_duplicates_go():
    chats = [named(Conversation("", turns=[text]), None) for text in ("a", "b", "a")]
    kept, duplicates = deduplicated(chats)
    assert ([chat.turns for chat in kept], duplicates) == ([["a"], ["b"]], 1)
    assert named(Conversation("", [Message("system", "a")], ["b"]), None).id not in {chat.id for chat in chats}
    assert named(Conversation("", turns=["a", "b"]), None).id != named(Conversation("", turns=["a b"]), None).id


def test_config_needs_one_source():
    with pytest.raises(ConfigError, match="either"):
        RegenerateConfig()
    assert RegenerateConfig(self=3).self == 3


def test_read_ids_needs_ids(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match="row 1 has no 'id'"):
        read_ids(tmp_path / "a.jsonl")
