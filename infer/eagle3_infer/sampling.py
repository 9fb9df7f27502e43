"""A request's draw of the target's token: its parameters, its seed, and the replayed tokens before them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eagle3_infer.request import Request
from eagle3_kernels.sample_nodes import Filters, perturbed_scores, request_seed, sample_node, sample_nodes


@dataclass(frozen=True)
class Sampler:
    """Draws by the match rule: a function of logits, request and absolute position alone."""

    filters: Filters
    seed: int
    forced: tuple[int, ...]
    prompt_length: int

    @classmethod
    def of(cls, request: Request) -> "Sampler":
        s = request.sampling
        seed = request_seed(s.seed, request.prompt_id, request.turn, request.sample)
        filters = Filters(s.temperature, s.top_k, s.top_p, s.min_p)
        return cls(filters, seed, request.forced, len(request.prompt_ids))

    @property
    def greedy(self) -> bool:
        return self.filters.temperature == 0

    def forced_token(self, position: int) -> int | None:
        """The token that a replay prescribes at an absolute position, if any."""
        index = position - self.prompt_length
        return self.forced[index] if index < len(self.forced) else None

    def draw(self, logits: Tensor, position: int) -> int:
        """The token at `position` from its logits [V]."""
        return sample_node(logits, self.filters, self.seed, position)

    def gap(self, logits: Tensor, position: int) -> float:
        """How far the drawn token leads the runner-up, noise included (inf where only one can be drawn)."""
        _, scores = perturbed_scores(logits, self.filters, self.seed, position)
        best = scores.topk(min(2, len(scores))).values
        return float(best[0] - best[1]) if len(best) == 2 else float("inf")


def draw_all(samplers: Sequence[Sampler], logits: Tensor, positions: Sequence[int]) -> list[int]:
    """The token of every row of logits [R, V], each with its own sampler and position."""
    drawn = sample_nodes(logits, [s.filters for s in samplers], [s.seed for s in samplers], positions).tolist()
    forced = [s.forced_token(at) for s, at in zip(samplers, positions, strict=True)]
    return [token if fixed is None else fixed for token, fixed in zip(drawn, forced, strict=True)]
