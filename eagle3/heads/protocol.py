"""What every head offers to the runtime and the trainer; K/V shapes are learned from a forward (kv.probe_shapes)."""

from typing import Protocol

from torch import Tensor

from eagle3.attention import AttentionContext
from eagle3.target import Target


class DraftHead(Protocol):
    """A head drafts from a feature, one token per step; it attends through a context like any model."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs make up the feature, ascending."""
        ...

    @property
    def feature_size(self) -> int:
        """F, the width of a feature."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers of the head."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Vd, tokens that the head can propose."""
        ...

    def check_target(self, target: Target) -> None:
        """Raise CheckpointError if the head cannot draft for `target`; warn if it was trained for another one."""
        ...

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Embeddings [T, H] of target ids."""
        ...

    def start(self, feature: Tensor) -> Tensor:
        """Feature [T, F] -> hidden state h [T, H]."""
        ...

    def step(
        self, h: Tensor, embeds: Tensor, positions: Tensor, ctx: AttentionContext, query_rows: Tensor | None = None
    ) -> Tensor:
        """One draft step over packed rows: h and next-token embeddings [T, H] -> next step's h [T, H], or [R, H]."""
        ...

    def normed(self, h: Tensor) -> Tensor:
        """What the lm_head reads of a step's output [..., H]."""
        ...

    def logits(self, h: Tensor) -> Tensor:
        """Logits [..., Vd] over the draft vocabulary of a step's output."""
        ...

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        ...
