"""Every kernel compiles for sm_80, sm_90 and gfx942 on a machine without a GPU, spills nothing and fits their memory.

In a process of its own: this one may hold Triton's interpreter, which cannot compile.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_kernels.testing import ARCHITECTURES, Compiled, Row, fault, triton_ops

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


def run_compiler(*arguments: str, **extra: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT / "kernels"), *filter(None, [env.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments], env=env | {"PYTHONPATH": path} | extra, capture_output=True, text=True
    )


def check_ops(*arguments: str) -> None:
    ended = run_compiler("-m", "eagle3_kernels.testing", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    _, *lines, last = ended.stdout.splitlines()
    assert last == f"{len(lines)} compilations, 0 that may not be used"
    assert {line.split()[0] for line in lines} == set(arguments) - {"--full"}
    assert {name for line in lines for name in line.split() if name in ARCHITECTURES} == set(ARCHITECTURES)


@pytest.mark.parametrize("op", triton_ops())
def test_compiles(op):
    check_ops(op)


@pytest.mark.full
@pytest.mark.parametrize("op", triton_ops())
def test_compiles_in_every_shape_class(op):
    check_ops(op, "--full")


SPILLING = """
import torch, triton, triton.language as tl
from eagle3_kernels.testing import Case, Row, compile_case, fault

@triton.jit
def keeps_all(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x / tl.sum(x))

# 1024 threads share the registers of a core: 64 each (AMD: 128), fewer than the values that each must keep
for architecture, warps in (("sm_80", 32), ("sm_90", 32), ("gfx942", 16)):
    for n in (1024, 262144):
        case = Case("c", keeps_all, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": n}, num_warps=warps)
        print(architecture, n, fault(Row("op", "c", architecture, compile_case(case, architecture))) is not None)
try:
    compile_case(Case("c", keeps_all, {"x_ptr": "*fp32", "Y": "*fp32"}, {"N": 8}), "sm_90")
except ValueError as error:
    print(error)
"""


def test_spills_are_seen(tmp_path):
    """A program that must keep more than its registers hold fails on every architecture; a small one does not."""
    script = tmp_path / "spilling.py"
    script.write_text(SPILLING)
    ended = run_compiler(str(script))
    assert ended.stdout.splitlines() == [f"{name} {n} {n > 1024}" for name in ARCHITECTURES for n in (1024, 262144)] + [
        "c: missing ['y_ptr'], unknown ['Y'], twice [], divisible but not typed []"
    ], ended.stderr


def test_too_much_shared_memory_is_a_fault():
    assert fault(Row("op", "c", "gfx942", Compiled(8, 0, 65537, 0.1))) == "op, c, gfx942: 65537 of 65536 shared bytes"
    assert fault(Row("op", "c", "gfx942", Compiled(8, 0, 65536, 0.1))) is None


def test_the_interpreter_is_refused():
    ended = run_compiler("-m", "eagle3_kernels.testing", "capture_copy", TRITON_INTERPRET="1")
    assert ended.returncode != 0
    assert "is TRITON_INTERPRET set?" in ended.stderr
