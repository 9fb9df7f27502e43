"""What every head offers to the runtime and the trainer."""

from typing import Protocol

from torch import Tensor

from eagle3.attention import AttentionContext


class DraftHead(Protocol):
    """A head drafts from a feature, one token per step; it attends through a context like any model."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs make up the feature, ascending."""
        ...

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(KV heads, head dim) of each of the head's layers."""
        ...

    def start(self, feature: Tensor) -> Tensor:
        """Feature [T, F] -> hidden state h [T, H]."""
        ...

    def step(self, h: Tensor, embeds: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """One draft step over packed rows: h and next-token embeddings [T, H] -> next step's h [T, H]."""
        ...

    def logits(self, h: Tensor) -> Tensor:
        """Logits [T, Vd] over the draft vocabulary of a step's output."""
        ...

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        ...
