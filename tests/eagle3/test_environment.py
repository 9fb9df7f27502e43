"""What a record tells of its machine: true of this one, and null where it is not known."""

import os
import subprocess

import pytest

from eagle3 import __version__
from eagle3.environment import git_revision, hardware, usable_cores, versions


def test_versions_of_what_is_and_is_not_installed():
    found = versions(("torch", "no-such-package"))
    assert found["no-such-package"] is None and found["eagle3"] == __version__
    assert found["torch"] and found["python"]


def test_git_revision_of_untracked_files_is_none(tmp_path):
    (tmp_path / "module.py").touch()
    assert git_revision(tmp_path / "module.py") is None


def test_git_revision_tells_of_changes(tmp_path):
    def git(*words):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    file = tmp_path / "module.py"
    file.touch()
    git("init", "-q")
    git("add", "module.py")
    git("commit", "-q", "-m", "one")
    assert git_revision(file) == {"revision": git("rev-parse", "HEAD"), "modified": False}
    file.write_text("x = 1")
    found = git_revision(file)
    assert found and found["modified"] is True


def test_what_git_does_not_tell_is_unknown(monkeypatch):
    """A status that takes too long is no clean checkout."""

    def slow(command, **options):
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 10)
        return subprocess.CompletedProcess(command, 0, "abc\n")

    monkeypatch.setattr(subprocess, "run", slow)
    assert git_revision() == {"revision": "abc", "modified": None}


def test_hardware_is_of_this_machine():
    found = hardware()
    assert found["cpu"] and 1 <= found["cores"] <= (os.cpu_count() or 1)
    assert found["memory_bytes"] > 2**28 and found["load_average"] >= 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_cores_are_those_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
