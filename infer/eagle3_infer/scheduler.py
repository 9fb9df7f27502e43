"""Who runs: requests are checked against what the target and the pools hold, then wait for a slot and its pages.

Knows rows, pages and slots, nothing of tokens' meaning or of trees but their size.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, TreeConfig
from eagle3_infer.kv import KVPool, PoolLayout
from eagle3_infer.request import Request
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.stops import Stops


class Scheduler:
    """Slots, and one K/V pool per model: the target's and, with a tree, the head's.

    Attributes:
        pools: empty before the first `reserve`.
        running: sequences in slots, in the order of their trees.
    """

    def __init__(self, target: Target, layouts: Sequence[PoolLayout], tree: TreeConfig | None, config: EngineConfig):
        self.target, self.layouts, self.tree, self.config = target, layouts, tree, config
        self.pools: list[KVPool] = []
        self.running: list[Running] = []
        both = (config.page_size, config.pages), (config.head_page_size or config.page_size, config.head_pages)
        self._models, self._limits = ("target", "head")[: len(layouts)], both[: len(layouts)]

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that could never run."""
        name, vocab = f"prompt {request.prompt_id}", self.target.vocab_size
        for ids, holds in ((request.prompt_ids, "holds"), (request.forced, "is forced to emit")):
            odd = [i for i in ids if not 0 <= i < vocab]
            if odd:
                raise ConfigError(f"{name} {holds} token id {odd[0]}; the target's ids are 0 .. {vocab - 1}")
        if request.stop and self.target.tokenizer is None:
            raise ConfigError(f"{name} has stop strings, which need a tokenizer; the target has none")
        # the last token is emitted, never run
        rows = len(request.prompt_ids) + request.max_new_tokens - 1
        if rows > self.target.max_positions:
            raise ConfigError(
                f"{name}: {len(request.prompt_ids)} prompt tokens and max_new_tokens {request.max_new_tokens} need "
                f"{rows} positions; the target has {self.target.max_positions}"
            )
        wanted = self.rows_needed(request)
        if self.config.max_tokens is not None and max(wanted) > self.config.max_tokens:
            raise ConfigError(
                f"{name} needs {max(wanted)} K/V rows (prompt, output and one tree); "
                f"max_tokens allows {self.config.max_tokens}"
            )
        for which, needed, (page_size, pages) in zip(self._models, wanted, self._limits, strict=True):
            if pages is not None and needed > pages * page_size:
                raise ConfigError(
                    f"{name} needs {needed} K/V rows (prompt, output and one tree); the {which}'s pool has "
                    f"{pages} pages of {page_size}"
                )

    def rows_needed(self, request: Request) -> list[int]:
        """K/V rows of one request in each pool, its fresh rows included."""
        rows = len(request.prompt_ids) + request.max_new_tokens
        if self.tree is None:
            return [rows]
        return [rows + self.tree.nodes, rows + self.tree.top_k * (self.tree.depth - 1)]

    def reserve(self, requests: Sequence[Request]) -> None:
        """Pools for as many of the largest requests as can run at once; kept while they are large enough."""
        rows = [max(each) for each in zip(*map(self.rows_needed, requests), strict=True)]
        if self.config.max_tokens is not None:
            rows = [self.config.max_tokens] * len(rows)
        at_once = min(self.config.slots, len(requests))
        pages = [
            at_once * -(-needed // page_size) if fixed is None else fixed
            for needed, (page_size, fixed) in zip(rows, self._limits, strict=True)
        ]
        if self.pools and all(pool.pages >= p for pool, p in zip(self.pools, pages, strict=True)):
            return
        self.pools = [
            KVPool(layout.shapes, self.config.slots, p, page_size, layout.dtype, self.target.device)
            for layout, p, (page_size, _) in zip(self.layouts, pages, self._limits, strict=True)
        ]

    def rows_at_once(self, requests: Sequence[Request]) -> int:
        """The most rows that one forward can bring: every slot a prompt, or a tree."""
        tree = 1 if self.tree is None else self.tree.nodes + 1
        largest = max(tree, *(len(request.prompt_ids) for request in requests))
        return min(self.config.slots, len(requests)) * largest

    def admit(self, waiting: deque[tuple[int, Request]]) -> list[Running]:
        """Waiting requests take free slots while every pool has room for them, first come first served."""
        joined: list[Running] = []
        for slot in sorted(set(range(self.config.slots)) - {s.slot for s in self.running}):
            if not waiting or not self._assign(slot, waiting[0][1]):
                break
            number, request = waiting.popleft()
            eos = self.target.eos_ids if request.eos_ids is None else request.eos_ids
            stops = Stops(eos, request.stop, request.max_new_tokens, self.target.tokenizer)
            joined.append(Running(request, number, slot, Sampler.of(request), stops, list(request.prompt_ids)))
        assert self.running or joined or not waiting, "requests wait, and nothing runs that could make room"
        return joined

    def _assign(self, slot: int, request: Request) -> bool:
        if all(pool.assign(slot, rows) for pool, rows in zip(self.pools, self.rows_needed(request), strict=True)):
            return True
        self.release([slot])
        return False

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for pool in self.pools:
                pool.release(slot)

    def reset(self) -> None:
        """Nothing runs, whatever interrupted the last step."""
        self.release(range(self.config.slots))
        self.running = []
