"""What a request's rounds offered, kept and cost. Knows counts and clocks; of devices only how to time one."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from eagle3_infer.request import STAGES


@dataclass
class RequestMetrics:
    """Counters of one request, filled round by round."""

    run_lengths: list[int] = field(default_factory=list)
    offered_by_level: list[int] = field(default_factory=list)
    accepted_by_level: list[int] = field(default_factory=list)
    nodes: int = 0
    conflicts: int = 0
    leaf_pairs: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def count_round(self, parents: Sequence[int], accepted: int, emitted: int) -> None:
        """Count one verified tree (parent row of each row in use, root first)."""
        self.run_lengths.append(emitted)
        self.nodes += len(parents) - 1
        levels = [0]
        for above in parents[1:]:
            levels.append(levels[above] + 1)
            _count(self.offered_by_level, levels[-1])
        for level in range(1, accepted + 1):
            _count(self.accepted_by_level, level)
        conflicts, pairs = path_conflict(parents)
        self.conflicts += conflicts
        self.leaf_pairs += pairs


def _count(by_level: list[int], level: int) -> None:
    while len(by_level) < level:
        by_level.append(0)
    by_level[level - 1] += 1


def path_conflict(parents: Sequence[int]) -> tuple[int, int]:
    """Leaf pairs whose paths part at the root's children, and all leaf pairs."""
    inner = set(parents)
    branch, leaves = [0] * len(parents), {}
    for row in range(1, len(parents)):
        branch[row] = branch[parents[row]] or row
        if row not in inner:
            leaves[branch[row]] = leaves.get(branch[row], 0) + 1
    total = sum(leaves.values())
    pairs = total * (total - 1) // 2
    return pairs - sum(n * (n - 1) // 2 for n in leaves.values()), pairs


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Clock(Protocol):
    """Marks points in a device's work, and tells afterwards how far they lie apart."""

    def mark(self) -> Any: ...
    def settle(self) -> None:
        """Wait until the device has passed every mark."""
        ...

    def between(self, start: Any, end: Any) -> float:
        """Seconds, once settled."""
        ...


class HostClock:
    """For devices that work as the host calls them: a mark is the time."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> float:
        return now(self.device)

    def settle(self) -> None:
        pass

    def between(self, start: float, end: float) -> float:
        return end - start


class DeviceClock:
    """For a GPU: a mark is an event in its queue, so that timing a stage does not wait for it."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.current_stream(device)
        self._last: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._last = event
        return event

    def settle(self) -> None:
        if self._last is not None:
            self._last.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        # milliseconds
        return start.elapsed_time(end) / 1000


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock(device)


# a stage's name, the requests that it served, and the weight of their part where a block serves several
Share = tuple[str, list[RequestMetrics], float]


class StageClock:
    """Times the stages of one round, one after the other, and shares them among the requests they served.

    Nothing is booked before `rest`, which waits for the device once.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None):
        self._clock = clock or clock_for(device)
        self._spans: list[tuple[Any, Any, tuple[Share, ...]]] = []
        self._started = self._clock.mark()
        self._ended: Any = None

    @contextmanager
    def stage(self, *shares: Share) -> Iterator[None]:
        """Time the block and book it as (stage, requests, weight) say."""
        began = self._clock.mark()
        yield
        self._spans.append((began, self._clock.mark(), shares))

    def end(self) -> None:
        """The round ends here."""
        self._ended = self._clock.mark()

    def rest(self, requests: list[RequestMetrics]) -> dict[str, float]:
        """Book the stages of the round, which ends here if not before, and the time that none of them took as `other`.

        Returns:
            Seconds of the round by stage.
        """
        if self._ended is None:
            self.end()
        self._clock.settle()
        totals: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        for span in self._spans:
            self._book(totals, *span)
        # the sum of many small differences may pass the one large one by a rounding
        totals["other"] = max(0.0, self._clock.between(self._started, self._ended) - sum(totals.values()))
        _add(requests, "other", totals["other"])
        self._spans.clear()
        return totals

    def _book(self, totals: dict[str, float], began: Any, ended: Any, shares: tuple[Share, ...]) -> None:
        seconds = self._clock.between(began, ended)
        total = sum(weight for _, requests, weight in shares if requests)
        for name, requests, weight in shares:
            if requests:
                _add(requests, name, seconds * weight / total)
                totals[name] += seconds * weight / total


def _add(requests: list[RequestMetrics], stage: str, seconds: float) -> None:
    for metrics in requests:
        metrics.seconds[stage] += seconds / len(requests)
