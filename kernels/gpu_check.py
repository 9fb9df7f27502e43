"""Everything that a machine with one GPU should run, in under 8 minutes, with one table at the end.

    make gpu-check          every kernel against its reference on CUDA, the engine's oracles on the kernels, timings
    make gpu-check DRY=1    no GPU: imports all, builds the inputs, compiles every kernel for every architecture

Each step is a process of its own with a limit; a step that fails does not stop the others. Exit code 1 if any failed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
# models on the CPU, for the interpreter: test_triton_device.py is their like on a GPU
INTERPRETED = {"test_triton_engine.py", "test_triton_graphs.py"}
KERNEL_TESTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests" / "kernels").glob("test_triton_*.py")
    if path.name not in INTERPRETED
)
IMPORT_ALL = """
import pkgutil, eagle3_kernels
from importlib import import_module
names = [m.name for m in pkgutil.walk_packages(eagle3_kernels.__path__, "eagle3_kernels.")]
for name in names:
    import_module(name)
print(len(names), "modules imported")
"""

MACHINE = """
import torch, triton
p = torch.cuda.get_device_properties(0)
print(f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} processors, "
      f"torch {torch.__version__}, triton {triton.__version__}")
"""


@dataclass(frozen=True)
class Step:
    """A command, what it adds to the environment, and the seconds that it may take."""

    name: str
    command: list[str]
    seconds: int
    env: dict[str, str] = field(default_factory=dict)


class Outcome(NamedTuple):
    name: str
    passed: bool
    seconds: float
    said: str


def pytest(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "pytest", "-q", "--durations=0", "--durations-min=5", *arguments]


def gpu_steps(results: Path) -> list[Step]:
    workers = str(min(8, os.cpu_count() or 1))
    on_cuda = {"EAGLE3_TEST_DEVICE": "cuda"}
    verified = ["--device", "cuda", "--dtype", "bfloat16", "--kernels", "triton", "--max-new-tokens", "48", "--verify"]
    return [
        Step("machine", [PYTHON, "-c", MACHINE], 20),
        Step("kernels and engine, fp32", pytest("-n", workers, *KERNEL_TESTS), 205, on_cuda),
        Step("runs in bfloat16, verified", [PYTHON, "-m", "eagle3_infer.cli", *verified], 70),
        Step("timings", [PYTHON, "kernels/bench_kernels.py", "--fast", "--csv", str(results)], 180),
    ]


def dry_steps() -> list[Step]:
    return [
        Step("imports", [PYTHON, "-c", IMPORT_ALL], 60),
        Step("inputs of the timings", [PYTHON, "kernels/bench_kernels.py", "--dry"], 240),
        Step("GPU tests are collected", pytest("--collect-only", *KERNEL_TESTS), 120, {"EAGLE3_TEST_DEVICE": "cuda"}),
        Step("compilation", [PYTHON, "-m", "eagle3_kernels.testing", "--full"], 3600),
    ]


def run(step: Step) -> Outcome:
    """Run one step, its output shown as it comes; what it said last is its line of the table."""
    print(f"\n== {step.name}: {' '.join(part if len(part) < 60 else '...' for part in step.command)}", flush=True)
    started, last = time.monotonic(), ""
    process = subprocess.Popen(
        step.command, cwd=ROOT, env=environment(step), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    timer = _kill_after(process, step.seconds)
    for text in process.stdout:
        print(text, end="", flush=True)
        last = text.strip() or last
    code = process.wait()
    timer.cancel()
    seconds = time.monotonic() - started
    if seconds >= step.seconds:
        last = f"stopped after {step.seconds} s; last line: {last}"
    return Outcome(step.name, code == 0, seconds, last)


def _kill_after(process: subprocess.Popen, seconds: int) -> Timer:
    timer = Timer(seconds, process.kill)
    timer.start()
    return timer


def environment(step: Step) -> dict[str, str]:
    """Ours without a choice of kernels or interpreter, with the packages on the path."""
    ours = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "EAGLE3_KERNELS")}
    roots = [str(ROOT / folder) for folder in (".", "kernels", "infer", "train")]
    return ours | {"PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1"} | step.env


def table(outcomes: Iterable[Outcome]) -> str:
    lines = [
        f"{'passed' if o.passed else 'FAILED'}  {o.seconds:6.1f} s  {o.name:<32} {o.said[:110]}".rstrip()
        for o in outcomes
    ]
    return "\n".join(["", "== gpu-check", *lines])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="what can be checked without a GPU")
    parser.add_argument("--csv", type=Path, default=ROOT / "runs" / "gpu_check.csv", help="where the timings go")
    options = parser.parse_args(arguments)
    if not options.dry:
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device; `make gpu-check DRY=1` checks what needs none", file=sys.stderr)
            return 1
        options.csv.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [run(step) for step in (dry_steps() if options.dry else gpu_steps(options.csv))]
    print(table(outcomes))
    return not all(outcome.passed for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
