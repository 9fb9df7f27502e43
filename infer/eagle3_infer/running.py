"""One running request: its tokens, its slot and what follows from them. Of tensors it only keeps features for later."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle3_infer.metrics import RequestMetrics
from eagle3_infer.request import Request, Result
from eagle3_infer.sampling import Sampler
from eagle3_infer.stops import Stops

CANCELLED = "cancelled"
# of a request that ended before it had one
NO_SLOT = -1


@dataclass
class Running:
    """A request in a slot. The last token is the root: committed, but not yet in the target's K/V.

    Args:
        number: the request's place in the caller's list.
        tokens: prompt and output so far.
        logprobs: of the output, where they are wanted.
        length, head_length: committed K/V rows in the target's and in the head's pool.
        backlog: features of the committed rows that the head has not read.
    """

    request: Request
    number: int
    slot: int
    sampler: Sampler
    stops: Stops
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    length: int = 0
    head_length: int = 0
    backlog: list[Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    _taken: int = 0

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

    @property
    def fresh(self) -> bool:
        """Whether it had no round yet."""
        return not self.metrics.run_lengths

    @property
    def unread(self) -> int:
        """Committed rows that the head has not read."""
        return self.length - self.head_length

    def read(self, rows: int) -> tuple[Tensor, list[int]]:
        """Hand the next unread rows to the head: features [rows, F] and the token after each; they count as read."""
        features = self.backlog[0] if len(self.backlog) == 1 else torch.cat(self.backlog)
        self.backlog = [features[rows:]] if rows < len(features) else []
        self.head_length += rows
        return features[:rows], self.tokens[self.head_length - rows + 1 : self.head_length + 1]

    def keep(self) -> None:
        """Own the newest features: they are part of a round's, which holds those of all sequences."""
        self.backlog[-1] = self.backlog[-1].clone()

    def emit(self, run: list[int], logprobs: Sequence[float]) -> int:
        """Append what the stop rules keep of `run`; returns how many tokens that is."""
        kept, self.finish_reason = self.stops.keep(self.output, run)
        self.tokens += run[:kept]
        self.logprobs += logprobs[:kept]
        return kept

    @property
    def untold(self) -> bool:
        """Whether it has emitted what `take` did not tell."""
        return len(self.tokens) > self.prompt_length + self._taken

    def take(self) -> list[int]:
        """Tokens emitted since this was asked last."""
        fresh = self.output[self._taken :]
        self._taken += len(fresh)
        return fresh

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
            logprobs=self.logprobs if self.request.logprobs else None,
        )


@dataclass(frozen=True)
class Chunk:
    """The next rows of a prompt that is being read."""

    sequence: Running
    before: int
    rows: int

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.before : self.before + self.rows]

    @property
    def last(self) -> bool:
        return self.before + self.rows == self.sequence.prompt_length
