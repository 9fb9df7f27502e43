"""The speculative engine: requests join, rounds verify and draft, requests leave. One loop for plain, chain and tree.

A round is: verify -> accept -> relocate -> first draft step over what was committed -> levels -> tree. Plain decoding
is the same round with bare roots; a chain is a tree with one child per node.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

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
from eagle3_infer.verifier import Forward, TreeRows, Verifier
from eagle3_kernels.gather_first_step import gather_first_step
from eagle3_kernels.relocate_kv import relocate_kv
from eagle3_kernels.structures import Tree, Walk

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
        running, trees = self.running, TreeRows(self.trees)
        old, new = ([s.metrics for s in group] for group in (running, joined))
        rows = sum(trees.count[: len(running)]), sum(s.prompt_length for s in joined)
        with clock.stage(("verify", old, rows[0]), ("prefill", new, rows[1])):
            forward = self.verifier.forward(self.pools[0], trees, running, joined)
        with clock.stage(("accept", old, len(old)), ("prefill", new, len(new))):
            walks = self.verifier.walk(forward, trees, running)
            firsts = self.verifier.first_tokens(forward, joined)
            self._emit(trees, running, walks, joined, firsts)
        walk = _as_walk(walks, trees.tree.depth, self.target.device)
        with clock.stage(("relocate", old, 1)):
            self._relocate(running, walk, walks)
        committed = self._commit(forward, trees, running, walk, walks, joined)
        self.running = [s for s in (*running, *joined) if not s.finish_reason]
        return committed

    def _emit(self, trees: TreeRows, running, walks, joined, firsts) -> None:
        for b, (sequence, (path, bonus)) in enumerate(zip(running, walks, strict=True)):
            kept = sequence.emit([trees.tokens[b][row] for row in path[1:]] + [bonus])
            rows = slice(trees.count[b])
            sequence.metrics.count_round(trees.parent[b][rows], trees.level[b][rows], len(path) - 1, kept)
        for sequence, token in zip(joined, firsts, strict=True):
            sequence.emit([token])

    def _relocate(self, running: list[Running], walk: Walk, walks: list[tuple[list[int], int]]) -> None:
        """Close the gaps between accepted rows; most paths have none."""
        moving = [
            b for b, (path, _) in enumerate(walks) if not running[b].finish_reason and path != list(range(len(path)))
        ]
        if moving:
            pool = self.pools[0]
            lens = torch.tensor([running[b].length for b in moving], device=self.target.device)
            relocate_kv(pool.tensors, pool.table[[running[b].slot for b in moving]], lens, walk.path[moving])

    def _commit(self, forward: Forward, trees: TreeRows, running, walk: Walk, walks, joined) -> Committed | None:
        """Count the kept rows as committed, and collect the first draft step's inputs of those that go on."""
        staying = [(b, s) for b, s in enumerate(running) if not s.finish_reason]
        joining = [(i, s) for i, s in enumerate(joined) if not s.finish_reason]
        counts = [len(walks[b][0]) for b, _ in staying] + [s.prompt_length for _, s in joining]
        sequences = [s for _, s in (*staying, *joining)]
        committed = None
        if sequences and self.drafter is not None:
            rows, tokens = self._first_rows(forward, trees, running, walk, [b for b, _ in staying])
            for i, sequence in joining:
                start = forward.starts[len(running) + i]
                rows.append(torch.arange(start, start + sequence.prompt_length, device=self.target.device))
                tokens.append(torch.tensor(sequence.tokens[1:], device=self.target.device))
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
        return committed

    def _first_rows(self, forward: Forward, trees: TreeRows, running, walk: Walk, staying: list[int]):
        """Feature rows and next tokens of the accepted paths: the real rows of the fixed window."""
        if not staying:
            return [], []
        device = self.target.device
        starts = torch.tensor(forward.starts[: len(running)], device=device)
        lens = torch.tensor([sequence.length for sequence in running], device=device)
        step = gather_first_step(trees.tree, walk, starts, lens)
        real = torch.arange(step.rows.shape[1], device=device) < step.count[staying, None]
        return [step.rows[staying][real].long()], [step.tokens[staying][real].long()]

    # first step -> levels -> tree

    def _draft(self, clock: StageClock, committed: Committed | None) -> None:
        if committed is None or self.drafter is None:
            self.trees = self._bare_trees()
            return
        metrics = [sequence.metrics for sequence in self.running]
        with clock.stage(("draft", metrics, 1)):
            self.trees = self.drafter.draft(self.pools[1], committed, clock.stage(("tree_build", metrics, 1)))


def _as_walk(walks: list[tuple[list[int], int]], depth: int, device: torch.device) -> Walk:
    padded = [path + [-1] * (depth + 1 - len(path)) for path, _ in walks] or torch.empty(0, depth + 1)
    make = {"dtype": torch.int32, "device": device}
    return Walk(
        path=torch.as_tensor(padded, **make),
        accepted=torch.tensor([len(path) - 1 for path, _ in walks], **make),
        bonus=torch.tensor([bonus for _, bonus in walks], **make),
    )
