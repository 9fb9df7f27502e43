"""The notebooks: each runs from top to bottom, its assertions hold, and it lies here with what it printed and drew.

EAGLE3_KEEP_OUTPUTS=1 (`make notebooks`) writes the outputs of the run into the files.
"""

import ast
import os
import re
from pathlib import Path

import pytest

WHY = "the extra `notebooks` is not installed: pip install '.[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=WHY)
nbclient = pytest.importorskip("nbclient", reason=WHY)

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("trace_a_tree", "what_ttt_does", "read_a_run", "shared_noise")
OURS = {"eagle3", "eagle3_kernels", "eagle3_infer", "eagle3_train"}
ALLOWED = OURS | {"dataclasses", "json", "matplotlib", "pathlib", "torch", "transformers", "warnings"}
# pictures are small: a notebook is read in a browser
MOST_BYTES = 600_000


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook, monkeypatch):
    """Run it in a kernel that finds the packages uninstalled, too."""
    roots = [ROOT, *(ROOT / folder for folder in ("kernels", "infer", "train"))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, roots)))
    # the interpreter that tests of kernels use would make the engine crawl
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    return client.execute()


def shown(notebook):
    """Per cell, each output: type, forms and text. Numbers hang on the machine, so of them only their places."""
    return [
        [(o.output_type, *sorted(o.get("data", {})), masked(text_of(o))) for o in cell.outputs]
        for cell in code(notebook)
    ]


def text_of(output):
    return output.get("text", "") + output.get("data", {}).get("text/plain", "")


def masked(text):
    """Every number a `#`; how many blanks and rule characters stand around it hangs on its width."""
    return re.sub(r"[\s-]+", " ", re.sub(r"\d+(\.\d*)?(e[+-]?\d+)?", "#", text)).strip()


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(name, monkeypatch):
    notebook = read(name)
    stored = shown(notebook)
    done = execute(notebook, monkeypatch)
    if os.environ.get("EAGLE3_KEEP_OUTPUTS"):
        nbformat.write(done, ROOT / "notebooks" / f"{name}.ipynb")
    else:
        assert shown(done) == stored


def test_an_assertion_that_fails_is_seen(monkeypatch):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import eagle3_infer\nassert 1 + 1 == 3")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        execute(broken, monkeypatch)


def test_all_are_tested():
    assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept(name):
    """Every cell was run, in order, without an error or a warning; pictures are there, and no path of a machine."""
    notebook = read(name)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, 1 + len(code(notebook))))
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert not re.search(r"/(work|home|root|tmp|usr)/", text) and len(text) < MOST_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_it_imports_and_never_defines(name):
    """A lesson composes what the packages offer; what it would define would be tested nowhere."""
    tree = ast.parse("\n".join(cell.source for cell in code(read(name))))
    nodes = list(ast.walk(tree))
    assert not [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    assert sum(isinstance(n, ast.Assert) for n in nodes) >= 3
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
    assert {imported.split(".")[0] for imported in names} <= ALLOWED


@pytest.mark.parametrize("name", NAMES)
def test_it_teaches(name):
    """A title first, and more text than a heading before any stretch of code."""
    cells = read(name).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert sum(cell.cell_type == "markdown" and len(cell.source) > 100 for cell in cells) >= 4
