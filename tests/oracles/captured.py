"""A CUDA graph's rules without a GPU: what a capture would freeze is written down, and every replay must repeat it.

A graph keeps kernels, pointers and numbers, and a replay knows nothing else. So two runs of some work must be the same
ops on the same tensors (one made by the run is known by the op that made it, any other by its address) with the same
numbers, and none of them may wait for the device or bring numbers from the host. What is a kernel on a GPU, but looks
at values on the host in its reference, counts as one op; in Triton's interpreter each launch does.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from eagle3_infer.graphs import WARM_UPS, T

# where the runtime looks up ops that are kernels on a GPU
KERNELS = (
    "eagle3.capture.capture_copy",
    "eagle3_infer.kv.tree_attention",
    "eagle3_infer.drafter.expand_level",
    "eagle3_infer.drafter.grow_mask",
    "eagle3_infer.fixed_draft.build_tree",
    "eagle3_infer.fixed_verify.gather_first_step",
    "eagle3_infer.fixed_verify.greedy_nodes",
    "eagle3_infer.fixed_verify.relocate_kv",
    "eagle3_infer.fixed_verify.sample_rows",
    "eagle3_infer.fixed_verify.verify_tree",
)
# methods that read values on the host, and do not always come as ops
WAITS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
# what makes tensors where it is told to, else on the host
MAKERS = {torch.arange, torch.empty, torch.full, torch.linspace, torch.ones, torch.zeros}
# ops whose results the host must wait for, or that bring its numbers to the device
REFUSED = {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim", "lift_fresh"}


class NotCapturable(AssertionError):
    """Work that a CUDA graph cannot hold, or that a replay would not repeat."""


class Trace(TorchDispatchMode):
    """The ops of one run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple] = []
        # storages that the run made, kept so that no other one takes their address
        self._made: dict[int, int] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, leaves = func._schema.name.removeprefix("aten::"), list(leaves_of((args, kwargs or {})))
        masked = name.startswith("index") and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in leaves[1:])
        if name in REFUSED or masked:
            raise NotCapturable(f"{name} waits for the device, or brings numbers from the host")
        return self.record(f"{name}.{func._overloadname}", leaves, lambda: func(*args, **(kwargs or {})))

    def record(self, name: str, leaves: Sequence[Any], run: Callable[[], Any]) -> Any:
        self.ops.append((name, *map(self._described, leaves)))
        given = {x.untyped_storage()._cdata for x in leaves if isinstance(x, Tensor)}
        result = run()
        for made in leaves_of(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in given:
                self._made.setdefault(made.untyped_storage()._cdata, len(self._made))
                self._kept.append(made.untyped_storage())
        return result

    def _described(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return "function" if callable(x) and not isinstance(x, type) else x
        made = self._made.get(x.untyped_storage()._cdata)
        place = f"outside at {x.data_ptr():x}" if made is None else f"made {made} + {x.storage_offset()}"
        return place, tuple(x.shape), x.stride(), x.dtype


class _NoWaits(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in WAITS:
            raise NotCapturable(f"{func.__name__} waits for the device")
        if func in MAKERS and (kwargs or {}).get("device") is None:
            raise NotCapturable(f"{func.__name__} makes a tensor of the host's: it names no device")
        return func(*args, **(kwargs or {}))


def leaves_of(x: Any) -> Iterator[Any]:
    """Tensors and numbers in containers, trees and views; what these keep for themselves is no argument."""
    if is_dataclass(x) and not isinstance(x, type):
        x = [getattr(x, field.name) for field in fields(x) if not field.name.startswith("_")]
    if isinstance(x, dict):
        x = [part for item in sorted(x.items()) for part in item]
    if isinstance(x, list | tuple):
        for part in x:
            yield from leaves_of(part)
    else:
        yield x


@contextmanager
def traced(kernels: Sequence[str] = KERNELS) -> Iterator[Trace]:
    """Note what the block does; `kernels` are one op each."""
    trace = Trace()
    with ExitStack() as patches:
        for name in kernels:
            module, op = name.rsplit(".", 1)
            patches.enter_context(mock.patch(name, _as_one(trace, op, getattr(import_module(module), op))))
        if interpreter := sys.modules.get("triton.runtime.interpreter"):
            patches.enter_context(_launches(trace, interpreter.GridExecutor))
        with _NoWaits(), trace:
            yield trace


def _as_one(trace: Trace, name: str, op: Callable) -> Callable:
    def run(*args, **kwargs):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return op(*args, **kwargs)

    return lambda *args, **kwargs: trace.record(name, list(leaves_of((args, kwargs))), lambda: run(*args, **kwargs))


def _launches(trace: Trace, executor: Any) -> Any:
    """Kernels in Triton's interpreter: a launch is one op, with its grid and constants."""
    call = executor.__call__

    def launch(self, *args, **kwargs):
        op = _as_one(trace, f"launch {self.fn.__name__}", lambda grid, *args, **kwargs: call(self, *args, **kwargs))
        return op(self.grid, *args, **kwargs)

    return mock.patch.object(executor, "__call__", launch)


class FakeGraphs:
    """A graph backend that replays by running the work again, and holds it to what its capture froze."""

    def __init__(self, kernels: Sequence[str] = KERNELS):
        self.kernels = kernels
        self.captures = self.replays = 0
        # names of what was captured
        self.ops: set[str] = set()

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        for _ in range(WARM_UPS):
            work()
        with traced(self.kernels) as frozen:
            result = work()
        self.captures += 1
        self.ops |= {name for name, *_ in frozen.ops}

        def replay() -> None:
            with traced(self.kernels) as again:
                new = work()
            for number, (was, now) in enumerate(zip_longest(frozen.ops, again.ops)):
                if was != now:
                    raise NotCapturable(f"op {number} was {was} when captured, and is {now}")
            for old, fresh in zip(leaves_of(result), leaves_of(new), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(fresh)
            self.replays += 1

        return replay, result
