"""How far a run has come: what its checkpoints and records tell of it."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    # of updates, without evaluations and set-up
    seconds: float = 0.0
    best_tau: float = 0.0
    best_step: int = 0
    # evaluations without a better tau
    since_best: int = 0
    # PreparedRows.key of what it was trained and judged on
    rows: str = ""
    tracker: dict[str, Any] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, Any]:
        """What run.json says at the end; `train_seconds` are those of updates, of all parts of a resumed run."""
        best = {"best_tau": self.best_tau, "best_step": self.best_step}
        return {"step": self.step, "tokens": self.tokens, "train_seconds": round(self.seconds, 1), **best}

    def judge(self, tau: float) -> bool:
        """Take note of an evaluation; whether it is the best so far."""
        better = tau > self.best_tau
        self.since_best = 0 if better else self.since_best + 1
        if better:
            self.best_tau, self.best_step = tau, self.step
        return better

    def meet(self, rows: str) -> list[str]:
        """Go on with these rows; what changes with them, as text: taus of other held-out replies do not compare."""
        changed = self.rows not in ("", rows)
        if changed:
            self.best_tau, self.since_best = 0.0, 0
        self.rows = rows
        return ["data: other rows than before; the best tau is looked for anew"] if changed else []
