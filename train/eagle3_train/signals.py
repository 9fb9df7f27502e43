"""SIGTERM asks for the end of the run: the step is finished, a checkpoint written, and the process ends with 143."""

import signal
from types import FrameType
from typing import Any

TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came where nothing needs finishing: before the first step, or a second time."""


class Termination:
    """Catches SIGTERM from its making on, until it is closed; `asked` tells whether it came.

    Outside `deferred` it raises `Terminated` at once.
    """

    def __init__(self):
        self.asked = self.deferred = False
        self._before: Any = signal.signal(signal.SIGTERM, self._come)

    def _come(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked or not self.deferred:
            raise Terminated
        self.asked = True

    def close(self) -> None:
        signal.signal(signal.SIGTERM, self._before)


def lost_touch(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone, or did not come within the timeout."""
    # gloo has no exception of its own; torch's others are subclasses that need torch to be named
    kinds = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError"}
    return "gloo" in str(error) or any(kind.__name__ in kinds for kind in type(error).__mro__)
