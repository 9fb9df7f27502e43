"""Who runs: requests are checked against what the target and the pools hold, then wait for a slot and its pages.

Knows rows, pages and slots, nothing of tokens' meaning or of trees but their size.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from eagle3.errors import ConfigError
from eagle3.target import Target
from eagle3_infer.config import AUTO_GRAPHS, FIXED_SHAPES, EngineConfig, TreeConfig, shown
from eagle3_infer.kv import KVPool, PoolLayout
from eagle3_infer.request import Request
from eagle3_infer.running import CANCELLED, NO_SLOT, Chunk, Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.stops import Stops


class Scheduler:
    """Slots, and one K/V pool per model: the target's and, with a tree, the head's.

    Attributes:
        pools: empty before the first `reserve`.
        widths: pages of the largest request in each pool so far.
        fixed: whether rounds may have fixed shapes.
        running: sequences that decode, in the order of their trees.
        reading: sequences whose prompts are not read to the end.
    """

    def __init__(self, target: Target, layouts: Sequence[PoolLayout], tree: TreeConfig | None, config: EngineConfig):
        self.target, self.layouts, self.tree, self.config = target, layouts, tree, config
        self.pools: list[KVPool] = []
        self.widths = [0] * len(self.layouts)
        on_gpu = target.device.type == "cuda"
        self.fixed = config.graphs == FIXED_SHAPES or (config.graphs == AUTO_GRAPHS and on_gpu)
        self.running: list[Running] = []
        self.reading: list[Running] = []
        both = (config.page_size, config.pages), (config.head_page_size or config.page_size, config.head_pages)
        self._models, self._limits = ("target", "head")[: len(layouts)], both[: len(layouts)]

    @staticmethod
    def listed(requests: Any) -> list[Request]:
        """What was given to run, as a list; raises ConfigError for what is no collection, such as a lone request."""
        if not isinstance(requests, Iterable):
            raise ConfigError(f"the engine was given {shown(requests)}; it takes a list of requests")
        return list(requests)

    def check(self, request: Any) -> None:
        """Raises ConfigError for what is no request, or one that could never run."""
        if not isinstance(request, Request):
            raise ConfigError(f"the engine was given {shown(request)} to run; each must be a Request")
        name, vocab = f"prompt {request.prompt_id}", self.target.vocab_size
        for ids, holds in ((request.prompt_ids, "holds"), (request.forced, "is forced to emit")):
            odd = [i for i in ids if not 0 <= i < vocab]
            if odd:
                raise ConfigError(f"{name} {holds} token id {odd[0]}; the target's ids are 0 .. {vocab - 1}")
        for token in (*(token for token, _ in request.sampling.logit_bias), *chain(*request.sampling.bad_words)):
            if not 0 <= token < vocab:
                raise ConfigError(f"{name} has logit_bias or bad_words of token id {token}; ids are 0 .. {vocab - 1}")
        if request.stop and self.target.tokenizer is None:
            raise ConfigError(f"{name} has stop strings, which need a tokenizer; the target has none")
        # a processor that is not known to be pure raises here, not in the middle of a run
        Sampler.of(request)
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
        # the window of depth + 1 rows that the head reads in fixed shapes ends before drafted rows could
        return [rows + self.tree.nodes, rows + self.tree.top_k * (self.tree.depth - 1)]

    def _pages(self, rows: Sequence[int]) -> list[int]:
        """Of each pool, that hold so many rows of one slot."""
        return [-(-needed // page_size) for needed, (page_size, _) in zip(rows, self._limits, strict=True)]

    def _spare_rows(self) -> list[int]:
        """K/V rows in each pool that the padding of fixed shapes writes: one tree."""
        if not self.fixed:
            return [0] * len(self.layouts)
        if self.tree is None:
            return [1]
        return [self.tree.nodes + 1, self.tree.depth + 1 + self.tree.top_k * (self.tree.depth - 1)]

    def reserve(self, requests: Sequence[Request]) -> None:
        """Pools for as many of the largest requests as can run at once; kept while they are large enough."""
        rows = [max(each) for each in zip(*map(self.rows_needed, requests), strict=True)]
        if self.config.max_tokens is not None:
            rows = [self.config.max_tokens] * len(rows)
        at_once, needed = min(self.config.slots, len(requests)), self._pages(rows)
        spare = self._pages(self._spare_rows())
        pages = [at_once * n if fixed is None else fixed for n, (_, fixed) in zip(needed, self._limits, strict=True)]
        self.widths = [max(each) for each in zip(self.widths, needed, spare, strict=True)]
        if self.pools and all(pool.pages >= p for pool, p in zip(self.pools, pages, strict=True)):
            return
        self.pools = [
            KVPool(layout.shapes, self.config.slots, p, page_size, layout.dtype, self.target.device, extra)
            for layout, p, extra, (page_size, _) in zip(self.layouts, pages, spare, self._limits, strict=True)
        ]

    def rows_at_once(self, requests: Sequence[Request]) -> int:
        """The most rows that one forward can bring: trees in all slots, and chunks of prompts."""
        tree = 1 if self.tree is None else self.tree.nodes + 1
        prompts = sum(sorted((len(r.prompt_ids) for r in requests), reverse=True)[: self.config.slots])
        return min(self.config.slots, len(requests)) * tree + min(self.config.prefill_rows, prompts)

    def admit(self, waiting: deque[tuple[int, Request]]) -> None:
        """Waiting requests take free slots while every pool has room for them, first come first served."""
        taken = {sequence.slot for sequence in (*self.running, *self.reading)}
        for slot in sorted(set(range(self.config.slots)) - taken):
            if not waiting or not self._assign(slot, waiting[0][1]):
                break
            self.reading.append(self._sequence(*waiting.popleft(), slot))
        assert self.busy or not waiting, "requests wait, and nothing runs that could make room"

    def withdraw(self, numbers: Collection[int], waiting: deque[tuple[int, Request]]) -> list[Running]:
        """End requests of these numbers that have no tree: those that wait and those whose prompts are being read."""
        entries = [entry for entry in waiting if entry[0] in numbers]
        for entry in entries:
            waiting.remove(entry)
        read = [sequence for sequence in self.reading if sequence.number in numbers]
        self.release(sequence.slot for sequence in read)
        self.reading = [sequence for sequence in self.reading if sequence.number not in numbers]
        gone = [*read, *(self._sequence(*entry, NO_SLOT) for entry in entries)]
        for sequence in gone:
            sequence.finish_reason = CANCELLED
        return gone

    def _sequence(self, number: int, request: Request, slot: int) -> Running:
        eos = self.target.eos_ids if request.eos_ids is None else request.eos_ids
        stops = Stops(eos, request.stop, request.max_new_tokens, self.target.tokenizer)
        return Running(request, number, slot, Sampler.of(request, eos), stops, list(request.prompt_ids))

    def chunks(self) -> list[Chunk]:
        """What this round reads of the prompts, first come first served."""
        chunks, left = [], self.config.prefill_rows
        for sequence in self.reading:
            rows = min(left, sequence.prompt_length - sequence.length)
            if rows:
                chunks.append(Chunk(sequence, sequence.length, rows))
            left -= rows
        return chunks

    @property
    def busy(self) -> bool:
        return bool(self.running or self.reading)

    def advance(self) -> None:
        """Prompts that were read to the end run from now on; what has finished is no longer listed."""
        read = [sequence for sequence in self.reading if sequence.length == sequence.prompt_length]
        self.running = [sequence for sequence in (*self.running, *read) if not sequence.finish_reason]
        self.reading = [s for s in self.reading if s.length < s.prompt_length and not s.finish_reason]

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
        self.running, self.reading = [], []
