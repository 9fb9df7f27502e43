"""Files are old or whole, whatever happens while they are written."""

import json
import math
from typing import Any

import pytest

from eagle3.files import replace_file, write_json


@pytest.mark.parametrize("binary", [False, True])
def test_a_file_is_old_or_whole(tmp_path, binary):
    path, old = tmp_path / "f", b"old" if binary else "old"
    with replace_file(path, binary) as file:
        file.write(old)

    def begin():
        with replace_file(path, binary) as file:
            file.write(old)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    # as readable as other files
    (tmp_path / "other").write_text("x")
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_json_is_old_or_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"text": "\udc80 é", "number": math.inf})
    assert json.loads(path.read_text()) == {"text": "\udc80 é", "number": math.inf}
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    circular: list[Any] = []
    circular.append(circular)
    for value, error in ((object(), TypeError), (circular, ValueError), (deep, RecursionError)):
        with pytest.raises(error):
            write_json(path, {"x": value})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": math.nan}, allow_nan=False)
    assert json.loads(path.read_text())["number"] == math.inf
    assert list(tmp_path.iterdir()) == [path]
