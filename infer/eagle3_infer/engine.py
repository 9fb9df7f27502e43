"""The speculative engine: requests join, rounds verify and draft, requests leave. One loop for plain, chain and tree.

A round is: verify -> accept -> relocate -> first draft step over what was committed -> levels -> tree. Plain decoding
is the same round with bare roots; a chain is a tree with one child per node.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from eagle3.errors import ConfigError, Eagle3Error
from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.adaptive import Controller
from eagle3_infer.config import AUTO_GRAPHS, EngineConfig, RuleConfig, TreeConfig
from eagle3_infer.cost_probe import measure_costs
from eagle3_infer.costs import largest_rows
from eagle3_infer.drafter import Draft, Drafter
from eagle3_infer.fixed import FixedRounds
from eagle3_infer.graphs import Backend, CudaBackend
from eagle3_infer.kv import KVPool, PoolLayout, probe_shapes
from eagle3_infer.memory import free_bytes
from eagle3_infer.metrics import RequestMetrics, StageClock
from eagle3_infer.proposals import edge_kind
from eagle3_infer.request import Request, Result, Update
from eagle3_infer.running import CANCELLED, Chunk, Running
from eagle3_infer.sampling import Sampler
from eagle3_infer.scheduler import Scheduler
from eagle3_infer.verifier import Accepted, Forward, Verifier, Walked
from eagle3_kernels.relocate_kv import relocate_kv

__all__ = ["Engine", "Request", "Result", "Update"]


class Engine:
    """Generates for many requests on a few slots.

    Args:
        head, tree: both, or neither for plain decoding.
        rule: how drafts are drawn and accepted; None = match, whose output depends on target and noise alone: plain
            decoding's very tokens.
    Raises:
        ConfigError: a head without a tree or the reverse, or a tree deeper than the target has positions.
        CheckpointError: a head for another target.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        tree: TreeConfig | None = None,
        config: EngineConfig | None = None,
        rule: RuleConfig | None = None,
    ):
        if (head is None) != (tree is None):
            given, lacking = ("tree", "head") if head is None else ("head", "tree")
            raise ConfigError(f"the engine has a {given} but no {lacking}; give both, or neither for plain decoding")
        config, rule = config or EngineConfig(), rule or RuleConfig()
        self.target = target
        self.drafter = None
        if head is not None and tree is not None:
            tree.check_positions(target.max_positions)
            head.check_target(target)
            # a small chunk of prompts must not cut what a round of all slots commits
            most_rows = max(config.prefill_rows, config.slots * (tree.depth + 1))
            self.drafter = Drafter(target, head, tree, rule, most_rows)
            tree = self.drafter.tree
        self.verifier = Verifier(target, self.drafter.head.capture_layers if self.drafter else (), rule)
        self.scheduler = Scheduler(target, self._layouts(), tree, config)
        self.draft = Draft.bare([], target.device)
        # what sizes the trees, where they adapt; made by the first `prepare`, it keeps what it learns from run to run
        self.controller: Controller | None = None
        # numbers of the run's requests that are not done, and those of them to be ended
        self._open: set[int] = set()
        self._cancelled: set[int] = set()
        self._in_use = threading.Lock()
        # steps whose seconds are not booked yet
        self._late: list[tuple[StageClock, list[RequestMetrics]]] = []
        # rounds of fixed shapes, where the configuration and the device want them
        self.fixed: FixedRounds | None = None

    @torch.inference_mode()
    def _layouts(self) -> list[PoolLayout]:
        one = torch.zeros(1, dtype=torch.int64, device=self.target.device)
        layouts = [probe_shapes(lambda ctx: self.target.hidden(one, one, ctx))]
        if self.drafter is not None:
            head = self.drafter.head
            embeds = head.embed(one, self.target)
            features = torch.zeros(1, head.feature_size, device=self.target.device)
            layouts.append(probe_shapes(lambda ctx: head.step(head.start(features), embeds, one, ctx)))
        return layouts

    @property
    def pools(self) -> list[KVPool]:
        """The target's pool and, with a drafter, the head's."""
        return self.scheduler.pools

    @property
    def running(self) -> list[Running]:
        return self.scheduler.running

    @torch.inference_mode()
    def prepare(self, requests: Sequence[Request]) -> None:
        """Check the requests and allocate what they need, where it is not there yet; `generate` does so itself.

        Raises:
            ConfigError: a request that the target or the pools cannot hold.
            RuntimeError: this engine runs already.
        """
        with self._alone():
            self._prepare(self.scheduler.listed(requests))

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.scheduler.check(request)
        if requests:
            self.scheduler.reserve(requests)
            self.verifier.reserve(self.scheduler.rows_at_once(requests))
            if self.drafter is not None and self.drafter.tree.adaptive:
                self._prepare_controller(self.drafter)
            if self.scheduler.fixed:
                samplers = [Sampler.of(request) for request in requests]
                self._prepare_fixed().prepare(samplers, self._most_rows)

    def _prepare_controller(self, drafter: Drafter) -> None:
        """Costs are measured once; what memory allows is asked again, as the pools may have grown."""
        slots, free = self.scheduler.config.slots, free_bytes(self.target.device)
        most = slots * (drafter.tree.nodes + 1)
        if free is not None:
            # logits as they come and in fp32, and the feature
            row = self.target.vocab_size * (self.target.dtype.itemsize + 4) + drafter.head.feature_size * 4
            most = min(most, largest_rows(free, row))
        if self.controller is None:
            cost = measure_costs(drafter, self.scheduler.layouts, slots, most)
            self.controller = Controller(drafter.tree, cost, max_rows=most)
        self.controller.max_rows = most

    def _prepare_fixed(self) -> FixedRounds:
        """Fixed rounds hold on to the pools: other pools, or larger requests, ask for others."""
        pools, widths = self.scheduler.pools, self.scheduler.widths
        if self.fixed is None or self.fixed.pools is not pools or self.fixed.widths != widths:
            # the old ones' graphs give back their memory first
            self.fixed = None
            self.fixed = FixedRounds(self.target, self.drafter, self.verifier.rule, pools, widths, self._graphs())
        return self.fixed

    @property
    def _most_rows(self) -> int | None:
        """That one forward may verify, where memory bounds adaptive trees."""
        return None if self.controller is None else self.controller.max_rows

    def _graphs(self) -> Backend | None:
        """What captures fixed rounds."""
        return CudaBackend(self.target.device) if self.scheduler.config.graphs == AUTO_GRAPHS else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Slots and pools are one run's: a second one, from `on_result` or another thread, would wipe it."""
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this engine already runs requests; wait until generate has returned (it may not be called from "
                "on_result), or use another engine"
            )
        try:
            yield
        finally:
            self._in_use.release()

    def generate_one(self, request: Request) -> Result:
        return self.generate([request])[0]

    def generate(
        self, requests: Iterable[Request], on_result: Callable[[int, Result], None] | None = None
    ) -> list[Result]:
        """Run all requests, as many at once as there are slots; results come in the order of the requests.

        An error in one of them (a processor that raises, logits that are not finite) ends the run of all.

        Args:
            on_result: called with (index, result) as each request finishes; may cancel others, not run this engine.
        Raises:
            ConfigError: a request that the target or the pools cannot hold.
            Eagle3Error: logits that are not finite.
            RuntimeError: this engine runs already.
        """
        results = {}
        # closed at once when on_result raises: an abandoned iterator would hold the engine
        with closing(self.stream(requests)) as updates:
            for number, _, result in updates:
                if result is not None:
                    results[number] = result
                    if on_result is not None:
                        on_result(number, result)
        return [results[number] for number in sorted(results)]

    @torch.inference_mode()
    def stream(self, requests: Iterable[Request]) -> Generator[Update, None, None]:
        """Run all requests and tell after each round what it emitted; closing the iterator ends the run.

        Raises:
            As `generate` does.
        """
        requests = self.scheduler.listed(requests)
        with self._alone():
            waiting = deque(enumerate(requests))
            self._open, self._cancelled = set(range(len(requests))), set()
            try:
                self._prepare(requests)
                while waiting or self.scheduler.busy:
                    for sequence in self.step(waiting):
                        result = sequence.result() if sequence.finish_reason else None
                        if result is not None:
                            self._open.discard(sequence.number)
                        yield Update(sequence.number, sequence.take(), result)
            except FloatingPointError as error:
                raise Eagle3Error(str(error)) from error
            finally:
                self.scheduler.reset()
                self.draft = Draft.bare([], self.target.device)
                self._open = set()
                self._late.clear()

    def cancel(self, number: int) -> None:
        """End request `number` of the run that is going with its next round; it keeps what it has emitted.

        May be called by the consumer of `stream`, from `on_result` or from another thread, from when `generate` or the
        first update of `stream` was asked for; no effect on a request that is done, nor on a run that comes later.
        """
        if number in self._open:
            self._cancelled.add(number)

    def step(self, waiting: deque[tuple[int, Request]]) -> list[Running]:
        """One round for all that run and read; returns those that emitted or ended."""
        clock = StageClock(self.target.device)
        gone = self.scheduler.withdraw(self._cancelled, waiting)
        self.scheduler.admit(waiting)
        everyone = [*self.running, *self.scheduler.reading]
        if not everyone:
            return gone
        chunks = self.scheduler.chunks()
        fixed = None if chunks else self._fixed_round()
        accepted = self._verify(clock, chunks) if fixed is None else self._verify_fixed(clock, fixed)
        if fixed is not None and fixed.drafts(self.running):
            self._draft_fixed(clock, fixed)
        else:
            self._draft(clock)
        self.scheduler.release(sequence.slot for sequence in everyone if sequence.finish_reason)
        seconds = self._time(clock, everyone)
        if self.controller is not None and seconds is not None:
            self._book(self.controller, accepted, seconds, prompts=bool(chunks))
        return [*gone, *(sequence for sequence in everyone if sequence.finish_reason or sequence.untold)]

    def _time(self, clock: StageClock, everyone: list[Running]) -> dict[str, float] | None:
        """Book a step's seconds; a step's in which all go on is booked with the next one, which has waited for it."""
        clock.end()
        for late, metrics in self._late:
            late.rest(metrics)
        self._late.clear()
        metrics = [sequence.metrics for sequence in everyone]
        if self.controller is None and not any(sequence.finish_reason for sequence in everyone):
            self._late.append((clock, metrics))
            return None
        return clock.rest(metrics)

    def _book(self, controller: Controller, accepted: Accepted, seconds: dict[str, float], prompts: bool) -> None:
        # without a prompt in the forward, prefill is the head's way back over one that was read before
        verify, draft = seconds["verify"], seconds["draft"] + seconds["prefill"]
        rest = sum(seconds.values()) - verify - draft
        controller.finished(sum(map(len, accepted.runs)), verify, draft, rest, prompts)

    # verify -> accept -> relocate

    def _fixed_round(self) -> FixedRounds | None:
        """What verifies the trees in fixed shapes, where they fit."""
        fits = self.fixed is not None and self.fixed.verifies(self.draft, self.running, self._most_rows)
        return self.fixed if fits else None

    def _verify(self, clock: StageClock, chunks: list[Chunk]) -> Walked:
        """Run the target, emit what it accepts, keep the accepted rows; the sequences that go on are then running."""
        parents = self.draft.tree.used_parents()
        counts = [len(rows) for rows in parents]
        old, new = [s.metrics for s in self.running], [chunk.sequence.metrics for chunk in chunks]
        with clock.stage(("verify", old, sum(counts)), ("prefill", new, sum(chunk.rows for chunk in chunks))):
            forward = self.verifier.forward(self.pools[0], self.draft.tree, counts, self.running, chunks)
        with clock.stage(("accept", old, len(old)), ("prefill", new, len(new))):
            accepted = self.verifier.accept(forward, self.draft, self.running)
            self._learn(accepted, parents)
            self._emit(accepted, parents)
            self._emit_first(forward, chunks)
        with clock.stage(("relocate", old, 1)):
            self._relocate(accepted)
        self._commit(forward, accepted, chunks)
        return accepted

    def _verify_fixed(self, clock: StageClock, fixed: FixedRounds) -> Accepted:
        """The same for a round without prompts, in fixed shapes; the head's inputs stay where it finds them."""
        metrics = [sequence.metrics for sequence in self.running]
        with clock.stage(("verify", metrics, 1)):
            accepted, parents = fixed.verify(self.draft, self.running)
        with clock.stage(("accept", metrics, 1)):
            self._learn(accepted, parents)
            self._emit(accepted, parents)
        in_place = self.drafter is None or fixed.drafts(self.running)
        kept = zip(self.running, accepted.features, strict=True)
        self._keep(kept, None if in_place else fixed.buffers.features)
        return accepted

    def _learn(self, accepted: Accepted, parents: list[list[int]]) -> None:
        """Tell the controller which drafts were accepted, with which edge scores."""
        if self.controller is None or self.draft.tree.edges is None:
            return
        edges = self.draft.tree.edges.tolist()
        for sequence, rows, scores, path in zip(self.running, parents, edges, accepted.paths, strict=True):
            self.controller.walked(rows, scores, path, edge_kind(self.verifier.rule, sequence.sampler))

    def _emit(self, accepted: Accepted, parents: list[list[int]]) -> None:
        for sequence, rows, run, logprobs in zip(self.running, parents, accepted.runs, accepted.logprobs, strict=True):
            if sequence.number in self._cancelled:
                sequence.finish_reason = CANCELLED
                continue
            kept = sequence.emit(run, logprobs)
            sequence.metrics.count_round(rows, len(run) - 1, kept)

    def _emit_first(self, forward: Forward, chunks: list[Chunk]) -> None:
        """The tokens after the prompts that end in this round."""
        sequences = [chunk.sequence for chunk in chunks if chunk.last]
        for sequence, (token, logprobs) in zip(sequences, self.verifier.first_tokens(forward, sequences), strict=True):
            sequence.emit([token], logprobs)

    def _relocate(self, accepted: Walked) -> None:
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

    def _commit(self, forward: Forward, accepted: Walked, chunks: list[Chunk]) -> None:
        """Commit what was accepted, and the rows of prompts."""
        starts = forward.starts[len(self.running) :]
        kept = [
            *zip(self.running, accepted.features, strict=True),
            *((c.sequence, range(start, start + c.rows)) for c, start in zip(chunks, starts, strict=True)),
        ]
        self._keep(kept, None if self.drafter is None else self.verifier.capture.features)

    def _keep(self, kept: Iterable[tuple[Running, Sequence[int]]], features: Tensor | None) -> None:
        """Count the rows of those that go on as committed; prompts that were read now run.

        Args:
            features: to be kept for the head, by these rows; None = it has no need of that.
        """
        kept = [(sequence, rows) for sequence, rows in kept if not sequence.finish_reason]
        for sequence, rows in kept:
            sequence.length += len(rows)
        if features is not None and kept:
            rows = torch.tensor([row for _, rows in kept for row in rows], device=self.target.device)
            parts = features[rows].split([len(rows) for _, rows in kept])
            for (sequence, _), part in zip(kept, parts, strict=True):
                sequence.backlog.append(part)
        self.scheduler.advance()

    # first step -> levels -> tree

    def _speculates(self, everyone: list[Running], useful: list[int]) -> bool:
        """Whether the head reads and drafts in this round; what it does not read stays in the backlogs."""
        if self.controller is None:
            return True
        return bool(useful) and self.controller.speculate(useful, sum(sequence.unread for sequence in everyone))

    def _draft_fixed(self, clock: StageClock, fixed: FixedRounds) -> None:
        with clock.stage(("draft", [sequence.metrics for sequence in self.running], 1)):
            self.draft = fixed.draft(self.running)

    def _draft(self, clock: StageClock) -> None:
        roots = [sequence.root for sequence in self.running]
        useful = [sequence.useful_levels for sequence in self.running]
        self.draft = Draft.bare(roots, self.target.device)
        everyone = [s for s in (*self.running, *self.scheduler.reading) if s.unread]
        if self.drafter is None or not everyone:
            return
        if not self._speculates(everyone, useful):
            with clock.stage(("draft", [s.metrics for s in everyone], 1)):
                self.drafter.put_off(self.pools[1], everyone)
            return
        # a joining request's prompt goes through the head too: that is its prefill
        groups = [("draft", [s for s in everyone if not s.fresh]), ("prefill", [s for s in everyone if s.fresh])]
        shares = [(stage, [s.metrics for s in group], sum(s.unread for s in group)) for stage, group in groups]
        with clock.stage(*shares):
            h = self.drafter.read(self.pools[1], everyone)
        if not roots:
            return
        metrics = [sequence.metrics for sequence in self.running]
        with clock.stage(("draft", metrics, 1)):
            drafted = self.drafter.levels(self.pools[1], self.running, h[: len(roots)], useful, self.controller)
        with clock.stage(("tree_build", metrics, 1)):
            self.draft = self.drafter.build(roots, drafted)
