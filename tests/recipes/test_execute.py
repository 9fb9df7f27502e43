"""Runs as processes: order, failures, several at once, ^C."""

import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from eagle3.errors import ConfigError
from eagle3_recipes.execute import DONE, FAILED, STOPPED, WAITING, Execution, Job, Stage, start_process
from eagle3_recipes.lock import take_lock
from oracles.sweeps import FakeProcess


def job(folder, *names, code=0, files=True):
    """A job whose stages leave a file each; `code` is how its last one ends."""
    stages = []
    for name in names:
        file = folder / name
        command = [name, str(code if name == names[-1] else 0), str(file) if files else ""]
        stages.append(Stage(name, command, folder / f"{name}.log", file.is_file))
    return Job(folder.name, folder, stages)


class Clock:
    """Starts jobs that end after a number of looks; notes how many ran at once."""

    def __init__(self, looks=1):
        self.looks, self.running, self.most, self.started, self.places = looks, [], 0, [], []

    def __call__(self, command, log, place):
        log.parent.mkdir(parents=True, exist_ok=True)
        name, code, file = command
        process = FakeProcess(None)
        self.running.append(process)
        self.started.append(name)
        self.places.append(place)
        self.most = max(self.most, sum(p.code is None for p in self.running))
        looks = iter(range(self.looks))

        def poll():
            if process.code is None and next(looks, None) is None:
                process.code = int(code)
                if file and not process.code:
                    open(file, "w").close()
            return process.code

        process.poll = poll
        return process


def execute(jobs, start, at_once=1):
    said = []
    places = [{"place": str(i)} for i in range(at_once)]
    Execution(jobs, places, start, said.append, pause=0).run()
    return said


def test_stages_in_order_and_what_is_done_is_left(tmp_path):
    """An evaluation before its head; a head trained twice."""
    first, start = job(tmp_path / "a", "train", "evaluate"), Clock()
    (tmp_path / "a").mkdir()
    execute([first], start)
    assert (start.started, first.status) == (["train", "evaluate"], DONE)
    again = job(tmp_path / "a", "train", "evaluate")
    assert execute([again], start) == ["[1/1] a: done before"]
    (tmp_path / "a/evaluate").unlink()
    execute([again], start)
    assert start.started == ["train", "evaluate", "evaluate"]


def test_a_failure_is_told_and_the_others_go_on(tmp_path):
    bad, good = job(tmp_path / "a", "train", "evaluate", code=3), job(tmp_path / "b", "train")
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "a/evaluate.log").write_text("".join(f"line {i}\n" for i in range(30)))
    execute([bad, good], Clock())
    assert (bad.status, good.status) == (FAILED, DONE)
    assert "evaluate ended with code 3" in bad.failure
    assert "line 29" in bad.failure
    assert "line 20" not in bad.failure


def test_a_command_that_leaves_nothing_has_failed(tmp_path):
    """Exit code 0 without a result: the stage started anew for ever."""
    empty = job(tmp_path / "a", "train", files=False)
    execute([empty], Clock())
    assert empty.status == FAILED
    assert "left no result" in empty.failure


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_so_many_at_once(tmp_path, at_once):
    jobs = [job(tmp_path / str(i), "train", "evaluate") for i in range(5)]
    for i in range(5):
        (tmp_path / str(i)).mkdir()
    start = Clock(looks=3)
    execute(jobs, start, at_once)
    assert start.most == at_once
    # each process had a place to itself, and all places were used
    assert {place["place"] for place in start.places} == {str(i) for i in range(at_once)}
    assert all(one.status == DONE for one in jobs)


def test_one_folder_has_one_run_at_a_time(tmp_path):
    """Two variants that measure one head, both training it."""
    (tmp_path / "a").mkdir()
    first, second = job(tmp_path / "a", "train", "evaluate"), job(tmp_path / "a", "train", "other")
    start = Clock(looks=3)
    execute([first, second], start, at_once=2)
    assert start.started == ["train", "evaluate", "other"]


CHILD = """
import signal, sys, time, pathlib
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
"""


def interrupted_once_ready(execution, log):
    """Run it, with ^C as soon as the child's log says `ready`."""

    def interrupt():
        while not (log.is_file() and "\nready" in log.read_text()):
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        execution.run()
    thread.join()


def test_interrupted_children_end_cleanly(tmp_path):
    """^C that leaves trainers running, or kills them before they have saved."""
    saved, log = tmp_path / "saved", tmp_path / "train.log"
    first = Job("a", tmp_path, [Stage("train", [sys.executable, "-c", CHILD, str(saved)], log, lambda: False)])
    second = Job("b", tmp_path / "b", [Stage("train", ["never"], log, lambda: False)])
    children: list[subprocess.Popen] = []

    def start(command, path, place):
        children.append(start_process(command, path, place))
        return children[-1]

    interrupted_once_ready(Execution([first, second], start=start, tell=lambda _: None, pause=0.05), log)
    assert saved.read_text() == "saved"
    assert [child.poll() for child in children] == [143]
    assert (first.status, second.status) == (STOPPED, WAITING)


WITH_WORKER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, getattr(signal, sys.argv[1]))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
print("ready", flush=True)
time.sleep(60)
"""


def wait_for_lock(folder):
    until = time.monotonic() + 10
    while True:
        try:
            take_lock(folder).close()
            break
        except ConfigError:
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize("on_term, grace", [("SIG_IGN", 0.2), ("SIG_DFL", 20.0)])
def test_an_interrupted_child_ends_with_its_workers(tmp_path, monkeypatch, on_term, grace):
    """Workers that inherit the lock: the next run is told that a dead process uses the folder."""
    monkeypatch.setattr("eagle3_recipes.execute.GRACE", grace)
    log = tmp_path / "train.log"
    command = [sys.executable, "-c", WITH_WORKER, on_term]
    first = Job("a", tmp_path, [Stage("train", command, log, lambda: False)])

    interrupted_once_ready(Execution([first], tell=lambda _: None, pause=0.05), log)
    wait_for_lock(tmp_path)


def test_a_child_that_is_killed_takes_its_workers_along(tmp_path):
    """Out of memory: the trainer is gone, its workers hold the folder."""
    dies = WITH_WORKER.replace("time.sleep(60)\n", "signal.raise_signal(signal.SIGKILL)\n")
    assert dies != WITH_WORKER
    command = [sys.executable, "-c", dies, "SIG_DFL"]
    first = Job("a", tmp_path, [Stage("train", command, tmp_path / "train.log", lambda: False)])
    Execution([first], tell=lambda _: None, pause=0.05).run()
    assert "train ended with code -9" in first.failure
    wait_for_lock(tmp_path)


@pytest.mark.parametrize("error", [KeyError("tau"), OSError(28, "no space"), ConfigError("other version")])
def test_an_error_after_a_stage_fails_its_job_alone(tmp_path, error):
    def after():
        raise error

    for name in "abc":
        (tmp_path / name).mkdir()
    bad, good, never = (job(tmp_path / name, "train") for name in "abc")
    bad.stages = [replace(bad.stages[0], after=after)]
    start = Clock()

    def start_some(command, log, place):
        if "c" in log.parts:
            raise error
        return start(command, log, place)

    if isinstance(error, KeyError):
        execute([bad, good], start_some)
    else:
        execute([bad, never, good], start_some)
        assert never.status == FAILED
        assert f"train did not start; {error}" in never.failure
    assert (bad.status, good.status) == (FAILED, DONE)
    assert f"its result cannot be kept; {type(error).__name__}: {error}" in bad.failure


def test_the_log_begins_with_a_command_that_can_be_pasted(tmp_path):
    """A stop string, a variant with a blank, a path that is no text."""
    words = [sys.executable, "-c", "", "more steps", "\n\n", "[1, 14]", "\udcff"]
    assert start_process(words, tmp_path / "a.log", {}).wait() == 0
    text = (tmp_path / "a.log").read_text()
    assert shlex.split(text.removeprefix("$ "))[1:-1] == words[1:-1]
    assert "udcff" in text


def test_a_child_holds_its_folder(tmp_path):
    """An evaluation that a killed runner left, and the next runner's beside it, into one report."""
    held = start_process([sys.executable, "-c", "input()"], tmp_path / "evaluate.log", {})
    held.kill()
    held.wait()
    left = start_process([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "evaluate.log", {})
    again = Job("a", tmp_path, [Stage("evaluate", [sys.executable, "-c", ""], tmp_path / "a.log", lambda: False)])
    other = Job(
        "b", tmp_path / "b", [Stage("evaluate", [sys.executable, "-c", ""], tmp_path / "b/b.log", lambda: False)]
    )
    Execution([again, other], tell=lambda _: None, pause=0.05).run()
    assert f"evaluate did not start; {tmp_path} is in use by process {left.pid}, started by" in again.failure
    assert "left no result" in other.failure
    left.kill()
    left.wait()
    Execution([again], tell=lambda _: None, pause=0.05).run()
    assert "left no result" in again.failure
