"""What a run leaves behind: every form of the report, whatever is pressed and whoever reads the terminal."""

import json
import signal
import sys
from pathlib import Path

import pytest

from eagle3.errors import ConfigError
from eagle3_infer import outputs
from eagle3_infer.destinations import check_destinations
from eagle3_infer.outputs import deliver
from eagle3_infer.replies import Told
from eagle3_infer.settings import RunSettings
from oracles.reports import drafting_modes, report_of


@pytest.fixture
def settings(tmp_path):
    return RunSettings(json=str(tmp_path / "r.json"), html=str(tmp_path / "r.html"), plot=str(tmp_path / "charts"))


@pytest.fixture(autouse=True)
def charts(monkeypatch):
    """Quick ones."""

    def draw(report, folder):
        folder.mkdir(exist_ok=True)
        (folder / "tau.png").write_bytes(b"PNG")
        return [folder / "tau.png"]

    monkeypatch.setattr(outputs, "write_charts", draw)


@pytest.mark.parametrize("name", ["write_json", "write_charts", "write_html"])
def test_ctrl_c_while_files_are_written_loses_none(settings, tmp_path, monkeypatch, capsys, name):
    """The first begins them again; those that follow are not heard."""
    real, calls, told = getattr(outputs, name), [], []

    def impatient(*args, **options):
        calls.append(name)
        signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    def tell(interrupted):
        told.append(interrupted)
        return Told()

    monkeypatch.setattr(outputs, name, impatient)
    assert deliver(settings, report_of(drafting_modes()), "the tables", tell) is True
    assert len(calls) == 2
    assert told[-1] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["charts", "r.html", "r.json"]
    assert "tree" in json.loads((tmp_path / "r.json").read_text())["modes"]
    out = capsys.readouterr().out
    assert all(word in out for word in ("the tables", "report: ", "charts: ", "page: "))
    # heard again afterwards
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_files_are_written_before_anything_is_printed(settings, tmp_path, monkeypatch):
    """`eagle3-infer --json r.json | head` closes the pipe long before the tables."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        deliver(settings, report_of(drafting_modes()), "the tables")
    assert (tmp_path / "r.json").is_file()
    assert (tmp_path / "r.html").is_file()


def test_tables_are_printed_where_a_file_cannot_be_written(settings, monkeypatch, capsys):
    def full(path, report, **options):
        raise OSError("no space left")

    monkeypatch.setattr(outputs, "write_json", full)
    with pytest.raises(OSError, match="no space left"):
        deliver(settings, report_of(drafting_modes()), "the tables")
    assert "the tables" in capsys.readouterr().out


def test_a_folder_that_is_there_needs_no_parent(tmp_path, monkeypatch):
    """`/data/charts` may be one's own, and `/data` root's; a file is renamed into its place, so its parent counts."""
    charts, own = tmp_path / "charts", {tmp_path / "charts"}
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) in own)
    with pytest.raises(ConfigError, match=f"--plot {charts}: the folder {tmp_path} is not writable"):
        check_destinations({}, {"--plot": str(charts)})
    charts.mkdir()
    check_destinations({}, {"--plot": str(charts)})
    (tmp_path / "r.json").touch()
    with pytest.raises(ConfigError, match=f"the folder {tmp_path} is not writable"):
        check_destinations({"--json": str(tmp_path / "r.json")}, {})
    own.clear()
    with pytest.raises(ConfigError, match=f"--plot {charts} is not writable"):
        check_destinations({}, {"--plot": str(charts)})


def test_what_others_wrote_cannot_act_on_the_terminal(capsys):
    assert deliver(RunSettings(), report_of(drafting_modes()), "a\x1b[2Jb") is False
    assert capsys.readouterr().out == "\na[U+001B][2Jb\n"
