"""The engine's chain against the independent recurrent drafter: same drafts, same logits, same acceptance (fp32)."""

import copy
import dataclasses

import pytest
import torch

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.vocab import identity_map
from eagle3_infer.config import TreeConfig
from eagle3_infer.engine import Engine, Request
from oracles.chain import ChainDrafter
from oracles.invariants import fresh_prefill, random_head, shifted_target
from oracles.overfit import overfit

DEPTH = 5
OPTIONS = [
    HeadOptions(draft_vocab_size=None),
    HeadOptions(draft_vocab_size=None, num_layers=3, norm_output=True, qk_norm=True),
    HeadOptions(draft_vocab_size=None, fc_norm=True, norm_before_residual=True, attention_bias=True, sliding_window=6),
    HeadOptions(draft_vocab_size=None, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
]


class RecordingEngine(Engine):
    """Keeps, per drafted round, the root's sequence, the drafts, and the head's logits of every level."""

    def __init__(self, target, head, tree):
        super().__init__(target, head, tree)
        assert self.drafter is not None
        self.rounds, self.seen, self._logits = [], [], []
        # a shallow copy: fixtures share heads
        head = copy.copy(head)
        plain = head.logits

        def logits(h):
            self._logits.append(plain(h))
            return self._logits[-1]

        head.logits = logits
        self.drafter.head = head

    def step(self, waiting):
        self._logits.clear()
        done = super().step(waiting)
        if self.running:
            drafts = self.draft.tree.tokens[0, 1:].tolist()
            self.seen.append((list(self.running[0].tokens), self.draft.tree))
            self.rounds.append((list(self.running[0].tokens), drafts, [x.flatten() for x in self._logits]))
        return done


def drafter_of(target, head) -> ChainDrafter:
    return ChainDrafter(head.state_dict(), dataclasses.asdict(head.config), target.embed(torch.arange(300)))


def check(target, head, prompt, new):
    engine = RecordingEngine(target, head, TreeConfig.chain(DEPTH))
    result = engine.generate_one(Request(prompt, max_new_tokens=new))
    output = prompt + result.token_ids
    features, _ = fresh_prefill(target, output, head.capture_layers)
    assert features is not None
    chains = drafter_of(target, head).chains(features, output, DEPTH)
    runs = []
    for tokens, drafts, logits in engine.rounds:
        # the root is the last token: its chain starts from the feature before it
        chain = chains[len(tokens) - 2]
        assert drafts == chain.tokens[: len(drafts)]
        for ours, theirs in zip(logits, chain.logits, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
        agreed = [draft == true for draft, true in zip(drafts, output[len(tokens) :], strict=False)]
        runs.append(1 + [*agreed, False].index(False))
    assert result.run_lengths == runs
    assert sum(runs) + 1 == len(result.token_ids)


def test_overfit_head():
    known = overfit("llama")
    for prompt in known.prompts[:2]:
        check(known.target, known.head, prompt, 40)


def test_mapped_head_of_random_order():
    target = shifted_target("qwen3")
    check(target, random_head(target, 60), [5, 9, 200, 31, 7], 16)


@pytest.mark.parametrize("options", OPTIONS)
def test_head_options(options):
    target = shifted_target("llama")
    head = Eagle3Head.for_target(target, identity_map(300), options).requires_grad_(False)
    draw = torch.Generator().manual_seed(4)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    check(target, head, [5, 9, 200, 31, 7], 12)


@pytest.mark.parametrize("options", OPTIONS)
def test_tree_scores_are_those_of_each_root_path_alone(options):
    """A node drafted among its siblings scores as its path does in a chain of its own."""
    target = shifted_target("llama")
    head = Eagle3Head.for_target(target, identity_map(300), options).requires_grad_(False)
    engine = RecordingEngine(target, head, TreeConfig(depth=4, top_k=3, nodes=20))
    engine.generate_one(Request([5, 9, 200, 31, 7], max_new_tokens=8))
    tokens, tree = engine.seen[1]
    features, _ = fresh_prefill(target, tokens[:-1], head.capture_layers)
    assert features is not None
    for path in tree.paths().tolist():
        rows = [row for row in path[1:] if row >= 0]
        scores = path_scores(drafter_of(target, head), features, tokens, tree.tokens[0, rows].tolist())
        torch.testing.assert_close(tree.scores[0, rows], torch.stack(scores), rtol=1e-5, atol=1e-4)
    assert tree.position.max() >= 3


def path_scores(
    drafter: ChainDrafter, features: torch.Tensor, tokens: list[int], drafts: list[int]
) -> list[torch.Tensor]:
    """Summed log-probabilities along one path of drafts below the last token (identity vocabulary)."""
    caches = [([], [], []) for _ in range(drafter.c["num_layers"])]
    hidden = torch.empty(0)
    for t, feature in enumerate(features):
        hidden = drafter.advance(drafter.join(feature), tokens[t + 1], t, caches)
    scores, total = [], torch.zeros(())
    for k, draft in enumerate(drafts):
        total = total + (drafter.w["lm_head.weight"] @ drafter.read(hidden)).log_softmax(0)[draft]
        scores.append(total)
        hidden = drafter.advance(hidden, draft, len(features) + k, caches)
    return scores
