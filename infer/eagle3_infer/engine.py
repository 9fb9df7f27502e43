"""The speculative engine: requests join, rounds verify and draft, requests leave. One loop for plain, chain and tree.

A round is: verify -> accept -> relocate -> first draft step over what was committed -> levels -> tree. Plain decoding
is the same round with bare roots; a chain is a tree with one child per node.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from eagle3.errors import ConfigError, Eagle3Error
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, TreeConfig
from eagle3_infer.drafter import Committed, Drafter
from eagle3_infer.kv import KVPool, KVShape, probe_shapes
from eagle3_infer.metrics import StageClock
from eagle3_infer.request import Request, Result
from eagle3_infer.running import Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.stops import Stops
from eagle3_infer.verifier import Accepted, Forward, Verifier
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.structures import FirstStep, Tree

__all__ = ["Engine", "Request", "Result"]


class Engine:
    """Generates for many requests on a few slots, with output that depends on target and noise alone.

    Args:
        head, tree: None = plain decoding.
    """

    def __init__(
        self,
        target: Target,
        head: Eagle3Head | None = None,
        tree: TreeConfig | None = None,
        config: EngineConfig | None = None,
    ):
        self.target, self.config = target, config or EngineConfig()
        self.drafter = None
        if head is not None and tree is not None:
            head.check_target(target)
            self.drafter = Drafter(target, head, tree)
        self.verifier = Verifier(target, head.capture_layers if head is not None and self.drafter else ())
        self.pools: list[KVPool] = []
        self.running: list[Running] = []
        self.trees = self._bare_trees()
        self._shapes: list[tuple[list[KVShape], torch.dtype]] = []

    def generate_one(self, request: Request) -> Result:
        return self.generate([request])[0]

    @torch.inference_mode()
    def generate(
        self, requests: Iterable[Request], on_result: Callable[[int, Result], None] | None = None
    ) -> list[Result]:
        """Run all requests, as many at once as there are slots; results come in the order of the requests.

        Args:
            on_result: called with (index, result) as each request finishes.
        Raises:
            ConfigError: a request that the target or the pools cannot hold.
            Eagle3Error: logits that are not finite.
        """
        requests = list(requests)
        for request in requests:
            self._check(request)
        self._allocate(requests)
        waiting, results = deque(enumerate(requests)), {}
        try:
            while waiting or self.running:
                for done in self.step(waiting):
                    results[done.number] = done.result()
                    if on_result is not None:
                        on_result(done.number, results[done.number])
        except FloatingPointError as error:
            raise Eagle3Error(str(error)) from error
        finally:
            self._reset()
        return [results[number] for number in range(len(requests))]

    def step(self, waiting: deque[tuple[int, Request]]) -> list[Running]:
        """One round for all running requests and the first one for those that join; returns those that are done."""
        clock = StageClock()
        joined = self._admit(waiting)
        everyone = [*self.running, *joined]
        committed = self._verify(clock, joined)
        done = [sequence for sequence in everyone if sequence.finish_reason]
        self._draft(clock, committed)
        self._release(sequence.slot for sequence in done)
        clock.rest([sequence.metrics for sequence in everyone])
        return done

    # joining and leaving

    def _check(self, request: Request) -> None:
        name, vocab = f"prompt {request.prompt_id}", self.target.vocab_size
        odd = [i for i in request.prompt_ids if not 0 <= i < vocab]
        if odd:
            raise ConfigError(f"{name} holds token id {odd[0]}; the target's ids are 0 .. {vocab - 1}")
        if request.stop and self.target.tokenizer is None:
            raise ConfigError(f"{name} has stop strings, which need a tokenizer; the target has none")
        # the last token is emitted, never run
        rows = len(request.prompt_ids) + request.max_new_tokens - 1
        if rows > self.target.max_positions:
            raise ConfigError(
                f"{name}: {len(request.prompt_ids)} prompt tokens and max_new_tokens {request.max_new_tokens} need "
                f"{rows} positions; the target has {self.target.max_positions}"
            )
        wanted = max(self._rows_needed(request))
        if self.config.max_tokens is not None and wanted > self.config.max_tokens:
            raise ConfigError(
                f"{name} needs {wanted} K/V rows (prompt, output and one tree); "
                f"max_tokens allows {self.config.max_tokens}"
            )

    def _rows_needed(self, request: Request) -> list[int]:
        """K/V rows of one request in each pool, its fresh rows included."""
        rows = len(request.prompt_ids) + request.max_new_tokens
        if self.drafter is None:
            return [rows]
        tree = self.drafter.tree
        return [rows + tree.nodes, rows + tree.top_k * (tree.depth - 1)]

    def _allocate(self, requests: Sequence[Request]) -> None:
        """Pools for as many of the largest requests as can run at once, kept while they are large enough."""
        if not requests:
            return
        page = self.config.page_size
        rows = [max(each) for each in zip(*map(self._rows_needed, requests), strict=True)]
        if self.config.max_tokens is not None:
            rows = [self.config.max_tokens] * len(rows)
        pages = [min(self.config.slots, len(requests)) * -(-r // page) for r in rows]
        if self.pools and all(pool.pages >= p for pool, p in zip(self.pools, pages, strict=True)):
            return
        self.pools = [
            KVPool(shapes, self.config.slots, p, page, dtype, self.target.device)
            for (shapes, dtype), p in zip(self._pool_shapes(), pages, strict=True)
        ]

    def _pool_shapes(self) -> list[tuple[list[KVShape], torch.dtype]]:
        if not self._shapes:
            one = torch.zeros(1, dtype=torch.int64, device=self.target.device)
            self._shapes.append(probe_shapes(lambda ctx: self.target.hidden(one, one, ctx)))
            if self.drafter is not None:
                head = self.drafter.head
                embeds = head.embed(one, self.target)
                features = torch.zeros(1, head.config.feature_size, device=self.target.device)
                self._shapes.append(probe_shapes(lambda ctx: head.step(head.start(features), embeds, one, ctx)))
        return self._shapes

    def _admit(self, waiting: deque[tuple[int, Request]]) -> list[Running]:
        """Waiting requests take free slots while both pools have room for them."""
        joined: list[Running] = []
        free = sorted(set(range(self.config.slots)) - {s.slot for s in self.running})
        for slot in free:
            if not waiting or not self._assign(slot, waiting[0][1]):
                break
            number, request = waiting.popleft()
            eos = self.target.eos_ids if request.eos_ids is None else request.eos_ids
            stops = Stops(eos, request.stop, request.max_new_tokens, self.target.tokenizer)
            joined.append(Running(request, number, slot, Sampler.of(request), stops, list(request.prompt_ids)))
        return joined

    def _assign(self, slot: int, request: Request) -> bool:
        if all(pool.assign(slot, rows) for pool, rows in zip(self.pools, self._rows_needed(request), strict=True)):
            return True
        for pool in self.pools:
            pool.release(slot)
        return False

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for pool in self.pools:
                pool.release(slot)

    def _reset(self) -> None:
        """Nothing runs, whatever interrupted the last step."""
        self._release(range(self.config.slots))
        self.running = []
        self.trees = self._bare_trees()

    def _bare_trees(self) -> Tree:
        roots = [sequence.root for sequence in self.running]
        return Tree.bare(torch.tensor(roots, dtype=torch.int64, device=self.target.device))

    # verify -> accept -> relocate

    def _verify(self, clock: StageClock, joined: list[Running]) -> Committed | None:
        """Run the target, emit what it accepts, keep the accepted rows; the sequences that go on are then running."""
        running, parents = self.running, self.trees.used_parents()
        counts = [len(rows) for rows in parents]
        old, new = ([s.metrics for s in group] for group in (running, joined))
        with clock.stage(("verify", old, sum(counts)), ("prefill", new, sum(s.prompt_length for s in joined))):
            forward = self.verifier.forward(self.pools[0], self.trees, counts, running, joined)
        with clock.stage(("accept", old, len(old)), ("prefill", new, len(new))):
            accepted = self.verifier.accept(forward, self.trees, running)
            self._emit(accepted, parents, joined, self.verifier.first_tokens(forward, joined))
        with clock.stage(("relocate", old, 1)):
            self._relocate(accepted)
        return self._commit(forward, accepted, joined)

    def _emit(self, accepted: Accepted, parents: list[list[int]], joined: list[Running], firsts: list[int]) -> None:
        for sequence, rows, run in zip(self.running, parents, accepted.runs, strict=True):
            kept = sequence.emit(run)
            sequence.metrics.count_round(rows, len(run) - 1, kept)
        for sequence, token in zip(joined, firsts, strict=True):
            sequence.emit([token])

    def _relocate(self, accepted: Accepted) -> None:
        """Close the gaps between accepted rows; most paths have none."""
        moving = [
            b
            for b, (sequence, path) in enumerate(zip(self.running, accepted.paths, strict=True))
            if not sequence.finish_reason and path[-1] != len(path) - 1
        ]
        if moving:
            pool, sequences = self.pools[0], [self.running[b] for b in moving]
            lens = torch.tensor([s.length for s in sequences], device=self.target.device)
            relocate_kv(pool.tensors, pool.table[[s.slot for s in sequences]], lens, accepted.walk.path[moving])

    def _commit(self, forward: Forward, accepted: Accepted, joined: list[Running]) -> Committed | None:
        """Count the kept rows as committed, and collect the first draft step's inputs of those that go on."""
        staying = [b for b, sequence in enumerate(self.running) if not sequence.finish_reason]
        joining = [i for i, sequence in enumerate(joined) if not sequence.finish_reason]
        sequences = [*(self.running[b] for b in staying), *(joined[i] for i in joining)]
        counts = [*(len(accepted.paths[b]) for b in staying), *(joined[i].prompt_length for i in joining)]
        committed = None
        if sequences and self.drafter is not None:
            starts = forward.starts[len(self.running) :]
            rows, tokens = _first_rows(accepted.step, staying)
            for i in joining:
                rows.append(torch.arange(starts[i], starts[i] + joined[i].prompt_length, device=self.target.device))
                tokens.append(torch.tensor(joined[i].tokens[1:], device=self.target.device))
            committed = Committed(
                features=self.verifier.capture.features[torch.cat(rows)],
                tokens=torch.cat(tokens),
                counts=counts,
                slots=[s.slot for s in sequences],
                before=[s.length for s in sequences],
                levels=[s.useful_levels for s in sequences],
            )
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
        self.running = sequences
        return committed

    # first step -> levels -> tree

    def _draft(self, clock: StageClock, committed: Committed | None) -> None:
        if committed is None or self.drafter is None:
            self.trees = self._bare_trees()
            return
        metrics = [sequence.metrics for sequence in self.running]
        with clock.stage(("draft", metrics, 1)):
            self.trees = self.drafter.draft(self.pools[1], committed, clock.stage(("tree_build", metrics, 1)))


def _first_rows(step: FirstStep, slots: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Feature rows and next tokens of these slots' accepted paths: the real rows of the fixed window."""
    if not slots:
        return [], []
    real = torch.arange(step.rows.shape[1], device=step.rows.device) < step.count[slots, None]
    return [step.rows[slots][real]], [step.tokens[slots][real].long()]
