"""Which implementation runs: Triton on GPUs, the reference elsewhere, what the user forces anywhere."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_kernels import dispatch
from eagle3_kernels.capture_copy import capture_copy
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.structures import Tree, Walk
from eagle3_kernels.testing import triton_ops

ROOT = Path(__file__).parents[2]
CPU = torch.zeros(1)
GPU: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """No choice made, triton installed, no interpreter."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "_chosen", None)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)


def test_auto_is_triton_on_gpus_and_torch_elsewhere():
    assert dispatch.kernels() == "auto"
    assert dispatch.uses_triton(GPU)
    assert not dispatch.uses_triton(CPU)


def test_auto_without_triton_is_torch(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert not dispatch.uses_triton(GPU)


def test_auto_ignores_the_interpreter(monkeypatch):
    """A variable left over from debugging does not make a CPU run thousands of times slower."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not dispatch.uses_triton(CPU)


@pytest.mark.parametrize("force", ["variable", "call"])
def test_a_forced_choice_holds_everywhere(monkeypatch, force):
    def choose(name: str) -> None:
        monkeypatch.setenv(dispatch.VARIABLE, name) if force == "variable" else dispatch.set_kernels(name)

    choose("torch")
    assert not dispatch.uses_triton(GPU)
    choose("triton")
    assert dispatch.uses_triton(GPU)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        dispatch.uses_triton(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.uses_triton(CPU)


def test_the_call_wins_over_the_variable_until_it_is_taken_back(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    dispatch.set_kernels("triton")
    assert dispatch.kernels() == "triton"
    dispatch.set_kernels(None)
    assert dispatch.kernels() == "torch"


def test_unknown_names_and_absent_triton_say_what_is_allowed(monkeypatch):
    with pytest.raises(ValueError, match="auto, triton, torch"):
        dispatch.set_kernels("cuda")
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match="EAGLE3_KERNELS is 'fast'"):
        dispatch.kernels()
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="pip install triton"):
        dispatch.set_kernels("triton")
    assert dispatch._chosen is None


class Called(Exception):
    """The kernel was reached."""


def call_capture_copy() -> None:
    capture_copy(torch.zeros(1, 2), torch.zeros(1, 2), 0)


def call_relocate_kv() -> None:
    slot = torch.zeros(1, 1, dtype=torch.int32)
    relocate_kv([torch.zeros(1, 1, 1, 1, 1)], slot, slot[0], slot)


def call_gather_first_step() -> None:
    column = torch.zeros(1, dtype=torch.int32)
    gather_first_step(Tree.bare(column), Walk(column[:, None], column, column), column)


@pytest.mark.parametrize("call", [call_capture_copy, call_relocate_kv, call_gather_first_step])
def test_ops_run_what_was_chosen(monkeypatch, call):
    pytest.importorskip("triton")
    op = call.__name__.removeprefix("call_")
    kernel = pytest.importorskip(f"eagle3_kernels.{op}.kernel")

    def reached(*_args) -> None:
        raise Called

    monkeypatch.setattr(kernel, op, reached)
    call()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    dispatch.set_kernels("triton")
    with pytest.raises(Called):
        call()


def decides(source: str) -> bool:
    """Whether the source uses what `uses_triton` answers; a call for its error alone decides nothing."""
    tree = ast.parse(source)
    calls = {n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "uses_triton"}
    return bool(calls - {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)})


def test_only_the_ops_dispatch():
    """STYLE rule 7: every op with a kernel asks `uses_triton` in its __init__; nobody else goes by it, but for one
    caller: where a kernel walks by a rejection rule, the engine asks for the walk and not for a node at a time.
    """
    deciding = {
        path.relative_to(ROOT).as_posix()
        for folder in ("eagle3", "infer", "train", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if decides(path.read_text())
    }
    ops = {f"kernels/eagle3_kernels/{op}/__init__.py" for op in triton_ops()}
    assert deciding == ops | {"infer/eagle3_infer/rules.py"}


def test_a_process_takes_its_choice_from_the_variable():
    """As a user sets it: read at the first op, no import order to observe."""
    code = (
        "import torch as t; from eagle3_kernels.capture_copy import capture_copy as c; c(t.ones(1, 1), t.ones(1, 1), 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"EAGLE3_KERNELS": "tritn", "PYTHONPATH": str(ROOT / "kernels")},
        capture_output=True,
        text=True,
    )
    assert "EAGLE3_KERNELS is 'tritn'; it must be one of auto, triton, torch" in ended.stderr
