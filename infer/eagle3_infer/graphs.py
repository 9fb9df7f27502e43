"""Work on fixed buffers: run as it comes, or captured once as a CUDA graph and replayed. Knows nothing of rounds.

What is captured reads and writes tensors that outlive it, at addresses that never change, and takes nothing from
Python that may change: a replay repeats the very kernels with the very pointers.
"""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar

import torch

# the first run compiles kernels and sizes workspaces, which a capture may not
WARM_UPS = 2

# tensors of the graph's own memory, valid until the next replay of any graph, or None
T = TypeVar("T")


class Backend(Protocol):
    """Records work."""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A replay of `work`, which has not run for it yet, and what every replay gives anew."""
        ...


class CudaBackend:
    """CUDA (or HIP) graphs on one device. They share memory, as they run one after the other on one stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


class GraphCache:
    """Runs work by key: captured at its first run, replayed from then on; without a backend simply called.

    Work is repeated to warm up: run twice on the same buffers it must leave them as once.
    """

    def __init__(self, backend: Backend | None):
        self.backend = backend
        self._graphs: dict[Hashable, tuple[Callable[[], None], Any]] = {}

    def prepare(self, key: Hashable, work: Callable[[], object]) -> None:
        """Capture now what `run` would capture at its first call."""
        if self.backend is not None and key not in self._graphs:
            self._capture(self.backend, key, work)

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        self.prepare(key, work)
        if key not in self._graphs:
            return work()
        replay, result = self._graphs[key]
        replay()
        return result

    def _capture(self, backend: Backend, key: Hashable, work: Callable[[], object]) -> None:
        try:
            self._graphs[key] = backend.capture(work)
        except RuntimeError as error:
            # what is wrong with the work itself comes again when it is simply called
            self.backend = None
            self._graphs.clear()
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"rounds run without CUDA graphs, as {key} could not be captured: {reason}", stacklevel=4)
