"""Prepared rows: made once, found again, never half; ranks wait for them, or fail for the builder's reason."""

import json
import multiprocessing
import os
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.errors import DataError
from eagle3_train import builder, prepared
from eagle3_train.config import DataConfig, TrainConfig
from eagle3_train.data import token_counts
from eagle3_train.prepared import prepare_rows, rows_key
from eagle3_train.render import ChatRenderer
from eagle3_train.sources import open_sources
from oracles.tiny import tiny_tokenizer

DAY = 86_400


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def config(tmp_path):
    return TrainConfig(data=DataConfig((write(tmp_path / "chats.jsonl"),), eval_rows=3))


@pytest.fixture
def build(tokenizer, tmp_path):
    """Prepare rows in this process."""
    return lambda config, folder=tmp_path / "rows": prepare_rows(config, tokenizer, tokenizer_eos(tokenizer), folder)


def tokenizer_eos(tokenizer):
    return (tokenizer.eos_token_id,)


def write(file, count=12, word="reply"):
    chats = [
        {
            "messages": [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"{word} {i}"}],
            "temperature": i % 3 and 1.0,
        }
        for i in range(count)
    ]
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(file)


def finished(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_rows_are_made_once_and_lie_on_the_disk(build, config, tmp_path, monkeypatch):
    made = build(config)
    monkeypatch.setattr(prepared, "_build", pytest.fail)
    again = build(config)
    assert made.train[:] == again.train[:]
    assert made.held_out[:] == again.held_out[:]
    assert (made.report, made.end_ids) == (again.report, again.end_ids)
    assert (made.report.train_rows, made.report.eval_rows, made.report.eval_rows_not_greedy) == (5, 3, 4)
    assert Path(made.train.cache_files[0]["filename"]).parent.parent == tmp_path / "rows"
    assert [path for path in (tmp_path / "rows").rglob("*") if "tmp" in path.name] == []


def test_counts_are_of_the_two_sides(build, config, tokenizer):
    rows = build(config)
    assert torch.equal(rows.counts, token_counts(rows.train, len(tokenizer)))
    assert torch.equal(rows.held_out_counts, token_counts(rows.held_out, len(tokenizer)))
    assert rows.held_out_counts.sum() > 0
    assert torch.equal(rows.counts_of(400)[: len(tokenizer)], rows.counts)
    assert rows.counts_of(400)[len(tokenizer) :].tolist() == [0] * (400 - len(tokenizer))
    with pytest.raises(DataError, match="outside the target's vocabulary of 50"):
        rows.counts_of(50)


def test_the_key_covers_what_the_rows_depend_on(config, tokenizer, tmp_path):
    """Catches: stale rows after a change of data, template, tokenizer, rule or settings."""
    other = tiny_tokenizer()
    other.chat_template = f"{other.chat_template} "
    more = tiny_tokenizer()
    more.add_tokens(["word"])

    def key(data=config.data, tokenizer=tokenizer, eos=(1, 2)):
        return rows_key(data, ChatRenderer(tokenizer, eos, data.template_options), open_sources(data.files))

    write(tmp_path / "same.jsonl")
    write(tmp_path / "edited.jsonl", word="relpy")
    same, edited = ((str(tmp_path / name),) for name in ("same.jsonl", "edited.jsonl"))
    assert key() == key(replace(config.data, files=same)) == key(tokenizer=tiny_tokenizer())
    changes = {"files": edited, "max_length": 9, "eval_rows": 4, "template_options": {"a": 1}, "streaming": True}
    keys = [key(replace(config.data, **{name: value})) for name, value in changes.items()]
    keys += [key(replace(config.data, files=files)) for files in (same + edited, edited + same)]
    keys += [key(), key(tokenizer=other), key(tokenizer=more), key(eos=(1,))]
    assert len(set(keys)) == len(keys)


def test_a_tokenizers_last_call_does_not_change_its_key(config, tokenizer):
    used = tiny_tokenizer()
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    renderers = [ChatRenderer(t) for t in (tokenizer, used)]
    keys = [rows_key(config.data, renderer, open_sources(config.data.files)) for renderer in renderers]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("damage", ["manifest", "rows", "cut", "nonsense"])
def test_half_a_folder_is_made_anew(build, config, tmp_path, damage):
    made = build(config).train[:]
    (name,) = finished(tmp_path / "rows")
    folder = tmp_path / "rows" / name
    if damage == "cut":
        (folder / "rows.arrow").write_bytes((folder / "rows.arrow").read_bytes()[:-100])
    elif damage == "nonsense":
        (folder / "manifest.json").write_text("[]")
    else:
        next(folder.glob(f"{damage}.*")).unlink()
    assert build(config).train[:] == made
    assert finished(tmp_path / "rows") == [name]


def test_leftovers_of_killed_builds_are_removed(build, config, tmp_path):
    (tmp_path / "rows").mkdir()
    dead = [f".{'0' * 16}.{builder.node()}.{pid}.tmp" for pid in (4_000_000, os.getpid())]
    for name in dead:
        (tmp_path / "rows" / name).mkdir()
    build(config)
    assert [name for name in dead if (tmp_path / "rows" / name).exists()] == dead[1:]


def test_another_machine_was_faster(build, config, tmp_path, monkeypatch):
    """Two nodes share the folder: the rows that are there first are used."""
    write_rows = prepared._write

    def slowly(*arguments):
        write_rows(*arguments)
        monkeypatch.setattr(prepared, "_write", write_rows)
        monkeypatch.setenv("GROUP_RANK", "1")
        build(config)

    monkeypatch.setattr(prepared, "_write", slowly)
    assert len(build(config).train) == 5
    assert len(finished(tmp_path / "rows")) == 1


def test_what_cannot_be_written_leaves_nothing(build, config, tmp_path):
    """A full disk, here as a limit of the file size: neither a half folder nor a traceback."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        with pytest.raises(DataError, match=r"rows cannot be written to .*File too large; make room"):
            build(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert finished(tmp_path / "rows") == []
    assert len(build(config).train) == 5


def test_a_folder_that_cannot_be(build, config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        build(config, tmp_path / "file" / "rows")


class Ranks:
    """Processes that prepare rows as the local ranks of one machine."""

    def __init__(self, config, tokenizer, folder):
        self.config, self.tokenizer, self.folder = config, tokenizer, folder
        self.fork = multiprocessing.get_context("fork")
        self.running = []

    def start(self, rank, before=lambda: None):
        ours, theirs = self.fork.Pipe()
        process = self.fork.Process(target=self._run, args=(rank, before, theirs))
        process.start()
        theirs.close()
        self.running.append((process, ours))

    def _run(self, rank, before, result):
        os.environ["LOCAL_RANK"] = str(rank)
        before()
        try:
            rows = prepare_rows(self.config, self.tokenizer, tokenizer_eos(self.tokenizer), self.folder)
            result.send(rows.train["input_ids"][:])
        except DataError as error:
            result.send(str(error))
        # a builder lives on, to train
        time.sleep(1)

    def results(self):
        out = []
        for _, ours in self.running:
            try:
                out.append(ours.recv() if ours.poll(60) else "nothing for a minute")
            except EOFError:
                out.append(None)
        for process, _ in self.running:
            process.join(60)
        return out


@pytest.fixture
def ranks(config, tokenizer, tmp_path):
    return Ranks(config, tokenizer, tmp_path / "rows")


def slow(seconds):
    """Make a build take longer; in the process that calls it."""

    def patch():
        write_rows = prepared._write
        prepared._write = lambda *arguments: (time.sleep(seconds), write_rows(*arguments))

    return patch


def test_ranks_wait_for_the_one_that_prepares(ranks, build, config, tmp_path, capfd):
    def impatient():
        builder._TELL = 0.3

    ranks.start(1, impatient)
    time.sleep(0.5)
    ranks.start(0, slow(1.5))
    ranks.start(2)
    got = ranks.results()
    assert got[0] == got[1] == got[2] == build(config, tmp_path / "alone").train["input_ids"][:]
    out = capfd.readouterr().out
    assert "rank ?: waiting for local rank 0 (0 s)" in out
    assert f"process {ranks.running[1][0].pid} prepares the rows" in out


def test_ranks_fail_for_the_same_reason(ranks, config):
    Path(config.data.files[0]).write_text('{"messages": []}\n')
    ranks.start(1)
    ranks.start(0, slow(0.5))
    got = ranks.results()
    assert got[0] == got[1]
    assert "chats.jsonl:1: 'messages' must be a non-empty list" in got[0]


def test_the_builder_dies(ranks):
    def killed():
        prepared._write = lambda *_: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL))

    ranks.start(1)
    ranks.start(0, killed)
    waiting, builder = ranks.results()
    assert builder is None
    assert f"local rank 0 (process {ranks.running[1][0].pid}) ended while it prepared the rows" in waiting


@pytest.mark.parametrize("state, text", [("failed", "of yesterday"), ("ready", "0" * 16), ("building", "")])
def test_what_an_earlier_run_said_is_ignored(ranks, state, text):
    ranks.folder.mkdir()
    old = {"state": state, "text": text, "pid": 4_000_000, "created": time.time() - DAY, "at": time.time() - DAY}
    builder.notice_file(ranks.folder).write_text(json.dumps(old))
    ranks.start(1)
    time.sleep(0.5)
    ranks.start(0)
    got = ranks.results()
    assert got[0] == got[1]
    assert len(got[0]) == 5


def test_nobody_prepares(ranks):
    def impatient():
        builder._NOBODY = 0.5

    ranks.start(1, impatient)
    assert "no local rank 0 has begun to prepare rows" in ranks.results()[0]


def test_ready_rows_are_loaded_by_all(ranks, build, config):
    """The second start of a run: nothing is rendered."""
    expected = build(config, ranks.folder).train["input_ids"][:]

    def never():
        prepared._write = None

    ranks.start(0, never)
    ranks.start(1)
    assert ranks.results() == [expected, expected]
