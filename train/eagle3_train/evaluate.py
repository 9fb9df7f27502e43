"""Simulated tau: what the engine's chain would emit per round on replies that are known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3_train.ttt import TTTBatch, TTTOutput


@dataclass
class Tally:
    """Counts over batches; every figure derives from them."""

    steps: int
    rounds: int = 0
    emitted: int = 0
    accepted: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    in_vocab: int = 0
    rows: int = 0

    def __post_init__(self):
        for name in ("accepted", "counted", "right"):
            setattr(self, name, [0] * self.steps)
        self.loss, self.alpha = [0.0] * self.steps, [0.0] * self.steps

    def add(self, inputs: TTTBatch, output: TTTOutput) -> None:
        self.add_rates(inputs, output)
        self.add_walk(inputs, output)

    def add_rates(self, inputs: TTTBatch, output: TTTOutput) -> None:
        """Count per-step accuracy against the teacher; a teacher's choice outside the draft vocabulary is a miss."""
        counted, teacher = inputs.supervision.counted, inputs.teacher
        step, row = counted.nonzero(as_tuple=True)
        right = torch.zeros(self.steps, device=step.device)
        right.index_add_(0, step, (output.prediction[step, row] == teacher.argmax[row + step]).float())
        for name, sums in (
            ("counted", counted.sum(1)),
            ("right", right.long()),
            ("loss", output.step_loss),
            ("alpha", output.step_alpha),
        ):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), sums.tolist(), strict=True)])
        self.rows += len(inputs.supervision.rows)
        self.in_vocab += int(teacher.in_vocab.sum())

    def add_walk(self, inputs: TTTBatch, output: TTTOutput) -> None:
        """Walk every reply as the engine's chain would, a round from each root reached."""
        supervision = inputs.supervision
        hits = ((output.prediction == supervision.tokens) & supervision.counted).cpu()
        spans = inputs.batch.span_ids[supervision.rows + 1].cpu()
        for reply in hits.split(spans.unique_consecutive(return_counts=True)[1].tolist(), dim=1):
            run = walk(reply)
            self.rounds += len(run)
            self.emitted += sum(run)
            for k in range(self.steps):
                # a run of r tokens is r - 1 drafts and the target's own; the reply's end cuts drafts off
                self.accepted[k] += sum(length > k + 1 for length in run)

    def merge(self, others: list["Tally"]) -> "Tally":
        """Sum with the tallies of other ranks."""
        for other in others:
            for name, mine in vars(self).items():
                theirs = getattr(other, name)
                if isinstance(mine, list):
                    setattr(self, name, [a + b for a, b in zip(mine, theirs, strict=True)])
                elif name != "steps":
                    setattr(self, name, mine + theirs)
        return self

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


def _shares(parts: Sequence[float], wholes: Sequence[int]) -> list[float]:
    return [part / max(whole, 1) for part, whole in zip(parts, wholes, strict=True)]


def walk(hits: Tensor) -> list[int]:
    """Run lengths of the rounds over one reply.

    Args:
        hits: bool [steps, R]: row r's drafts for the round whose root is the reply's token r (prefill's is token 0);
            step k drafts token r+1+k. R + 1 tokens in all.
    Returns:
        tokens emitted by each round, cut at the reply's end; they sum to R.
    """
    remaining = hits.shape[1]
    leading = hits.int().cumprod(0).sum(0).tolist()
    runs, root = [], 0
    while root < remaining:
        emitted = min(leading[root] + 1, remaining - root)
        runs.append(emitted)
        root += emitted
    return runs
