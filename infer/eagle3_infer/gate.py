"""Whether speculation pays: a running account of what drafting won or lost against plain rounds. Knows no tensors."""

from dataclasses import dataclass, field

# all in plain rounds. Debt at which drafting stops; what of it the first draft and a probe start with
LIMIT, START, LEASH = 6.0, 3.0, 1.0
# plain rounds before a probe: doubled after each that failed
FIRST_WAIT, LAST_WAIT = 8, 256
# what drafting may lose: at first, more of it with every round, the most that there can be
CREDIT, INTEREST, MOST_CREDIT = 4.0, 0.02, 64.0
# drafted rounds after which one plain round checks what plain costs, where less than this is gained
CHECK_EVERY, CHECK_BELOW = 64, 1.3
# of the running gain, per drafted round; and the rounds without gain that it starts from
_KEEP, _PRIOR_ROUNDS = 0.97, 4.0
# of promised and accepted drafts, per drafted round; and the drafts per slot that promises are trusted for at first
_TRUST_KEEP, _TRUST_PRIOR = 0.9, 1.0


@dataclass
class Credit:
    """Plain rounds that drafting may still lose; one account for all gates of an engine."""

    rounds: float = CREDIT

    def earn(self, gained: float) -> None:
        """Book a round, and what it gained or lost."""
        self.rounds = min(MOST_CREDIT, self.rounds + INTEREST + gained)


@dataclass
class Gate:
    """Drafts while it pays, else runs plain rounds and probes now and then.

    Each drafted round adds what it took, less what it gave, to a debt that never falls below 0; past LIMIT drafting
    stops. A probe starts LEASH below LIMIT: it ends after as small a loss, and has proved itself once its debt is 0.
    By the books, n rounds of all gates that share a credit lose no more than CREDIT + INTEREST * n plain rounds (a
    loss counts in plain rounds of its own size) and what those under way overshoot: losses lessen the credit, without
    it nobody drafts, reading what plain rounds left is paid beforehand, and a probe needs LEASH on top.

    Attributes:
        drafting: the state; debt, credit: see above.
        idle: plain rounds since drafting stopped; wait: how many there must be before a probe.
    """

    credit: Credit = field(default_factory=Credit)
    drafting: bool = True
    debt: float = LIMIT - START
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

    def decide(self, catch_up: float, joining: bool = False) -> bool:
        """Whether the next round drafts.

        Args:
            catch_up: what it costs the head to read the rows that plain rounds left, in plain rounds; paid here.
            joining: whether it has prompts to read, too. A check of what plain costs would leave them for later.
        """
        if self.drafting:
            if self.unchecked >= CHECK_EVERY and self.gain < CHECK_BELOW and not joining:
                self.unchecked = 0
                return False
        elif self.idle < self.wait:
            return False
        if self.credit.rounds < catch_up + (0 if self.drafting else LEASH):
            return False
        self.credit.rounds -= catch_up
        if not self.drafting:
            self.drafting, self.proven, self.debt = True, False, LIMIT - LEASH
        return True

    def plain_round(self) -> None:
        self.idle, self.unchecked = self.idle + 1, 0
        self.credit.earn(0.0)

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
        self.credit.earn(gave - took)
        if self.debt == 0:
            self.proven, self.wait = True, FIRST_WAIT
        if self.debt > LIMIT or self.credit.rounds < 0:
            self.wait = FIRST_WAIT if self.proven else min(2 * self.wait, LAST_WAIT)
            self.drafting, self.idle = False, 0

    def _trust(self, promised: float, accepted: float) -> float:
        """Accepted drafts over promised ones of late: a head that turns is seen here before in the calibration."""
        self._promised = self._promised * _TRUST_KEEP + promised
        self._accepted = self._accepted * _TRUST_KEEP + accepted
        return (self._accepted + _TRUST_PRIOR) / (self._promised + _TRUST_PRIOR)
