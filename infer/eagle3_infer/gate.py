"""Whether speculation pays: a running account of what drafting won or lost against plain rounds. Knows no tensors."""

from dataclasses import dataclass

# all in plain rounds. Debt at which drafting stops; what of it the first draft and a probe start with
LIMIT, START, LEASH = 6.0, 3.0, 1.0
# plain rounds before a probe: doubled after each that failed
FIRST_WAIT, LAST_WAIT = 8, 256
# drafting is paid from a credit: what there is at first, what a round adds, the most there can be
CREDIT, INTEREST, MOST_CREDIT = 4.0, 0.02, 64.0
# drafted rounds after which one plain round checks what plain costs, where less than this is gained
CHECK_EVERY, CHECK_BELOW = 64, 1.3
# of the running gain, per drafted round; and the rounds without gain that it starts from
_KEEP, _PRIOR_ROUNDS = 0.97, 4.0
# of promised and accepted drafts, per drafted round; and the drafts per slot that promises are trusted for at first
_TRUST_KEEP, _TRUST_PRIOR = 0.9, 1.0


@dataclass
class Gate:
    """Drafts while it pays, else runs plain rounds and probes now and then.

    Each drafted round adds what it took, less what it gave, to a debt that never falls below 0; past LIMIT drafting
    stops. A probe starts LEASH below LIMIT: it ends after as small a loss, and has proved itself once its debt is 0.
    Whatever happens, n rounds lose no more than CREDIT + INTEREST * n plain rounds and what the last one overshot:
    losses lessen a credit, drafting stops when it is gone, and a probe starts only if it covers LEASH and the way back.

    Attributes:
        drafting: the state; debt, credit: see above.
        idle: plain rounds since drafting stopped; wait: how many there must be before a probe.
    """

    drafting: bool = True
    debt: float = LIMIT - START
    credit: float = CREDIT
    proven: bool = False
    idle: int = 0
    wait: int = FIRST_WAIT // 2
    # a first check comes early: only a plain round tells what is plain's own overhead
    unchecked: int = CHECK_EVERY * 3 // 4
    _gave: float = _PRIOR_ROUNDS
    _took: float = _PRIOR_ROUNDS
    _promised: float = 0.0
    _accepted: float = 0.0

    @property
    def gain(self) -> float:
        """Predicted speed of drafted rounds over plain ones, of late."""
        return self._gave / self._took

    def decide(self, catch_up: float) -> bool:
        """Whether the next round drafts; `catch_up` is what the head's way back would cost, in plain rounds."""
        if self.drafting:
            check = self.unchecked >= CHECK_EVERY and self.gain < CHECK_BELOW
            self.unchecked = 0 if check else self.unchecked
            return not check
        if self.idle >= self.wait and self.credit >= LEASH + catch_up:
            self.drafting, self.proven = True, False
            self.debt, self.credit = LIMIT - LEASH, self.credit - catch_up
        return self.drafting

    def plain_round(self) -> None:
        self.idle, self.unchecked = self.idle + 1, 0
        self._earn(0.0)

    def drafted_round(self, took: float, gave: float, promised: tuple[float, float]) -> None:
        """Book a drafted round.

        Args:
            took: its seconds over those of a plain round; gave: tokens per slot.
            promised: the same two, as predicted when the tree was picked.
        """
        self.unchecked += 1
        expected = 1 + self._trust(promised[1] - 1, gave - 1) * (promised[1] - 1)
        self._took, self._gave = self._took * _KEEP + promised[0], self._gave * _KEEP + expected
        # what is expected is the less noisy, what was given the more honest: each counts half
        loss = took - (gave + expected) / 2
        self.debt = max(0.0, self.debt + loss)
        self._earn(gave - took)
        if self.debt == 0:
            self.proven, self.wait = True, FIRST_WAIT
        if self.debt > LIMIT or self.credit < 0:
            self.wait = FIRST_WAIT if self.proven else min(2 * self.wait, LAST_WAIT)
            self.drafting, self.idle = False, 0

    def _trust(self, promised: float, accepted: float) -> float:
        """Accepted drafts over promised ones of late: a head that turns is seen here before in the calibration."""
        self._promised = self._promised * _TRUST_KEEP + promised
        self._accepted = self._accepted * _TRUST_KEEP + accepted
        return (self._accepted + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR)

    def _earn(self, gained: float) -> None:
        self.credit = min(MOST_CREDIT, self.credit + INTEREST + gained)
