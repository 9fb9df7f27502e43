"""Simulated tau: what the engine's chain would emit per round on replies that are known."""

from dataclasses import dataclass, field

from torch import Tensor

from eagle3_train.ttt import TTTBatch, TTTOutput


@dataclass
class Tally:
    """Counts over batches; every figure derives from them."""

    steps: int
    rounds: int = 0
    emitted: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    alpha: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    in_vocab: int = 0
    rows: int = 0

    def __post_init__(self):
        for name in ("offered", "accepted", "counted", "right", "trained"):
            setattr(self, name, [0] * self.steps)
        self.loss, self.alpha = [0.0] * self.steps, [0.0] * self.steps

    def add_rates(self, inputs: TTTBatch, output: TTTOutput) -> None:
        """Count per-step accuracy against the teacher; a teacher's choice outside the draft vocabulary is a miss."""
        for k in range(self.steps):
            at = inputs.counted[k].nonzero().flatten()
            self.counted[k] += len(at)
            self.right[k] += int((output.prediction[k, at] == inputs.teacher.argmax[at + k]).sum())
            self.trained[k] += int(output.trained[k])
            self.loss[k] += float(output.step_loss[k])
            self.alpha[k] += float(output.step_alpha[k])
        self.rows += len(inputs.rows)
        self.in_vocab += int(inputs.teacher.in_vocab.sum())

    def add_walk(self, inputs: TTTBatch, output: TTTOutput) -> None:
        """Walk every reply as the engine's chain would, a round from each root reached."""
        hits = (output.prediction == inputs.tokens) & inputs.counted
        spans = inputs.batch.span_ids[inputs.rows + 1]
        for span in spans.unique():
            run = walk(hits[:, spans == span])
            self.rounds += len(run)
            self.emitted += sum(run)
            for k in range(self.steps):
                # a round of run length r accepted r - 1 drafts
                self.offered[k] += len(run)
                self.accepted[k] += sum(length > k + 1 for length in run)

    def merge(self, others: list["Tally"]) -> "Tally":
        """Sum with the tallies of other ranks."""
        for other in others:
            for name, mine in vars(self).items():
                theirs = getattr(other, name)
                if name != "steps":
                    setattr(
                        self,
                        name,
                        [a + b for a, b in zip(mine, theirs, strict=True)] if isinstance(mine, list) else mine + theirs,
                    )
        return self

    @property
    def tau(self) -> float | None:
        """Tokens emitted per round, bonus included; None without a round."""
        return self.emitted / self.rounds if self.rounds else None

    def rates(self) -> dict[str, float | list[float]]:
        """loss (per supervised row, summed over steps without decay), accept and alpha by level, coverage."""
        return {
            "loss": sum(x / max(n, 1) for x, n in zip(self.loss, self.counted, strict=True)),
            "accept": [r / max(n, 1) for r, n in zip(self.right, self.counted, strict=True)],
            "alpha": [a / max(n, 1) for a, n in zip(self.alpha, self.counted, strict=True)],
            "coverage": self.in_vocab / max(self.rows, 1),
        }


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
