"""Exact laws: a random program is run once for every way its draws can fall, and the weights are summed.

`Dice` stands for all randomness; what a program is told to draw it draws with `dice(probabilities)`.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import product

import torch
from torch import Tensor

from eagle3_kernels.verify_tree.rules import NodeLaw

# (p, children, q) -> what the rule does at a node
Rule = Callable[[Tensor, Sequence[int], Tensor], NodeLaw]
# a tree's shape: one entry per child, each the shape below it
Shape = tuple["Shape", ...]


class Dice:
    """Replays the draws of a script, takes the first possible outcome after it and notes the others."""

    def __init__(self, script: tuple[int, ...]):
        self.script, self.taken, self.untried, self.weight = script, (), [], 1.0

    def __call__(self, probabilities: Sequence[float]) -> int:
        step = len(self.taken)
        if step < len(self.script):
            pick = self.script[step]
        else:
            pick, *others = [i for i, weight in enumerate(probabilities) if weight > 0]
            self.untried += [(*self.taken, other) for other in others]
        self.taken += (pick,)
        self.weight *= probabilities[pick]
        return pick


def law_of(program: Callable[[Dice], Hashable]) -> dict[Hashable, float]:
    """Probability of each outcome of the program."""
    law, todo = defaultdict(float), [()]
    while todo:
        dice = Dice(todo.pop())
        law[program(dice)] += dice.weight
        todo += dice.untried
    return law


def distance(law: dict[Hashable, float], expected: dict[Hashable, float]) -> float:
    """The largest difference of the two laws over all outcomes."""
    return max(abs(law.get(outcome, 0.0) - expected.get(outcome, 0.0)) for outcome in {*law, *expected})


def draw_children(dice: Dice, q: Tensor, count: int) -> list[int]:
    """Tokens sampled from q without replacement, in the order of the draws; fewer where q has fewer."""
    weights, drawn = q.tolist(), []
    while len(drawn) < count and any(weights):
        drawn.append(dice([w / sum(weights) for w in weights]))
        weights[drawn[-1]] = 0.0
    return drawn


def try_children(dice: Dice, law: NodeLaw) -> int:
    """Index of the accepted child, or -1."""
    for index, accept in enumerate(law.accept.tolist()):
        if dice([accept, 1 - accept]) == 0:
            return index
    return -1


def emit(dice: Dice, law: NodeLaw) -> int:
    """The token of one node."""
    index = try_children(dice, law)
    return law.children[index] if index >= 0 else dice(law.residual.tolist())


def emitted(law: NodeLaw) -> Tensor:
    """Law of the token of one node [V], in closed form."""
    total, left = torch.zeros_like(law.residual), 1.0
    for x, accept in zip(law.children, law.accept.tolist(), strict=True):
        total[x] += left * accept
        left *= 1 - accept
    return total + left * law.residual


class Model:
    """Tables of next-token laws after every prefix of up to two tokens, float64; some entries are zero."""

    def __init__(self, vocab: int, seed: int, sharpness: float = 1.5):
        draw = torch.Generator().manual_seed(seed)
        prefixes = [prefix for length in range(3) for prefix in product(range(vocab), repeat=length)]
        logits = torch.randn(len(prefixes), vocab, dtype=torch.float64, generator=draw) * sharpness
        gone = torch.rand(logits.shape, generator=draw) < 0.1
        gone[:, 0] = False
        laws = logits.masked_fill(gone, -torch.inf).softmax(-1)
        self.laws = dict(zip(prefixes, laws, strict=True))

    def __getitem__(self, prefix: Sequence[int]) -> Tensor:
        return self.laws[tuple(prefix)]

    def joint(self) -> dict[Hashable, float]:
        """Law of the first two tokens."""
        return {
            (x, y): float(px * self[[x]][y]) for x, px in enumerate(self[[]]) for y in range(len(self[[]])) if px > 0
        }
