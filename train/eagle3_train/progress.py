"""The live progress line of a run: step, values, tokens per second, time left. Knows nothing else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Live progress: one rewritten line on a terminal, else a line every `every` steps.

    Args:
        total_steps: where the run ends; None = not known in steps.
        start_step: the step that a resumed run goes on from.
        every: steps between lines where the stream is no terminal.
        stream: where to print, stderr by default; `enabled=False` prints nothing (other ranks).
        unit: what the line counts.
    """

    WINDOW = 20

    def __init__(
        self,
        total_steps: int | None,
        start_step: int = 0,
        every: int = 10,
        stream: TextIO | None = None,
        enabled: bool = True,
        unit: str = "step",
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.every, self.enabled, self.unit = total_steps, every, enabled, unit
        self._stream, self._clock = stream or sys.stderr, clock
        self._live = self._stream.isatty()
        self._width = 0
        # (time, step, tokens so far) of the last steps: the rate follows the present, not the whole run
        self._marks = deque([(clock(), start_step, 0)], maxlen=self.WINDOW)

    def update(self, step: int, tokens: int, **values: float | None) -> None:
        """Show a step just done over `tokens` tokens, with values such as loss and tau (None: left out)."""
        _, last_step, total = self._marks[-1]
        self._marks.append((self._clock(), step, total + tokens))
        if self.enabled and (self._live or step % self.every == 0 or step in (last_step, self.total) or step == 1):
            self._show(self._line(step, values))

    @property
    def tokens_per_second(self) -> float:
        """Over the last steps."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        return (after - before) / max(end - start, 1e-9)

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if not self.enabled:
            return
        self._clear()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the live line, leaving it on the screen."""
        if self._live and self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _line(self, step: int, values: dict[str, float | None]) -> str:
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        shown = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        rate = f"{self.tokens_per_second:,.0f} tok/s"
        if self.total is None:
            return "  ".join([f"{self.unit} {step}", *shown, rate])
        left = (end - start) / max(last - first, 1) * (self.total - step)
        return "  ".join([f"{self.unit} {step}/{self.total}", *shown, rate, f"ETA {_clock_text(left)}"])

    def _show(self, line: str) -> None:
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(line)

    def _clear(self) -> None:
        if self._live and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0


def _clock_text(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
