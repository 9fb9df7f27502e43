"""What a round costs on this device: seconds by rows, measured at start and followed while it runs. Knows no models."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import numpy as np

# what a measurement at start counts for, and the most that a figure's past counts for
_MEASURED, _MEMORY = 1, 16
# largest move in log seconds that one observation asks for: a shared machine stalls
_CLIP = 0.25
# how alike the errors of two row counts are that differ by a factor of two
_KINSHIP = 0.8
# row counts further apart than this factor of two get figures of their own
_APART = 0.5
_FAR = 1 << 24


@lru_cache
def row_tiers(most: int) -> list[int]:
    """Row counts that a forward is tried at: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... up to `most`."""
    return sorted({n for i in range(most.bit_length()) for n in (1 << i, (1 << i) * 3 // 2) if n <= most})


def measure(
    run: Callable[[int], object],
    rows: Iterable[int],
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Median seconds of `run(rows)` at each row count, after one call to warm up.

    Args:
        clock: seconds, once the device has done what it was given.
    """
    return {n: _median_seconds(run, n, repeats, clock) for n in rows}


def _median_seconds(run: Callable[[int], object], rows: int, repeats: int, clock: Callable[[], float]) -> float:
    run(rows)
    seconds = []
    for _ in range(repeats):
        began = clock()
        run(rows)
        seconds.append(clock() - began)
    return float(np.median(seconds))


def largest_rows(bytes_free: int, bytes_per_row: int, share: float = 0.9) -> int:
    """Rows that a forward may have in `share` of the free memory; at least 1, which plain decoding needs."""
    return max(1, int(bytes_free * share) // bytes_per_row)


class RowCost:
    """Seconds of one operation by rows: linear between figures, extrapolated above, never falling with rows.

    An observation moves the figure at its rows and, less, those nearby: what slows one row count slows its kin.

    Args:
        measured: seconds at row counts; may be empty, then it costs nothing until observed.
    """

    def __init__(self, measured: Mapping[int, float]):
        self._rows = np.array(sorted(measured), dtype=float)
        self._log = np.log([measured[int(n)] for n in self._rows])
        self._counts = np.full(len(measured), float(_MEASURED))
        self._refresh()

    @property
    def known(self) -> bool:
        return len(self._rows) > 0

    def __call__(self, rows: int) -> float:
        return float(np.interp(rows, self._x, self._y))

    def at(self, rows: np.ndarray) -> np.ndarray:
        return np.interp(rows, self._x, self._y)

    def observe(self, rows: int, seconds: float) -> None:
        """Move towards one observation, by no more than a step however far it is: outliers leave little behind."""
        if rows < 1 or seconds <= 0:
            return
        if not self.known or np.abs(np.log2(self._rows / rows)).min() > _APART:
            self._insert(rows, self(rows) or seconds)
        error = np.clip(np.log(seconds / self(rows)), -_CLIP, _CLIP)
        kin = _KINSHIP ** np.abs(np.log2(self._rows / rows))
        at = kin.argmax()
        self._counts[at] = min(self._counts[at] + 1, _MEMORY)
        self._log += error * kin / self._counts[at]
        self._refresh()

    def _insert(self, rows: int, seconds: float) -> None:
        at = int(np.searchsorted(self._rows, rows))
        self._rows = np.insert(self._rows, at, rows)
        self._log = np.insert(self._log, at, np.log(seconds))
        self._counts = np.insert(self._counts, at, 0)
        self._refresh()

    def _refresh(self) -> None:
        if not self.known:
            self._x, self._y = np.array([1.0]), np.zeros(1)
            return
        self._x, self._y = self._rows, np.maximum.accumulate(np.exp(self._log))
        if len(self._x) > 1:
            # the last slope or the mean one: two figures that happen to be equal promise no free rows
            x, y = self._x, self._y
            slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), (y[-1] - y[0]) / (x[-1] - x[0]))
            self._x, self._y = np.append(x, _FAR), np.append(y, y[-1] + slope * (_FAR - x[-1]))


class CostModel:
    """Seconds of a round's parts.

    Args:
        verify: forward of the target by rows of all slots; first: the head's first step (and the first level's
            children) by rows it catches up on; level: one more draft level by frontier rows. At least one figure each.
    """

    def __init__(self, verify: Mapping[int, float], first: Mapping[int, float], level: Mapping[int, float]):
        assert verify and first and level, "verify, first and level are measured at one row count or more"
        self.verify, self.first, self.level = RowCost(verify), RowCost(first), RowCost(level)
        self._rest = {True: RowCost({}), False: RowCost({})}

    def rest(self, slots: int, drafted: bool) -> float:
        """All else of a round; until a round of the kind was seen, what the other kind took."""
        return self._rest[drafted if self._rest[drafted].known else not drafted](slots)

    def plain(self, slots: int) -> float:
        """A round that emits one token per slot."""
        return self.verify(slots) + self.rest(slots, drafted=False)

    def draft(self, rows: int, frontier: int, levels: int) -> float:
        """A draft of `levels` levels: the first step over `rows`, then a step over `frontier` rows per further one."""
        return self.first(rows) + max(0, levels - 1) * self.level(frontier)

    def observe_draft(self, rows: int, frontier: int, levels: int, seconds: float) -> None:
        """Share a draft's seconds among its steps as predicted."""
        ratio = seconds / self.draft(rows, frontier, levels)
        each = self.level(frontier)
        self.first.observe(rows, self.first(rows) * ratio)
        if levels > 1:
            self.level.observe(frontier, each * ratio)

    def observe_round(self, rows: int, slots: int, drafted: bool, verify: float, rest: float) -> None:
        """A verified round: `rows` of all slots' trees, roots included."""
        self.verify.observe(rows, verify)
        self._rest[drafted].observe(slots, rest)
