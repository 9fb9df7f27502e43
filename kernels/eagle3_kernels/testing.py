"""What the kernels are held to: compilation without a GPU, and an error no larger than twice plain PyTorch's.

    python -m eagle3_kernels.testing [op ...] [--architecture sm_90] [--full] [--markdown]

compiles the `COMPILE_CASES` of every op's kernel.py (or those named) and prints a table; a spill, or more shared memory
than the architecture has, exits 1.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEVICE_VARIABLE = "EAGLE3_TEST_DEVICE"


class Architecture(NamedTuple):
    """What triton compiles for, and the shared memory that one program may take there."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int


ARCHITECTURES = {
    "sm_80": Architecture("cuda", 80, 32, 163 * 1024),
    "sm_90": Architecture("cuda", 90, 32, 227 * 1024),
    "gfx942": Architecture("hip", "gfx942", 64, 64 * 1024),
}
TRITON_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}


@dataclass(frozen=True)
class Case:
    """One kernel with the types of its arguments and the values of its constants.

    Args:
        name: what the table calls it, the dtype in it: "partial bf16 d128".
        kernel: the @triton.jit function.
        signature: argument -> triton type ("*bf16", "i32", "fp32"); pointers are taken to be 16-byte aligned.
        constexprs: argument -> value; an absent pointer is None here.
        divisible: integer arguments known to be multiples of 16 (strides, mostly), as a launch would find them.
        architectures: where it is launched like this.
        full: compiled by `make test-full` only.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    divisible: Sequence[str] = ()
    architectures: Sequence[str] = tuple(ARCHITECTURES)
    full: bool = False


class Compiled(NamedTuple):
    """What one compilation took: registers per thread, spilled registers, shared memory per program, wall seconds."""

    registers: int
    spills: int
    shared_bytes: int
    seconds: float


class Row(NamedTuple):
    """One line of the table."""

    op: str
    case: str
    architecture: str
    compiled: Compiled


def compile_case(case: Case, architecture: str) -> Compiled:
    """Compile for "sm_80", "sm_90" or "gfx942"; needs no GPU, but triton imported without TRITON_INTERPRET.

    Raises:
        ValueError: arguments without a type or value, or triton is the interpreter.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(case.kernel, triton.JITFunction):
        raise ValueError(f"{case.name}: {case.kernel} cannot be compiled; is TRITON_INTERPRET set?")
    target = ARCHITECTURES[architecture]
    names = case.kernel.arg_names
    _check_arguments(case, names)
    aligned = [n for n in names if case.signature.get(n, "").startswith("*") or n in case.divisible]
    source = ASTSource(
        case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs=dict(case.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    started = time.perf_counter()
    binary = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    seconds = time.perf_counter() - started
    usage = _nvidia_usage(binary.asm["cubin"]) if target.backend == "cuda" else _amd_usage(binary.asm["amdgcn"])
    return Compiled(*usage, binary.metadata.shared, seconds)


def _check_arguments(case: Case, names: Sequence[str]) -> None:
    given = [*case.signature, *case.constexprs]
    if sorted(given) != sorted(names) or not set(case.divisible) <= set(case.signature):
        raise ValueError(
            f"{case.name}: missing {sorted(set(names) - set(given))}, unknown {sorted(set(given) - set(names))}, "
            f"twice {sorted(set(case.signature) & set(case.constexprs))}, "
            f"divisible but not typed {sorted(set(case.divisible) - set(case.signature))}"
        )


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spills; triton itself counts the words of a thread's stack as spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", listing)}
    return found["REG"], (found["STACK"] + found["LOCAL"]) // 4


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Registers and spills. Scalars that find no scalar register lie in lanes of vector ones: counted only as those."""
    fields = re.findall(
        r"^\s*\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", assembly, re.MULTILINE
    )
    found = {name: int(value) for name, value in fields}
    return found["vgpr_count"], max(found["vgpr_spill_count"], found["private_segment_fixed_size"] // 4)


def fault(row: Row) -> str | None:
    """Why a compiled case may not be used as it is."""
    available = ARCHITECTURES[row.architecture].shared_bytes
    if row.compiled.spills:
        return f"{row.op}, {row.case}, {row.architecture}: {row.compiled.spills} registers spilled"
    if row.compiled.shared_bytes > available:
        return f"{row.op}, {row.case}, {row.architecture}: {row.compiled.shared_bytes} of {available} shared bytes"
    return None


def triton_ops() -> list[str]:
    """Ops that have a kernel.py."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/kernel.py"))


def all_cases(ops: Iterable[str] | None = None, full: bool = False) -> Iterator[tuple[str, Case]]:
    """(op, case) of the ops named, or of all; with `full` also the cases of `make test-full`."""
    for op in triton_ops() if ops is None else ops:
        for case in import_module(f"eagle3_kernels.{op}.kernel").COMPILE_CASES:
            if full or not case.full:
                yield op, case


def compile_all(ops: Iterable[str] | None, architectures: Iterable[str], full: bool = False) -> Iterator[Row]:
    """Compile every case for every architecture that it is launched on."""
    wanted = list(architectures)
    for op, case in all_cases(ops, full):
        for architecture in (name for name in wanted if name in case.architectures):
            yield Row(op, case.name, architecture, compile_case(case, architecture))


HEADER = ("op", "case", "architecture", "registers", "shared bytes", "spills", "seconds")


def table_line(cells: Sequence[object] = HEADER) -> str:
    """One aligned line of the table."""
    widths = (18, 34, 13, 9, 12, 6, 7)
    return " ".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def cells(row: Row) -> tuple[object, ...]:
    registers, spills, shared, seconds = row.compiled
    return row.op, row.case, row.architecture, registers, shared, spills, f"{seconds:.2f}"


def markdown_table(rows: Sequence[Row]) -> Iterator[str]:
    """kernels/README.md's table: a line per case, "registers / shared bytes" per architecture, spills where any are."""
    yield _markdown("op", "case", *ARCHITECTURES)
    yield _markdown(*["---"] * (2 + len(ARCHITECTURES)))
    for op, case in dict.fromkeys((row.op, row.case) for row in rows):
        found = {row.architecture: _brief(row.compiled) for row in rows if (row.op, row.case) == (op, case)}
        yield _markdown(op, case, *(found.get(name, "-") for name in ARCHITECTURES))


def _brief(compiled: Compiled) -> str:
    spilled = f", {compiled.spills} SPILLED" if compiled.spills else ""
    return f"{compiled.registers} / {compiled.shared_bytes}{spilled}"


def _markdown(*texts: object) -> str:
    return f"| {' | '.join(map(str, texts))} |"


def device() -> torch.device:
    """Where the kernel tests run: cpu (the interpreter), or what EAGLE3_TEST_DEVICE says, as `make gpu-check` does."""
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cpu"))


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that nobody writes reads as NaN (integers: the largest), so an unwritten output shows."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills


def error_budget(eager: Tensor, exact: Tensor) -> float:
    """Twice the largest error of plain PyTorch, but at least one rounding of the largest value.

    Args:
        eager: the reference's result in the kernel's dtype.
        exact: the reference's result on the same inputs in float64 (float32 where it takes no doubles).
    """
    error = (eager.double() - exact.double()).abs().max().item()
    return max(2 * error, torch.finfo(eager.dtype).eps * exact.abs().max().item())


def assert_within_budget(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """A kernel's result is as good as plain PyTorch's in the same dtype; NaN anywhere fails."""
    assert actual.shape == eager.shape and actual.dtype == eager.dtype, (actual.shape, actual.dtype, eager.shape)
    if not actual.numel():
        return
    assert exact.isfinite().all(), "the exact result is not finite: compare it apart"
    budget = error_budget(eager, exact)
    off = (actual.double() - exact.double()).abs()
    bad = ~(off <= budget)
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()} values are off by more than {budget:.3g} "
        f"(largest {off.max().item():.3g}, first at {bad.nonzero()[0].tolist()})"
    )


def in_double(value: Any) -> Any:
    """A copy with every floating-point tensor in float64, inside tuples, lists and dicts, too."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: in_double(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [in_double(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """The table of this module's docstring; 1 if a case may not be used."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_kernels.testing")
    parser.add_argument("op", nargs="*", help=f"one or more of {', '.join(triton_ops())}; none = all")
    parser.add_argument("--architecture", action="append", choices=list(ARCHITECTURES))
    parser.add_argument("--full", action="store_true", help="also the cases of make test-full")
    parser.add_argument("--markdown", action="store_true", help="the table of kernels/README.md")
    options = parser.parse_args(arguments)
    rows = []
    for row in compile_all(options.op or None, options.architecture or ARCHITECTURES, options.full):
        if not options.markdown:
            print("" if rows else table_line() + "\n", table_line(cells(row)), sep="", flush=True)
        rows.append(row)
    if options.markdown:
        print("\n".join(markdown_table(rows)))
    faults = [text for row in rows if (text := fault(row))]
    print("\n".join(faults), file=sys.stderr, end="\n" if faults else "")
    if not options.markdown:
        print(f"{len(rows)} compilations, {len(faults)} that may not be used")
    return bool(faults)


if __name__ == "__main__":
    # the cases hold the Case of the module as imported, so run that one's main
    sys.exit(import_module("eagle3_kernels.testing").main())
