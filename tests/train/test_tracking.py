"""Metrics, run record, progress line and trackers: what is on disk after a run, a kill and a resume."""

import io
import json
import math

import psutil
import pytest
import torch

from eagle3.errors import ConfigError
from eagle3_train.progress import Progress
from eagle3_train.trackers import Trackers
from eagle3_train.tracking import MetricsLog, RunRecord, peak_memory, read_metrics, write_record


def test_metrics_are_flushed_line_by_line(tmp_path):
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.write({"step": 1, "loss": torch.tensor(2.5), "accept": [0.5, 0.25]})
    assert read_metrics(log.path) == [{"step": 1, "loss": 2.5, "accept": [0.5, 0.25]}]
    log.write({"step": 1, "split": "eval", "tau": math.nan})
    assert json.loads(log.path.read_text().splitlines()[1]) == {"step": 1, "split": "eval", "tau": None}
    with pytest.raises(AssertionError, match="step 0 after step 1"):
        log.write({"step": 0})


def test_resume_keeps_steps_rising(tmp_path):
    """Killed at step 12 in the middle of a line, resumed from the checkpoint of step 10."""
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 13):
        log.write({"step": step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 13, "lo')
    log = MetricsLog(path, resume_step=10)
    for step in range(11, 15):
        log.write({"step": step})
    log.close()
    assert [r["step"] for r in read_metrics(path)] == list(range(1, 15))
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_run_starts_the_file_anew(tmp_path):
    for _ in range(2):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.write({"step": 1})
        log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_run_record(tmp_path):
    record = RunRecord(tmp_path / "run.json", {"lr": 1e-3, "out": tmp_path}, {"train": 7})
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["config"] == {"lr": 1e-3, "out": str(tmp_path)}
    assert saved["seeds"] == {"train": 7}
    assert saved["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "eagle3"} <= saved["versions"].keys()
    assert saved["hardware"]["torch_threads"] == torch.get_num_threads()
    assert saved["ended"] is None
    record.finish(best_tau=1.5)
    RunRecord(tmp_path / "run.json", {}, {}, resume_step=10).finish()
    RunRecord(tmp_path / "run.json", {}, {}, resume_step=20)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert [p["resumed_from_step"] for p in saved["previous"]] == [None, 10]
    assert saved["previous"][0]["best_tau"] == 1.5
    assert all(p["ended"] for p in saved["previous"])


@pytest.mark.parametrize("line", ['{"loss": 1.0}', "[]", '{"step": "5"}'])
def test_metrics_without_a_step_are_named(tmp_path, line):
    """A file of something else, found on resume: nothing of it may be lost, and no KeyError."""
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="without a step"):
        MetricsLog(tmp_path / "metrics.jsonl", resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_text() == line + "\n"


def test_run_record_of_something_else_is_named(tmp_path):
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ConfigError, match="no run's record"):
        RunRecord(tmp_path / "run.json", {}, {}, resume_step=1)


def test_damaged_run_record_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is not valid JSON"):
        RunRecord(tmp_path / "run.json", {}, {}, resume_step=1)


def test_write_record_replaces_whole_files(tmp_path):
    path = tmp_path / "a.json"
    write_record(path, {"a": 1})
    loop = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        write_record(path, loop)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ticking(seconds=0.5):
    times = iter(range(10_000))
    return lambda: next(times) * seconds


def test_progress_lines_off_a_terminal():
    stream = io.StringIO()
    progress = Progress(25, every=10, stream=stream, clock=ticking())
    for step in range(1, 26):
        progress.update(step, 100, loss=2.0, tau=None)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[1] == "step 10/25  loss 2  200 tok/s  ETA 0:08"
    assert "tau" not in stream.getvalue()


def test_progress_rewrites_one_line_on_a_terminal():
    stream = Terminal()
    progress = Progress(3, stream=stream, clock=ticking())
    progress.update(1, 1000, loss=12.345678)
    progress.update(2, 1000, loss=1.0, tau=1.25)
    progress.note("saved step-2")
    progress.update(3, 1000, loss=1.0)
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 2
    assert "\rstep 1/3  loss 12.35  2,000 tok/s  ETA 0:01\rstep 2/3  loss 1  tau 1.25" in text
    assert "\rsaved step-2\n" in text


def test_progress_rate_follows_the_last_steps_and_other_ranks_are_silent():
    stream = io.StringIO()
    progress = Progress(200, start_step=100, stream=stream, enabled=False, clock=ticking())
    for step in range(101, 150):
        progress.update(step, 10 if step < 120 else 50)
    progress.note("x")
    assert progress.tokens_per_second == pytest.approx(100)
    assert stream.getvalue() == ""


class FakeTracker:
    """What accelerate's trackers offer, as far as tables are concerned."""

    def __init__(self, name):
        self.name, self.logged, self.tables = name, [], []

    def log(self, values, step):
        self.logged.append((step, values))

    def log_table(self, name, columns, data, step):
        self.tables.append((step, name, columns, data))


class FakeAccelerator:
    def __init__(self, fail_times=0):
        self.fail_times, self.started, self.logged = fail_times, [], []
        self.trackers: list = []

    def init_trackers(self, project, config, init_kwargs):
        self.started.append((project, config, init_kwargs))
        self.trackers.append(len(self.started))
        if len(self.started) <= self.fail_times:
            raise RuntimeError("no api key")

    def log(self, values, step):
        self.logged.append((step, values))

    def end_training(self):
        pass


@pytest.fixture
def installed(monkeypatch):
    found = {"wandb"}
    monkeypatch.setattr("eagle3_train.trackers.util.find_spec", lambda name: name in found or None)
    return found


def test_resumed_run_continues_the_same_tracker_run(tmp_path, installed):
    first = Trackers(["wandb"], tmp_path)
    first.start(FakeAccelerator(), {"a": {"b": 1}})
    again, accelerator = Trackers(["wandb"], tmp_path), FakeAccelerator()
    assert again.run_id != first.run_id
    again.start(accelerator, {"a": {"b": 1}}, first.state())
    _, config, kwargs = accelerator.started[0]
    assert config == {"a.b": 1}
    assert kwargs["wandb"]["id"] == first.run_id
    assert kwargs["wandb"]["resume"] == "allow"
    again.log({"step": 3, "split": "eval", "tau": 1.5, "accept": [0.5, 0.25], "bad": math.nan})
    assert accelerator.logged == [(3, {"eval/tau": 1.5, "eval/accept.0": 0.5, "eval/accept.1": 0.25})]
    again.finish()


def test_runs_of_a_sweep_share_a_group(tmp_path, installed):
    """Runs of one sweep that the tracker lists apart, under names of its own; two of a name that it merges."""
    installed.add("trackio")
    first, second = (Trackers(["wandb", "trackio"], tmp_path, group="losses", name="kl-s0") for _ in range(2))
    options, others = first.init_kwargs(None), second.init_kwargs(None)
    assert {options[k]["group"] for k in ("wandb", "trackio")} == {"losses"}
    assert (options["wandb"]["name"], options["trackio"]["name"]) == ("kl-s0", f"kl-s0-{first.run_id}")
    assert (options["wandb"]["id"], options["trackio"]["name"]) != (others["wandb"]["id"], others["trackio"]["name"])
    assert options["trackio"]["name"] != others["trackio"]["name"]
    assert "group" not in Trackers(["wandb"], tmp_path).init_kwargs(None)["wandb"]


def test_wandb_without_login_goes_offline_and_says_so(tmp_path, installed, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    accelerator = FakeAccelerator(fail_times=1)
    Trackers(["wandb"], tmp_path).start(accelerator, {})
    assert accelerator.started[1][2]["wandb"]["mode"] == "offline"
    assert accelerator.trackers == [2]
    assert capsys.readouterr().err.count("offline") == 1
    monkeypatch.setenv("WANDB_MODE", "online")
    trackers, accelerator = Trackers(["wandb"], tmp_path), FakeAccelerator(fail_times=1)
    with pytest.raises(ConfigError, match="no api key"):
        trackers.start(accelerator, {})
    # accelerate ends trackers that never started with an AttributeError
    accelerator.end_training = lambda: pytest.fail("ended")
    trackers.finish()


def test_absent_tracker_is_said_once_and_left_out(tmp_path, installed, capsys):
    installed.clear()
    trackers = Trackers(["wandb", "wandb"], tmp_path)
    accelerator = FakeAccelerator()
    trackers.start(accelerator, {})
    trackers.log({"step": 1, "loss": 1.0})
    trackers.finish()
    assert (trackers.names, accelerator.started, accelerator.logged) == ([], [], [])
    assert capsys.readouterr().err.count("wandb is not installed") == 1
    Trackers(["wandb"], tmp_path, told=False)
    assert not capsys.readouterr().err, "every rank says it"
    with pytest.raises(ConfigError, match="unknown tracker 'wandbb'"):
        Trackers(["wandbb"])


def test_a_resumed_run_repeats_no_step_in_tensorboard(tmp_path, installed):
    """Steps 11 to 13, which the killed run had logged already, shown twice."""
    installed |= {"tensorboard", "trackio"}
    trackers, accelerator = Trackers(["wandb", "tensorboard", "trackio"], tmp_path), FakeAccelerator()
    trackers.start(accelerator, {}, {"run_id": "abc"}, resume_step=10)
    options = accelerator.started[0][2]
    assert options["tensorboard"] == {"purge_step": 11}
    assert options["trackio"] == {"name": "abc", "resume": "allow"}
    fresh, accelerator = Trackers(["tensorboard"], tmp_path), FakeAccelerator()
    fresh.start(accelerator, {})
    assert accelerator.started[0][2] == {}


def test_tables_by_tracker(tmp_path, installed):
    """Text that ends a cell or a row of the Markdown; a tracker without tables that ends the run."""
    installed |= {"tensorboard", "mlflow"}
    trackers, accelerator = Trackers(["wandb", "tensorboard", "mlflow"], tmp_path), FakeAccelerator()
    trackers.start(accelerator, {})
    accelerator.trackers = wandb, tensorboard, mlflow = [FakeTracker(n) for n in ("wandb", "tensorboard", "mlflow")]
    trackers.table("engine/drafts", [{"round": 1, "accepted": "a|b", "rejected": "c\nd"}], 7)
    trackers.table("engine/drafts", [], 8)
    columns = ["round", "accepted", "rejected"]
    assert wandb.tables == [(7, "engine/drafts", columns, [[1, "a|b", "c\nd"]])]
    text = "| round | accepted | rejected |\n| --- | --- | --- |\n| 1 | a\\|b | c\\nd |"
    assert tensorboard.logged == [(7, {"engine/drafts": text})]
    assert (mlflow.logged, mlflow.tables) == ([], [])


def test_peak_memory_is_in_bytes():
    """Kilobytes taken for bytes, or the reverse."""
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_memory() < 50 * now
