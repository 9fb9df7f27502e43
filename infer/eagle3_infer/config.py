"""The engine's settings: tree, sampling, pools. Imports no torch, so that `--help` answers at once."""

from dataclasses import asdict, dataclass, replace

from eagle3.errors import ConfigError

# of a tree's depth, top_k and nodes alike: a level offers top_k^2 candidates, the mask has nodes^2 bits
LARGEST = 1024
# a smaller divisor would take finite logits past the range of float32
SMALLEST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class TreeConfig:
    """Shape of the draft tree.

    Args:
        depth: levels below the root, at most LARGEST and the target's positions.
        top_k: children kept per node and nodes expanded per level, at most LARGEST; 1 makes a chain.
        nodes: draft nodes verified per round, root excluded, at most LARGEST.
    """

    depth: int = 4
    top_k: int = 4
    nodes: int = 16

    def __post_init__(self):
        for name in ("depth", "top_k"):
            if not 1 <= getattr(self, name) <= LARGEST:
                raise ConfigError(f"tree {name} is {getattr(self, name)}; it must be between 1 and {LARGEST}")
        most = min(self.candidates, LARGEST)
        if not self.depth <= self.nodes <= most:
            raise ConfigError(
                f"tree nodes is {self.nodes}; with depth {self.depth} and top_k {self.top_k} it must be between "
                f"{self.depth} (the depth) and {most} (top_k + top_k^2 * (depth - 1), at most {LARGEST})"
            )

    @property
    def candidates(self) -> int:
        """Nodes that drafting can offer."""
        return self.top_k + self.top_k**2 * (self.depth - 1)

    @classmethod
    def chain(cls, depth: int) -> "TreeConfig":
        """One child per node, `depth` levels."""
        return cls(depth=depth, top_k=1, nodes=depth)

    def check_positions(self, max_positions: int) -> None:
        """Raises ConfigError for a tree deeper than the target has positions."""
        if self.depth > max_positions:
            raise ConfigError(
                f"tree depth is {self.depth}; for this target it must be between 1 and {max_positions}, its positions"
            )

    def narrowed(self, draft_vocab_size: int) -> "TreeConfig":
        """The tree that a draft vocabulary of this size can fill: a node has no more children than that."""
        narrow = replace(self, top_k=min(self.top_k, draft_vocab_size), nodes=self.depth)
        return replace(narrow, nodes=min(self.nodes, narrow.candidates))


@dataclass(frozen=True)
class SamplingConfig:
    """How a request draws its tokens.

    Args:
        temperature: 0 = greedy, else SMALLEST_TEMPERATURE or more.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the most likely tokens that reach this mass; 1 = all.
        seed: the run's seed; noise also depends on the request's prompt id, turn and sample.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a finite number of at least "
                f"{SMALLEST_TEMPERATURE:g}"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")


@dataclass(frozen=True)
class EngineConfig:
    """What the engine allocates.

    Args:
        slots: requests that run at once.
        page_size, head_page_size: K/V rows per page of the target's and of the head's pool; None = the target's.
        max_tokens: K/V rows that one request may take; None = what the largest request needs.
        pages, head_pages: capacity of the pools; None = `slots` requests of the largest size.
    """

    slots: int = 1
    page_size: int = 64
    max_tokens: int | None = None
    pages: int | None = None
    head_page_size: int | None = None
    head_pages: int | None = None

    def __post_init__(self):
        for name in asdict(self):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
