"""What a request's rounds offered, kept and cost. Knows counts and clocks; of devices only how to wait for one."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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


class StageClock:
    """Times the stages of one step, one after the other, and shares them among the requests they served."""

    def __init__(self, device: torch.device):
        self.device = device
        self._started = now(device)
        # seconds in stages so far
        self._timed = 0.0

    @contextmanager
    def stage(self, *shares: tuple[str, list[RequestMetrics], float]) -> Iterator[None]:
        """Time the block and book it as (stage, requests, weight) say."""
        began = now(self.device)
        yield
        elapsed = now(self.device) - began
        self._timed += elapsed
        total = sum(weight for _, requests, weight in shares if requests)
        for name, requests, weight in shares:
            if requests:
                _add(requests, name, elapsed * weight / total)

    def rest(self, requests: list[RequestMetrics]) -> None:
        """Book what no stage timed as `other`."""
        _add(requests, "other", now(self.device) - self._started - self._timed)


def _add(requests: list[RequestMetrics], stage: str, seconds: float) -> None:
    for metrics in requests:
        metrics.seconds[stage] += seconds / len(requests)
