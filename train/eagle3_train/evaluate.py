"""Simulated tau: what the engine's chain would emit per round on replies that are known."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_train.ttt import TTTBatch, TTTOutput


@dataclass
class Counts:
    """Counts over batches; every figure derives from them.

    By step: `counted` rows, those whose draft was the teacher's choice (`right`), their sums of `loss` and `alpha`,
    and drafts `accepted` by level. `rounds` of the walks and tokens `emitted` by them; supervised `rows`, and those
    whose teacher's choice is `in_vocab`.
    """

    counted: list[float]
    right: list[float]
    loss: list[float]
    alpha: list[float]
    accepted: list[float]
    rows: float = 0.0
    in_vocab: float = 0.0
    rounds: float = 0.0
    emitted: float = 0.0

    @classmethod
    def of(cls, steps: int, sums: Sequence[float]) -> "Counts":
        """From the numbers in the order of the fields."""
        lists: Any = [list(sums[k * steps : (k + 1) * steps]) for k in range(5)]
        return cls(*lists, *sums[5 * steps :])

    @classmethod
    def merged(cls, parts: Iterable["Counts"]) -> "Counts":
        """The sum of several ranks' counts, in their order."""
        columns: Iterable[Any] = zip(*(vars(part).values() for part in parts), strict=True)
        sums: Any = (_sum_lists(c) if isinstance(c[0], list) else sum(c) for c in columns)
        return cls(*sums)

    @property
    def steps(self) -> int:
        return len(self.counted)

    @property
    def tau(self) -> float:
        """Tokens emitted per round, bonus included; NaN without a round."""
        return self.emitted / self.rounds if self.rounds else math.nan

    def __str__(self) -> str:
        rates = self.rates()
        chain = " ".join(f"{rate:.2f}" for rate in rates["accept_chain"])
        return f"tau {self.tau:.3f}  loss {rates['loss']:.3f}  accepted by level {chain}"

    def rates(self) -> dict[str, Any]:
        """The figures of a metrics record.

        loss: per supervised row, summed over steps without decay. accept, alpha: by step, over all supervised rows,
        whatever was drafted before. accept_chain: by level, share of rounds whose first drafts were all right up to
        it; tau = 1 + their sum. coverage: share of the teacher's choices that the head could propose.
        """
        return {
            "loss": sum(_shares(self.loss, self.counted)),
            "tau": self.tau,
            "accept": _shares(self.right, self.counted),
            "accept_chain": _shares(self.accepted, [self.rounds] * self.steps),
            "alpha": _shares(self.alpha, self.counted),
            "coverage": self.in_vocab / max(self.rows, 1),
        }


class Tally:
    """Adds batches up without waiting for their device; `counts` waits once."""

    def __init__(self, steps: int):
        self.steps = steps
        self._parts: list[Tensor] = []

    def add(self, inputs: TTTBatch, output: TTTOutput) -> None:
        # counts of one batch are exact in fp32
        self._parts.append(torch.cat([part.float() for part in (*_rates(inputs, output), *_walks(inputs, output))]))

    def counts(self) -> Counts:
        rows = torch.stack(self._parts).tolist() if self._parts else [[0.0] * (5 * self.steps + 4)]
        # summed in double precision, in the order of the batches
        return Counts.of(self.steps, _sum_lists(rows))


def _rates(inputs: TTTBatch, output: TTTOutput) -> tuple[Tensor, ...]:
    """By step: rows counted, and right by the teacher's choice (one outside the draft vocabulary is a miss), loss,
    alpha."""
    counted, teacher, rows = inputs.supervision.counted, inputs.teacher, inputs.supervision.rows
    steps, count = counted.shape
    taught = torch.arange(count, device=rows.device) + torch.arange(steps, device=rows.device).unsqueeze(1)
    # an entry past the end is no counted row's
    right = counted & (output.prediction == teacher.argmax[taught.clamp(max=count - 1)])
    return counted.sum(1), right.sum(1), output.step_loss, output.step_alpha


def _walks(inputs: TTTBatch, output: TTTOutput) -> tuple[Tensor, ...]:
    """Walk every reply as the engine's chain would: drafts accepted by level; [rows, in vocab, rounds, emitted]."""
    supervision = inputs.supervision
    hits = (output.prediction == supervision.tokens) & supervision.counted
    roots, runs = _rounds(hits, _ends(inputs.batch.span_ids[supervision.rows + 1]))
    runs = runs * roots
    # a run of r tokens is r - 1 drafts and the target's own; the reply's end cuts drafts off
    levels = torch.arange(len(hits), device=hits.device).unsqueeze(1)
    accepted = (runs > levels + 1).sum(1)
    rows = torch.full_like(runs.sum(), len(runs))
    return accepted, torch.stack((rows, inputs.teacher.in_vocab.sum(), roots.sum(), runs.sum()))


def _ends(spans: Tensor) -> Tensor:
    """For each row [R], the first row behind its reply; replies are stretches of one span id."""
    count = len(spans)
    after = torch.arange(1, count + 1, device=spans.device)
    last = torch.ones(count, dtype=torch.bool, device=spans.device)
    last[:-1] = spans[1:] != spans[:-1]
    return torch.where(last, after, count).flip(0).cummin(0).values.flip(0)


def _rounds(hits: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows are roots (bool [R]), and what a round from each row would emit (int64 [R]).

    A round's next root follows its last token; a reply's last round leads to the next reply's first row. So all roots
    lie on one path from row 0, marked here by jumps of doubled length, without a word from the device to the host.
    """
    count = hits.shape[1]
    at = torch.arange(count, device=hits.device)
    runs = torch.minimum(hits.long().cumprod(0).sum(0) + 1, ends - at)
    jump = torch.cat((at + runs, at.new_full((1,), count)))
    reached = torch.zeros(count + 1, dtype=torch.int64, device=hits.device)
    reached[:1] = 1
    for _ in range(count.bit_length()):
        reached = reached.index_add(0, jump, reached).clamp(max=1)
        jump = jump[jump]
    return reached[:count].bool(), runs


def walk(hits: Tensor) -> list[int]:
    """Run lengths of the rounds over one reply.

    Args:
        hits: bool [steps, R]: row r's drafts for the round whose root is the reply's token r (prefill's is token 0);
            step k drafts token r+1+k. R + 1 tokens in all.
    Returns:
        tokens emitted by each round, cut at the reply's end; they sum to R.
    """
    roots, runs = _rounds(hits, torch.full((hits.shape[1],), hits.shape[1], device=hits.device))
    return runs[roots].tolist()


def _shares(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / max(whole, 1) for part, whole in zip(parts, wholes, strict=True)]


def _sum_lists(rows: Iterable[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]
