"""Adaptive trees: each round takes the depth and nodes that promise most tokens per second, or does not draft at all.

Knows scores, counts and seconds, nothing of models or slots' contents. Under the match rule its decisions change the
speed and no token. Other rules draw by the tree: there tokens depend on the seconds that were measured, and a seed does
not repeat a run. Target-only and rejection keep the target's law all the same; threshold keeps nothing.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eagle3_infer.calibration import Calibration, EdgeKind
from eagle3_infer.config import TreeConfig
from eagle3_infer.costs import CostModel, row_tiers
from eagle3_infer.gate import Credit, Gate

# how fast the mean acceptance of a level's children follows, where drafted and where not
_FOLLOW, _FADE = 1 / 16, 1 / 128


@dataclass
class _Round:
    """One draft and its verification, which comes a step later.

    Args:
        useful: draft levels that are of use to each slot [B].
        pending: rows that the head had not read, those of prompts included.
        p: probabilities of acceptance of all candidates so far [B, C]; 0 where a slot has no use for the level.
        widths: candidates of each level.
        broken: slots whose scores are not numbers [B].
    """

    useful: np.ndarray
    drafted: bool
    pending: int
    p: np.ndarray = field(init=False)
    broken: np.ndarray = field(init=False)
    widths: list[int] = field(default_factory=list)
    rows: int = 0
    # draft nodes that should be accepted, of all slots
    promised: float = 0.0
    draft_seconds: float = 0.0

    def __post_init__(self):
        self.p, self.broken = np.empty((self.slots, 0), np.float32), np.zeros(self.slots, bool)

    @property
    def slots(self) -> int:
        return len(self.useful)

    @property
    def left(self) -> int:
        """Rows that the head could have read to some use, but for the choice of a plain round."""
        return 0 if self.drafted or self.useful.max() < 1 else self.pending

    def see(self, scores: Sequence[Tensor]) -> np.ndarray:
        """`p` with the levels that are new in `scores`; a level is copied from the device once."""
        for level in scores[len(self.widths) :]:
            p = np.where((self.useful > len(self.widths))[:, None], level.exp().cpu().numpy(), 0)
            self.broken |= np.isnan(p).any(1)
            # the tree's builder tells: until then such a child is as good as any
            self.p = np.concatenate([self.p, np.nan_to_num(p, nan=1.0)], 1)
            self.widths.append(level.shape[1])
        return self.p


class Controller:
    """Sizes the trees of an engine's rounds.

    In a step of the engine: `walked` for each slot that was verified; `speculate` before the head's first step and,
    where it says so, `weigh` in every level's expansion, `deepen` before each further level that is of use, `pick`
    before the tree is built; `finished` at the end.

    Args:
        tree: its depth and nodes are the most.
        cost: as measured at start.
    Attributes:
        max_rows: rows that one forward may have in all; None = no bound but the tree's. To be set anew whenever free
            memory has changed; holds from the next `deepen` or `pick`.
    """

    def __init__(self, tree: TreeConfig, cost: CostModel, max_rows: int | None = None):
        self.tree, self.cost, self.max_rows = tree, cost, max_rows
        self.calibrations = {kind: Calibration() for kind in EdgeKind}
        # by slots.bit_length(): what pays for one request need not pay for eight; what may be lost is lost once
        self.gates: dict[int, Gate] = {}
        self.credit = Credit()
        # mean acceptance of a level's children by rank; level 1 first
        self._children: list[np.ndarray] = []
        self._drafted: _Round | None = None
        self._verified: _Round | None = None

    def walked(
        self,
        parents: Sequence[int],
        edges: Sequence[float],
        path: Sequence[int],
        kind: EdgeKind = EdgeKind.LOG_Q,
    ) -> None:
        """Learn from one slot's verified tree.

        Args:
            parents: row of the parent of each row in use, root first.
            edges: raw edge scores of these rows, all of one kind.
            path: accepted rows, root first.
        """
        for level, row in enumerate(path, start=1):
            children = [child for child in range(1, len(parents)) if parents[child] == row]
            if children:
                accepted = children.index(path[level]) if level < len(path) else -1
                self.calibrations[kind].observe(level, [edges[child] for child in children], accepted)

    def speculate(self, useful: Sequence[int], pending: int) -> bool:
        """Whether this step drafts; if not, the roots stay bare and the head's inputs are kept for later.

        Args:
            useful: draft levels that are of use to each sequence that goes on, one or more.
            pending: rows that the head would have to read, those just committed and whole prompts included.
        """
        now = _Round(np.array(useful), False, pending, rows=len(useful))
        plain, own, seconds = self.cost.plain(now.slots), self._own_rows(now), self.cost.first
        # prompts that joined since are no way back: drafting at all reads them
        left = 0 if self._verified is None else self._verified.left
        catch_up = max(0.0, seconds(pending) - seconds(max(own, pending - left)))
        now.drafted = max(useful) > 0 and self._gate(now.slots).decide(catch_up / plain, joining=pending > own)
        self._drafted = now
        return now.drafted

    def weigh(self, edges: Tensor, level: int, kinds: Sequence[EdgeKind] | None = None) -> Tensor:
        """What raw edge scores of children add to their path scores.

        Args:
            edges: [B, ...].
            level: of the children, 1 below the root.
            kinds: of each slot's scores [B]; None = all LOG_Q.
        """
        present = {EdgeKind.LOG_Q} if kinds is None else set(kinds)
        if len(present) == 1:
            return self.calibrations[present.pop()].log_acceptance(edges, level)
        weighed = torch.empty_like(edges)
        for kind in present:
            slots = torch.tensor([slot for slot, its in enumerate(kinds or ()) if its == kind], device=edges.device)
            weighed[slots] = self.calibrations[kind].log_acceptance(edges[slots], level)
        return weighed

    def deepen(self, scores: Sequence[Tensor]) -> bool:
        """Whether one more level, which the tree's depth and some slot's use allow, promises to pay.

        Args:
            scores: path scores of each level's candidates so far [B, C].
        """
        level, now = len(scores), self._drafting
        p = now.see(scores)
        if level >= len(self._children):
            return True
        # the frontier is the best of the last level; its children are the best guess there is
        frontier = -np.sort(-p[:, p.shape[1] - now.widths[-1] :], axis=1)[:, : self.tree.top_k]
        frontier = frontier * (now.useful > level)[:, None]
        deeper = np.concatenate([p, (frontier[..., None] * self._children[level]).reshape(now.slots, -1)], 1)
        price = self._price()
        extra = price * self.cost.level(frontier.size)
        return self._best(deeper, price)[0] - extra > self._best(p, price)[0]

    def pick(self, scores: Sequence[Tensor]) -> Tensor:
        """Draft nodes of each slot [B] int64: the best of all slots together, as many as pay.

        Args:
            scores: path scores of each drafted level's candidates [B, C], one level or more. A slot where some are not
                numbers gets a node or more, so that who builds the tree sees them.
        """
        now = self._drafting
        p = now.see(scores)
        _, now.promised, limit = self._best(p, self._price())
        limit = np.maximum(limit, now.broken)
        now.rows = now.slots + int(limit.sum())
        self._follow(p, now.widths)
        return torch.from_numpy(limit).to(scores[0].device)

    def finished(self, tokens: int, verify: float, draft: float, rest: float, prompts: bool = False) -> None:
        """End of a step, whose seconds are given by part.

        Args:
            tokens: that the walks gave, of all verified slots and before stop rules.
            rest: everything but verify and draft.
            prompts: whether prompts were read in this step; its seconds then say nothing of rounds.
        """
        done, self._verified, self._drafted = self._verified, self._drafted, None
        if self._verified is not None and self._verified.drafted:
            self._verified.draft_seconds = self._draft_seconds(self._verified, None if prompts else draft)
        if done is not None and tokens > 0:
            self._book(done, tokens, *((None, None) if prompts else (verify, rest)))
        for calibration in self.calibrations.values():
            calibration.forget()

    @property
    def _drafting(self) -> _Round:
        assert self._drafted is not None, "speculate comes before deepen and pick"
        return self._drafted

    def _gate(self, slots: int) -> Gate:
        size = slots.bit_length()
        if size not in self.gates:
            near = min(self.gates, key=lambda other: abs(other - size), default=None)
            self.gates[size] = Gate(self.credit) if near is None else copy(self.gates[near])
        return self.gates[size]

    def _price(self) -> float:
        """Tokens that a second is worth: what rounds give of late, at least what plain ones give."""
        slots = self._drafting.slots
        return max(1.0, self._gate(slots).gain) * slots / self.cost.plain(slots)

    def _best(self, p: np.ndarray, price: float) -> tuple[float, float, np.ndarray]:
        """Value of the best tier (tokens less priced seconds of verification), its accepted nodes, its limits [B]."""
        slots = len(p)
        # a slot's own order is the tree's
        flat = -np.sort(-p, axis=1)[:, : self.tree.nodes]
        width, flat = flat.shape[1], flat.reshape(-1)
        order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat)]
        most = len(order) if self.max_rows is None else min(len(order), max(0, self.max_rows - slots))
        nodes = np.array([0, *(rows - slots for rows in row_tiers(slots + most) if rows > slots), most])
        accepted = np.concatenate([[0.0], np.cumsum(flat[order], dtype=float)])[nodes]
        values = accepted - price * self.cost.verify.at(nodes + slots)
        best = values.argmax()
        return values[best], accepted[best], np.bincount(order[: nodes[best]] // width, minlength=slots)

    def _follow(self, p: np.ndarray, widths: Sequence[int]) -> None:
        """Follow the mean acceptance of each level's children by rank; of the next level, what it was fades."""
        above, start = np.ones((len(p), 1)), 0
        for level, width in enumerate(widths):
            above = above * (self._drafting.useful > level)[:, None]
            here = p[:, start : start + width]
            children = here.reshape(*above.shape, -1).sum((0, 1)) / max(above.sum(), 1e-9)
            self._move(level, children, _FOLLOW)
            above, start = -np.sort(-here, axis=1)[:, : self.tree.top_k], start + width
        if len(widths) < len(self._children):
            last = self._children[len(widths) - 1]
            wider = self._children[len(widths)]
            self._move(len(widths), np.resize(last, wider.shape), _FADE)

    def _move(self, level: int, children: np.ndarray, rate: float) -> None:
        if level == len(self._children):
            self._children.append(children)
        self._children[level] = self._children[level] + rate * (children - self._children[level])

    def _own_rows(self, of: _Round) -> int:
        """Rows that the head's first step reads for the round itself."""
        return min(of.pending, of.slots * (self.tree.depth + 1))

    def _draft_seconds(self, new: _Round, measured: float | None) -> float:
        """Without what is no round's own: prompts, which are prefill, and catching up, which was paid for."""
        frontier, levels = new.slots * self.tree.top_k, len(new.widths)
        if measured is not None:
            self.cost.observe_draft(new.pending, frontier, levels, measured)
        return self.cost.draft(self._own_rows(new), frontier, levels)

    def _book(self, done: _Round, tokens: int, verify: float | None, rest: float | None) -> None:
        if verify is not None and rest is not None:
            self.cost.observe_round(done.rows, done.slots, done.drafted, verify, rest)
        gate, plain = self._gate(done.slots), self.cost.plain(done.slots)
        if not done.drafted:
            gate.plain_round()
            return
        expected = self.cost.verify(done.rows) + self.cost.rest(done.slots, drafted=True)
        spent = expected if verify is None or rest is None else verify + rest
        predicted = done.draft_seconds + expected
        # a stall of the machine is no loss of drafting
        took = min(done.draft_seconds + spent, 1.5 * predicted)
        promise = predicted / plain, 1 + done.promised / done.slots
        gate.drafted_round(took / plain, tokens / done.slots, promise)
