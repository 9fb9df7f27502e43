"""One running request: its tokens, its slot and what follows from them. Knows no tensors."""

from dataclasses import dataclass, field

from eagle3_infer.metrics import RequestMetrics
from eagle3_infer.request import Request, Result
from eagle3_infer.sampling import Sampler
from eagle3_infer.stops import Stops


@dataclass
class Running:
    """A request in a slot. The last token is the root: committed, but not yet in the target's K/V.

    Args:
        number: the request's place in the caller's list.
        tokens: prompt and output so far.
        length, head_length: committed K/V rows in the target's and in the head's pool.
    """

    request: Request
    number: int
    slot: int
    sampler: Sampler
    stops: Stops
    tokens: list[int]
    length: int = 0
    head_length: int = 0
    finish_reason: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def useful_levels(self) -> int:
        """Draft levels that the next round could still emit; the round's own token comes on top."""
        return self.request.max_new_tokens - (len(self.tokens) - self.prompt_length) - 1

    def emit(self, run: list[int]) -> int:
        """Append what the stop rules keep of `run`; returns how many tokens that is."""
        kept, self.finish_reason = self.stops.keep(self.output, run)
        self.tokens += run[:kept]
        return kept

    def result(self) -> Result:
        m = self.metrics
        return Result(
            token_ids=self.output,
            finish_reason=self.finish_reason or "",
            prompt_tokens=self.prompt_length,
            run_lengths=m.run_lengths,
            offered_by_level=m.offered_by_level,
            accepted_by_level=m.accepted_by_level,
            nodes=m.nodes,
            path_conflict=(m.conflicts, m.leaf_pairs),
            seconds=m.seconds,
        )
