"""A sweep on disk, and a runner in place of every subprocess."""

import pytest

from oracles.sweeps import BASE, SWEEP, FakeRunner


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A folder with base.yaml, sweep.yaml and chats.jsonl, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    return tmp_path / "sweep.yaml"


@pytest.fixture
def runner(monkeypatch):
    """In place of every subprocess; no picture is drawn."""
    monkeypatch.setattr("eagle3_recipes.summary.find_spec", lambda name: None)
    runner = FakeRunner()
    monkeypatch.setattr("eagle3_recipes.execute.start_process", runner)
    return runner
