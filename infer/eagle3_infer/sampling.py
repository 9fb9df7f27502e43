"""A request's draw of the target's token: its processors, filters and seed, and the replayed tokens before them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.errors import ConfigError
from eagle3_infer.processors import Processor, build_processors
from eagle3_infer.request import Request
from eagle3_kernels.sample_nodes import Filters, perturbed_scores, request_seed, sample_node
from eagle3_kernels.sample_nodes.filters import check_finite


@dataclass(frozen=True)
class Sampler:
    """Draws by the match rule: a function of logits, request, prefix and absolute position alone.

    Args:
        processors: change logits by the prefix; none where the request asks for none.
        logprobs: whether the emitted tokens' log-probabilities are wanted.
        prompt_id: of the request, which errors name.
    """

    filters: Filters
    seed: int
    forced: tuple[int, ...]
    prompt_length: int
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False
    prompt_id: int = 0

    @classmethod
    def of(cls, request: Request, eos_ids: Sequence[int] = ()) -> "Sampler":
        """The sampler of a request.

        Args:
            eos_ids: what `min_tokens` forbids.
        Raises:
            ConfigError: a processor that is not known to be pure.
        """
        s, prompt_length = request.sampling, len(request.prompt_ids)
        return cls(
            Filters(s.temperature, s.top_k, s.top_p, s.min_p),
            request_seed(s.seed, request.prompt_id, request.turn, request.sample),
            request.forced,
            prompt_length,
            build_processors(s, prompt_length, eos_ids, request.processors),
            request.logprobs,
            request.prompt_id,
        )

    @property
    def greedy(self) -> bool:
        return self.filters.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the largest raw logit is all that is ever asked."""
        return self.greedy and not (self.processors or self.forced or self.logprobs)

    @property
    def fusable(self) -> bool:
        """Whether the draw asks for no more than temperature, min-p and noise."""
        filters = self.filters
        narrow = filters.top_k or filters.top_p < 1
        return not (self.processors or self.forced or self.logprobs or (narrow and not self.greedy))

    def forced_token(self, position: int) -> int | None:
        """The token that a replay prescribes at an absolute position, if any."""
        index = position - self.prompt_length
        return self.forced[index] if index < len(self.forced) else None

    def process(self, logits: Tensor, prefix: Sequence[int]) -> Tensor:
        """Logits [V] after this request's processors, given all tokens before the one that is drawn.

        Raises:
            FloatingPointError: the model's own logits are not finite.
            ConfigError: the processors left no token, or made a logit that is not finite.
        """
        if not self.processors:
            return logits
        # while they have the model's dtype: afterwards all are float32
        check_finite(logits.max(), logits.dtype)
        # copies: processors of the user's may write into what they are given
        size, logits, tokens = len(logits), logits.to(torch.float32, copy=True), tuple(prefix)
        for processor in self.processors:
            logits = processor(tokens, logits)
            if not isinstance(logits, Tensor) or logits.shape != (size,):
                found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise ConfigError(
                    f"prompt {self.prompt_id}: a processor returned {found}; it must return logits [{size}]"
                )
        largest = float(logits.max())
        if not math.isfinite(largest):
            done = "left no token" if largest == -math.inf else f"made a logit of {largest}"
            raise ConfigError(
                f"prompt {self.prompt_id}: penalties, biases, bans and other processors {done} at position "
                f"{len(prefix)}; at least one token must stay, with a finite logit"
            )
        return logits

    def draw(self, processed: Tensor, position: int) -> int:
        """The token at `position` from processed logits [V]."""
        return sample_node(processed, self.filters, self.seed, position)

    def choose(self, logits: Tensor, position: int, prefix: Sequence[int]) -> int:
        """The target's token at `position` from raw logits [V]."""
        forced = self.forced_token(position)
        return self.draw(self.process(logits, prefix), position) if forced is None else forced

    def gap(self, logits: Tensor, position: int, prefix: Sequence[int]) -> float:
        """How far the drawn token leads the runner-up, noise included (inf where only one can be drawn)."""
        _, scores = perturbed_scores(self.process(logits, prefix), self.filters, self.seed, position)
        best = scores.topk(min(2, len(scores))).values
        return float(best[0] - best[1]) if len(best) == 2 else float("inf")


def log_prob(logits: Tensor, token: int) -> float:
    """Log-probability of a token by the model's raw logits [V], at temperature 1."""
    logits = logits.float()
    return float(logits[token] - torch.logsumexp(logits, 0))
