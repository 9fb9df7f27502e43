"""A round's two halves in fixed shapes, for CUDA graphs: verify + accept + relocate, and the draft.

What changes from round to round lies in buffers that never move: the trees, what was accepted of them, and a table of
numbers per slot for each half, which the host sends. A half is a function of these alone, so it can be captured once
and replayed; run twice it leaves what it leaves once. The host waits once a round, to read what was accepted (and for
logits, where it decides by them).

Batches are padded to a bucket of slots. A padded row has pages of its own (the pools' spare ones) and stays a bare
root; rows that a tree does not use see only themselves.
"""

from collections.abc import Sequence

from eagle3.target import Target
from eagle3_infer.config import REJECTION, SHARED_NOISE, RuleConfig
from eagle3_infer.drafter import Draft, Drafter
from eagle3_infer.fixed_buffers import Buffers, Shape, shapes_of
from eagle3_infer.fixed_draft import FixedDrafter
from eagle3_infer.fixed_verify import FixedVerifier
from eagle3_infer.graphs import Backend, GraphCache
from eagle3_infer.kv import KVPool
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.verifier import Accepted


class FixedRounds:
    """The halves of rounds without prompts.

    Args:
        drafter: None = plain decoding.
        pools: the target's and, with a drafter, the head's, with a spare slot.
        widths: pages that the largest request has in each.
        backend: what captures the work; None = it runs as it comes.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: RuleConfig,
        pools: Sequence[KVPool],
        widths: Sequence[int],
        backend: Backend | None = None,
    ):
        self.rule, self.pools, self.widths, self.slots = rule, pools, widths, pools[0].slots
        self.shapes = shapes_of(drafter.tree if drafter else None)
        layers = drafter.head.capture_layers if drafter else ()
        self.adaptive = drafter is not None and drafter.tree.adaptive
        self.buffers, self.graphs = Buffers(target, self.slots, self.shapes, layers), GraphCache(backend)
        self.verifier = FixedVerifier(target, rule, pools[0], widths[0], self.buffers, self.graphs)
        self.drafter = drafter and FixedDrafter(drafter, pools[1], widths[1], self.buffers, self.graphs)
        # what lies in the buffers, and where a slot's sequence was when it was verified
        self._drafted: Draft | None = None
        self._rows: dict[int, int] = {}

    def prepare(self, samplers: Sequence[Sampler], most_rows: int | None = None) -> None:
        """Capture what a run of such requests will replay, on padding alone, so that none of them waits for it."""
        if self.graphs.backend is None:
            return
        for rows in sorted({self._bucket(sequences) for sequences in range(1, min(self.slots, len(samplers)) + 1)}):
            for shape in self.shapes:
                if most_rows is None or rows * shape.rows <= most_rows:
                    self.verifier.prepare(samplers, rows, shape)
            if self.drafter is not None and not self.adaptive:
                self.drafter.prepare(samplers, rows, self.shapes[-1])

    def verifies(self, draft: Draft, running: Sequence[Running], most_rows: int | None = None) -> bool:
        """Whether `verify` is for them: padding may not ask for more than `most_rows` rows."""
        rows = self._bucket(len(running)) * self._shape(draft).rows if running else 0
        return bool(rows) and (most_rows is None or rows <= most_rows)

    def verify(self, draft: Draft, running: Sequence[Running]) -> tuple[Accepted, list[list[int]]]:
        """Verify the trees of `running` and put the accepted rows in their places: see FixedVerifier."""
        shape = self._shape(draft)
        # a root alone comes from the host
        if shape.nodes and draft is not self._drafted:
            self.buffers.load(shape, draft.tree)
        self._rows = {sequence.slot: row for row, sequence in enumerate(running)}
        return self.verifier(draft, running, self._bucket(len(running)), shape)

    def drafts(self, running: Sequence[Running]) -> bool:
        """Whether `draft` is for those who go on.

        It is not where the host decides: on the size of adaptive trees, and on laws that draw drafts and are kept or
        filtered (rejection; shared noise with top-k, top-p or min-p). Nor for what earlier rounds left unread.
        """
        if self.drafter is None or self.adaptive or not running or any(sequence.backlog for sequence in running):
            return False
        sampled = [sequence.sampler.filters for sequence in running if not sequence.sampler.greedy]
        if self.rule.draft_noise == SHARED_NOISE and not all(filters.keep_all for filters in sampled):
            return False
        return self.rule.rule != REJECTION or not sampled

    def draft(self, running: Sequence[Running]) -> Draft:
        """Draft below the new roots of those who go on of the sequences just verified."""
        assert self.drafter is not None
        rows = [self._rows[sequence.slot] for sequence in running]
        self.drafter(running, rows, self._bucket(len(running)), self.shapes[-1])
        self._drafted = Draft(self.buffers.tree(self.shapes[-1], len(running)))
        return self._drafted

    def _shape(self, draft: Draft) -> Shape:
        """The smallest that holds the trees."""
        return next(shape for shape in self.shapes if shape.rows >= draft.tree.tokens.shape[1])

    def _bucket(self, sequences: int) -> int:
        """Batch rows that so many are padded to: 1, 2, 4, ... or all slots."""
        return min(1 << (sequences - 1).bit_length(), self.slots)
