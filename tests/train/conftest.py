"""What most tests of the trainer's script run on. A module that needs more builds on this `made` under its name."""

import pytest

from oracles.tiny import tiny_chats, tiny_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `target` and `chats.jsonl`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_folder(folder / "target")
    tiny_chats(folder / "chats.jsonl", folder / "target")
    return folder
