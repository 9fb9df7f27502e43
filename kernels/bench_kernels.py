"""Time every kernel against its reference, torch's own ops and the floor that the machine sets.

    python kernels/bench_kernels.py [--op tree_attention ...] [--dtype bfloat16 ...] [--csv kernels.csv] [--fast]
    python kernels/bench_kernels.py --dry      # no GPU: builds small inputs, runs both implementations once
    python kernels/bench_kernels.py --paper    # the traffic tables of kernels/README.md

Shapes are Llama-3.1-8B's (eagle3_kernels.traffic, training_traffic). The floor of an op is max(bytes it must move /
copy bandwidth, flops it must compute / GEMM rate), both measured here first. Times are medians with a cold L2.
"""

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

if "--dry" in sys.argv:
    # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"

from eagle3_kernels import traffic
from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.interpreter import mend_interpreter
from eagle3_kernels.traffic import Cost, Model, Round
from eagle3_kernels.training_traffic import BATCHES, TRAINING_OPS, Packed, training_table
from eagle3_kernels.training_workloads import TRAINING_WORKS, TrainingPlace
from eagle3_kernels.workloads import WORKS, Place, Work

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# ops whose numbers are integers or float32, whatever the model's dtype
ONE_DTYPE = {"expand_level", "build_tree", "verify_match", "verify_target_only", "gather_first_step"}
ALL = [*WORKS, *TRAINING_WORKS]
SMALL = Model(layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64, vocab=320, draft_vocab=96)


class Rates(NamedTuple):
    """Bytes and flops per second."""

    copy: float
    gemm: float

    def floor(self, cost: Cost) -> float:
        """Microseconds."""
        return 1e6 * max(cost.bytes / self.copy, cost.flops / self.gemm)


def measure(run: Callable[[], Any]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % of the microseconds; slow ones (references on the host, mostly) are run thrice."""
    from triton.testing import do_bench

    run()
    once = [_seconds(run) for _ in range(2)]
    if min(once) > 0.05:
        times = sorted(1e6 * t for t in [*once, _seconds(run)])
        return statistics.median(times), times[0], times[-1]
    quantiles: Any = do_bench(run, warmup=10, rep=60, quantiles=[0.5, 0.2, 0.8])
    median, low, high = quantiles
    return 1e3 * median, 1e3 * low, 1e3 * high


def _seconds(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measured_rates(dtype: torch.dtype) -> Rates:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(source)
    copy = 2 * source.numel() / (measure(lambda: out.copy_(source))[0] / 1e6)
    size = 8192 if dtype.itemsize == 2 else 4096
    left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return Rates(copy, 2 * size**3 / (measure(lambda: left @ right)[0] / 1e6))


def place(device: str, dtype: str, model: Model, shape: Round | Packed) -> Place | TrainingPlace:
    at = torch.device(device), DTYPES[dtype], model
    return Place(*at, shape) if isinstance(shape, Round) else TrainingPlace(*at, shape)


def prepare(name: str, at: Place | TrainingPlace) -> Work:
    return WORKS[name](at) if isinstance(at, Place) else TRAINING_WORKS[name](at)


def on_paper(name: str, model: Model, shape: Round | Packed) -> Cost:
    """What the op must spend."""
    return (traffic.OPS[name](model, shape) if isinstance(shape, Round) else TRAINING_OPS[name](model, shape)).must


def described(at: Place | TrainingPlace) -> dict[str, Any]:
    dtype = str(at.dtype).removeprefix("torch.")
    if isinstance(at, Place):
        return {"dtype": dtype, "batch": at.round.batch, "nodes": at.round.nodes}
    return {"dtype": dtype, "documents": at.batch.documents, "tokens": at.batch.tokens}


def bench(name: str, at: Place | TrainingPlace, rates: Rates) -> dict[str, Any]:
    """One line of the table."""
    cost = on_paper(name, at.model, at.round if isinstance(at, Place) else at.batch)
    row: dict[str, Any] = {"op": name, **described(at)}
    try:
        work = prepare(name, at)
        set_kernels("triton")
        median, low, high = measure(work.run)
        set_kernels("torch")
        reference = measure(work.run)[0]
        own = {key: measure(run)[0] for key, run in work.own.items()}
    except torch.cuda.OutOfMemoryError:
        return row | {"skipped": "out of memory"}
    finally:
        set_kernels(None)
    floor = rates.floor(cost)
    best = min([reference, *own.values()])
    return row | {
        "triton_us": median,
        "p20_us": low,
        "p80_us": high,
        "reference_us": reference,
        "own": ", ".join(f"{key} {value:.4g}" for key, value in own.items()),
        "floor_us": floor,
        "of_floor": floor / median,
        "speedup": best / median,
        "bytes": cost.bytes,
        "flops": cost.flops,
    }


SHAPES = {"batch": ">9", "nodes": ">6"}, {"documents": ">9", "tokens": ">6"}
COLUMNS = {
    "triton_us": ">10.1f", "reference_us": ">12.1f", "floor_us": ">9.2f", "of_floor": ">8.0%", "speedup": ">8.2f",
    "own": "<",
}  # fmt: skip


def columns(training: bool) -> dict[str, str]:
    return {"op": "<20", "dtype": "<9", **SHAPES[training], **COLUMNS}


def line(row: dict[str, Any]) -> str:
    form = columns("tokens" in row)
    if "skipped" in row:
        return " ".join([*(format(row[name], spec) for name, spec in form.items() if name in row), row["skipped"]])
    return " ".join(format(row[name], spec) for name, spec in form.items())


def header(training: bool) -> str:
    return " ".join(format(name, spec.split(".")[0].rstrip("%f")) for name, spec in columns(training).items())


def planned(options: argparse.Namespace) -> Iterator[tuple[str, str, Round | Packed]]:
    rounds = [x for x in traffic.PAPER if not options.fast or x.batch == 1 or x.nodes == 8]
    for name, dtype in product(options.op, options.dtype):
        if name not in ONE_DTYPE or dtype == options.dtype[0]:
            for shape in BATCHES.get(name, rounds):
                yield name, dtype, shape


def run_on_gpu(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    rates = {name: measured_rates(DTYPES[name]) for name in options.dtype}
    for name, rate in rates.items():
        gpu, copy, gemm = torch.cuda.get_device_name(), rate.copy / 1e9, rate.gemm / 1e12
        print(f"{gpu}: copy {copy:.0f} GB/s, {name} GEMM {gemm:.1f} Tflop/s")
    for name, dtype, x in planned(options):
        rows.append(bench(name, place("cuda", dtype, Model(value_bytes=DTYPES[dtype].itemsize), x), rates[dtype]))
        training = "tokens" in rows[-1]
        if len(rows) == 1 or training != ("tokens" in rows[-2]):
            print(header(training))
        print(line(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return rows


def dry_run(options: argparse.Namespace) -> None:
    """Every op once on small inputs, in torch and in Triton's interpreter; prints what a GPU would run."""
    mend_interpreter()
    for name, dtype, x in planned(options):
        training = isinstance(x, Packed)
        small = replace(x, length=20) if training else replace(x, batch=min(x.batch, 2), context=40)
        work = prepare(name, place("cpu", dtype, SMALL, small))
        for kernels in ("torch", "triton"):
            set_kernels(kernels)
            work.run()
        set_kernels(None)
        for run in work.own.values():
            run()
        cost = on_paper(name, Model(value_bytes=DTYPES[dtype].itemsize), x)
        must = f"{traffic.amount(cost.bytes)}B, {traffic.amount(cost.flops)}flop"
        shape = (
            f"{x.documents} documents of {x.length}"
            if isinstance(x, Packed)
            else f"batch {x.batch:>2}, {x.nodes:>2} nodes, {x.context} rows"
        )
        print(f"{name:<20} {dtype:<9} {shape}: {must}; against {', '.join(['reference', *work.own])}", flush=True)
    print("both implementations ran on every input")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(key for row in rows for key in row))
    partial_file = path.with_suffix(".partial")
    with partial_file.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    partial_file.replace(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["bfloat16"])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--fast", action="store_true", help="without the largest round (batch 32, 60 nodes)")
    parser.add_argument("--dry", action="store_true", help="no GPU: small inputs, each op once")
    parser.add_argument("--paper", action="store_true", help="traffic on paper, as markdown")
    options = parser.parse_args(arguments)
    if options.paper:
        print("\n".join([*traffic.paper_table(), "", *training_table()]))
    elif options.dry:
        dry_run(options)
    elif not torch.cuda.is_available():
        print("no CUDA device: --dry checks the inputs, --paper prints the traffic", file=sys.stderr)
        return 1
    else:
        torch.manual_seed(0)
        rows = run_on_gpu(options)
        if options.csv:
            write_csv(options.csv, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
