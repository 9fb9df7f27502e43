"""What rounds of fixed shapes keep at addresses that never move, a batch row per slot. Knows nothing of rounds."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from eagle3.capture import Capture
from eagle3.target import Target
from eagle3_infer.config import TreeConfig
from eagle3_kernels.build_tree import link_tree
from eagle3_kernels.structures import FirstStep, Tree

# sizes of adaptive trees, each half of the next
TIERS = 4


class Shape(NamedTuple):
    """Levels and draft nodes of a round's trees; none of either where nothing is drafted."""

    depth: int = 0
    nodes: int = 0

    @property
    def rows(self) -> int:
        """N, rows of a tree."""
        return self.nodes + 1


def shapes_of(tree: TreeConfig | None) -> list[Shape]:
    """Those that rounds of an engine have, smallest first; of adaptive trees a few, as each is a graph of its own."""
    if tree is None:
        return [Shape()]
    if not tree.adaptive:
        return [Shape(tree.depth, tree.nodes)]
    nodes = sorted({tree.nodes >> i for i in range(TIERS)} - {0})
    return [Shape(), *(Shape(tree.depth, n) for n in nodes)]


class Buffers:
    """What the two halves of a round leave for each other.

    Args:
        slots: batch rows.
        shapes: that trees may have.
        layers: whose outputs make up a feature; may be none.
    Attributes:
        window: D + 1 of the deepest shape, rows that a round commits at most.
        trees: [slots, N] of each shape, as drafted and to be verified; bare roots at first.
        capture: features of all rows of the trees that were verified last.
        step: which of them were accepted [slots, window].
    """

    def __init__(self, target: Target, slots: int, shapes: Sequence[Shape], layers: tuple[int, ...]):
        device = target.device
        self.window = 1 + max(shape.depth for shape in shapes)
        roots = Tree.bare(torch.zeros(slots, dtype=torch.int64, device=device))
        self.trees = {shape: padded_tree(roots, slots, shape.rows, self.window - 1) for shape in shapes}
        self.capture = Capture(target, layers, slots * max(shape.rows for shape in shapes))
        rows = torch.zeros(slots, self.window, dtype=torch.int64, device=device)
        self.step = FirstStep(rows, rows.int(), rows[:, 0].int())

    @property
    def features(self) -> Tensor:
        """[slots * N, F] of the largest N, in the order of the rows that were verified."""
        assert self.capture.buffer is not None, "no head, no features"
        return self.capture.buffer

    def tree(self, shape: Shape, rows: int) -> Tree:
        """The first `rows` trees, as views."""
        tree = self.trees[shape]
        return replace(tree, **{name: part[:rows] for name, part in tensors(tree).items()})

    def load(self, shape: Shape, tree: Tree) -> None:
        """Take over trees that were drafted elsewhere, of at most this shape; the slots beyond them get bare roots."""
        kept = self.trees[shape]
        slots, rows = kept.tokens.shape
        copy_tree(kept, padded_tree(tree, slots, rows, kept.depth))


def tensors(tree: Tree) -> dict[str, Tensor]:
    """Its fields by name; `source` is not among them, as only laws that are kept are asked for it."""
    named = {field.name: getattr(tree, field.name) for field in fields(tree) if field.name != "source"}
    return {name: part for name, part in named.items() if isinstance(part, Tensor)}


def copy_tree(into: Tree, tree: Tree) -> None:
    parts = tensors(tree)
    for name, kept in tensors(into).items():
        kept.copy_(parts[name])


def padded_tree(tree: Tree, slots: int, rows: int, depth: int) -> Tree:
    """The same trees among `slots` of `rows` rows; the others are bare roots of token 0."""

    def padded(part: Tensor, filler: float) -> Tensor:
        whole = part.new_full((slots, rows), filler)
        whole[: part.shape[0], : part.shape[1]] = part
        return whole

    scores = padded(tree.scores, -torch.inf)
    scores[:, 0] = 0
    count = torch.ones(slots, dtype=torch.int32, device=scores.device)
    count[: len(tree.count)] = tree.count
    edges = torch.zeros_like(scores) if tree.edges is None else padded(tree.edges, 0)
    return link_tree(count, padded(tree.tokens, 0), padded(tree.parent, -1), scores, depth, edges)


class SlotTable:
    """Columns of a number per batch row that reach the device in one copy which nobody waits for.

    The host may fill a table again only once it has waited for work behind the last copy: so each half has its own.
    """

    def __init__(self, integers: Sequence[str], floats: Sequence[str], rows: int, device: torch.device):
        self._at = {name: index for index, name in enumerate((*integers, *floats))}
        self._floats = frozenset(floats)
        self._host = torch.zeros(len(self._at), rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(self._host.shape, dtype=torch.int64, device=device)

    def send(self, **columns: Sequence[int] | Sequence[float]) -> None:
        """Fill the first rows of each column."""
        for name, numbers in columns.items():
            self._column(self._host, name)[: len(numbers)] = torch.tensor(numbers)
        self._device.copy_(self._host, non_blocking=True)

    def __getitem__(self, name: str) -> Tensor:
        """[slots], int64 or float64."""
        return self._column(self._device, name)

    def _column(self, table: Tensor, name: str) -> Tensor:
        column = table[self._at[name]]
        return column.view(torch.float64) if name in self._floats else column
