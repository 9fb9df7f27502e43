"""The speculative engine: requests join, rounds verify and draft, requests leave. One loop for plain, chain and tree.

A round is: verify -> accept -> relocate -> first draft step over what was committed -> levels -> tree. Plain decoding
is the same round with bare roots; a chain is a tree with one child per node.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eagle3.errors import ConfigError, Eagle3Error
from eagle3.heads.protocol import DraftHead
from eagle3.target import Target
from eagle3_infer.config import EngineConfig, TreeConfig
from eagle3_infer.drafter import Committed, Drafter
from eagle3_infer.kv import KVPool, PoolLayout, probe_shapes
from eagle3_infer.metrics import StageClock
from eagle3_infer.request import Request, Result
from eagle3_infer.running import Running
from eagle3_infer.scheduler import Scheduler
from eagle3_infer.verifier import Accepted, Forward, Verifier
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.structures import FirstStep, Tree

__all__ = ["Engine", "Request", "Result"]


class Engine:
    """Generates for many requests on a few slots, with output that depends on target and noise alone.

    Args:
        head, tree: both, or neither for plain decoding.
    Raises:
        ConfigError: one without the other, or a tree deeper than the target has positions.
        CheckpointError: a head for another target.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead | None = None,
        tree: TreeConfig | None = None,
        config: EngineConfig | None = None,
    ):
        if (head is None) != (tree is None):
            given, lacking = ("tree", "head") if head is None else ("head", "tree")
            raise ConfigError(f"the engine has a {given} but no {lacking}; give both, or neither for plain decoding")
        self.target = target
        self.drafter = None
        if head is not None and tree is not None:
            tree.check_positions(target.max_positions)
            head.check_target(target)
            self.drafter = Drafter(target, head, tree)
            tree = self.drafter.tree
        self.verifier = Verifier(target, self.drafter.head.capture_layers if self.drafter else ())
        self.scheduler = Scheduler(target, self._layouts(), tree, config or EngineConfig())
        self.trees = self._bare_trees()
        self._in_use = threading.Lock()

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
            self._prepare(requests)

    def _prepare(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.scheduler.check(request)
        if requests:
            self.scheduler.reserve(requests)
            self.verifier.reserve(self.scheduler.rows_at_once(requests))

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

    @torch.inference_mode()
    def generate(
        self, requests: Iterable[Request], on_result: Callable[[int, Result], None] | None = None
    ) -> list[Result]:
        """Run all requests, as many at once as there are slots; results come in the order of the requests.

        Args:
            on_result: called with (index, result) as each request finishes; may not use this engine.
        Raises:
            ConfigError: a request that the target or the pools cannot hold.
            Eagle3Error: logits that are not finite.
            RuntimeError: this engine runs already.
        """
        requests = list(requests)
        with self._alone():
            return self._run(requests, on_result)

    def _run(self, requests: list[Request], on_result: Callable[[int, Result], None] | None) -> list[Result]:
        self._prepare(requests)
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
            self.scheduler.reset()
            self.trees = self._bare_trees()
        return [results[number] for number in range(len(requests))]

    def step(self, waiting: deque[tuple[int, Request]]) -> list[Running]:
        """One round for all running requests and the first one for those that join; returns those that are done."""
        clock = StageClock(self.target.device)
        joined = self.scheduler.admit(waiting)
        everyone = [*self.running, *joined]
        committed = self._verify(clock, joined)
        done = [sequence for sequence in everyone if sequence.finish_reason]
        self._draft(clock, committed, joined)
        self.scheduler.release(sequence.slot for sequence in done)
        clock.rest([sequence.metrics for sequence in everyone])
        return done

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
                before=[s.head_length for s in sequences],
                levels=[s.useful_levels for s in sequences],
            )
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.length += count
            if committed is not None:
                sequence.head_length += count
        self.scheduler.running = sequences
        return committed

    # first step -> levels -> tree

    def _draft(self, clock: StageClock, committed: Committed | None, joined: list[Running]) -> None:
        if committed is None or self.drafter is None:
            self.trees = self._bare_trees()
            return
        # a joining request's prompt goes through the head too: that is its prefill
        everyone = [sequence.metrics for sequence in self.running]
        stayed = len(everyone) - sum(not sequence.finish_reason for sequence in joined)
        old, new = sum(committed.counts[:stayed]), sum(committed.counts[stayed:])
        with clock.stage(("draft", everyone[:stayed], old), ("prefill", everyone[stayed:], new)):
            h = self.drafter.first_step(self.pools[1], committed)
        with clock.stage(("draft", everyone, 1)):
            levels = self.drafter.levels(self.pools[1], committed, h)
        with clock.stage(("tree_build", everyone, 1)):
            self.trees = self.drafter.build(committed, levels)


def _first_rows(step: FirstStep, slots: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Feature rows and next tokens of these slots' accepted paths: the real rows of the fixed window."""
    if not slots:
        return [], []
    real = torch.arange(step.rows.shape[1], device=step.rows.device) < step.count[slots, None]
    return [step.rows[slots][real]], [step.tokens[slots][real].long()]
