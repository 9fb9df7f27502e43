"""A budget of tokens or minutes, as text: `160k tokens`, `5min`."""

import math
import re
from dataclasses import dataclass
from typing import Any

from eagle3.errors import ConfigError

_SCALES = {"": 1, "k": 1e3, "m": 1e6}
_MINUTES = {"s": 1 / 60, "sec": 1 / 60, "min": 1, "minute": 1, "minutes": 1, "h": 60, "hours": 60}


@dataclass(frozen=True)
class Budget:
    """Of one training run; exactly one of the two is set."""

    tokens: int | None = None
    minutes: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Of the trainer: the budget ends the run, no number of steps does."""
        return {"max_steps": None, "max_tokens": self.tokens, "max_minutes": self.minutes}

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" if self.minutes is None else f"{self.minutes:g} min"


def parse_budget(text: str) -> Budget:
    """Raises ConfigError for what is neither minutes nor tokens, or not above 0."""
    found = re.fullmatch(r"([0-9.]+)\s*(?:([kKmM]?)\s*tokens?|([a-z]+))", text.strip().lower().replace("_", ""))
    wrong = ConfigError(f"budget is {text!r}; give tokens (`200k tokens`) or time (`5min`), above 0")
    if found is None:
        raise wrong
    try:
        number, scale, unit = found.groups()
        budget = Budget(minutes=float(number) * _MINUTES[unit]) if unit else Budget(int(float(number) * _SCALES[scale]))
    except (KeyError, ValueError, OverflowError):
        raise wrong from None
    if not 0 < (budget.tokens or budget.minutes or 0) < math.inf:
        raise wrong
    return budget
