"""Oracle 4 on real runs: a thousand sampled requests through the engine, their first tokens against the exact law.

A target of five tokens, so that the joint law of three of them has 125 cells. The first comes from the prefill, the
others from rounds. Seeds are fixed; P_VALUE is what the right law would miss by chance. The match rule's runs must be
plain decoding's token by token, whatever the noise.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import product, zip_longest

import pytest
import torch
from torch import Tensor

from eagle3.config import HeadOptions
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import identity_map
from eagle3_infer import proposals, rules
from eagle3_infer.config import EngineConfig, RuleConfig, SamplingConfig, TreeConfig
from eagle3_infer.engine import Engine, Request, Result
from eagle3_kernels.sample_nodes import reference
from oracles.invariants import dense_logits, shifted_target, whimsical

VOCAB, PROMPT, REQUESTS = 5, [1, 4, 2, 0], 1000
P_VALUE, CAUGHT = 1e-5, 1e-9
CHAIN, TREE = TreeConfig.chain(2), TreeConfig(depth=2, top_k=3, nodes=6)
RULES = {
    "match": (RuleConfig("match"), TREE),
    "shared noise": (RuleConfig("match", "shared"), TREE),
    "target only": (RuleConfig("target_only"), TREE),
    "rejection chain": (RuleConfig("rejection"), CHAIN),
    "rejection tree": (RuleConfig("rejection"), TREE),
}


@lru_cache
def models() -> tuple[Target, Eagle3Head]:
    # logits of a moderate spread: sharp ones would leave most cells empty
    target = shifted_target(vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.1)
    options = HeadOptions(capture_layers=(0, 1))
    return target, Eagle3Head.for_target(target, identity_map(VOCAB), options, seed=0).requires_grad_(False)


@lru_cache
def joint_law(min_p: float = 0.0) -> Tensor:
    """Probabilities of the first three tokens [V * V * V], float64."""
    target, _ = models()
    pairs = [[*PROMPT, *pair] for pair in product(range(VOCAB), repeat=2)]
    with torch.inference_mode():
        logits = torch.stack([dense_logits(target, tokens)[-3:] for tokens in pairs])
    p = logits.double().softmax(-1)
    p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0)
    p = (p / p.sum(-1, keepdim=True)).view(VOCAB, VOCAB, 3, VOCAB)
    return (p[:1, :1, 0].view(VOCAB, 1, 1) * p[:, 0, 1].view(VOCAB, VOCAB, 1) * p[:, :, 2]).flatten()


def run(rule: RuleConfig | None, tree: TreeConfig | None, min_p: float = 0.0, requests: int = REQUESTS) -> list[Result]:
    """Four tokens each, so that the first round may accept two; no tree = plain decoding."""
    target, head = models()
    sampling = SamplingConfig(1.0, seed=1, min_p=min_p)
    asked = [Request(PROMPT, sampling, max_new_tokens=4, sample=i) for i in range(requests)]
    config = EngineConfig(slots=128, page_size=8)
    return Engine(target, head if tree else None, tree, config, rule).generate(asked)


def tail_probability(results: list[Result], law: Tensor) -> float:
    """Of Pearson's statistic of the first three tokens; rare outcomes share a cell, impossible ones do not occur."""
    cells = torch.tensor([result.token_ids[:3] for result in results]) @ torch.tensor([VOCAB**2, VOCAB, 1])
    counts, expected = cells.bincount(minlength=VOCAB**3).double(), len(results) * law
    assert counts[law == 0].sum() == 0
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def accepted_share(results: list[Result]) -> list[float]:
    """Accepted over offered nodes per level."""
    accepted, offered = (
        [sum(level) for level in zip_longest(*rows, fillvalue=0)]
        for rows in ([r.accepted_by_level for r in results], [r.offered_by_level for r in results])
    )
    return [a / b for a, b in zip_longest(accepted, offered, fillvalue=0)]


@pytest.mark.parametrize("name", RULES)
def test_a_real_run_follows_the_targets_law(name):
    results = run(*RULES[name])
    # drafts are accepted and rejected at both levels
    assert all(0.02 < share < 0.98 for share in accepted_share(results))
    assert P_VALUE < tail_probability(results, joint_law()) < 1 - P_VALUE


@pytest.mark.parametrize("rule", ["target_only", "rejection"])
def test_trees_sized_by_dice_keep_the_law(rule, monkeypatch):
    """A controller may stop, prune or leave out drafts as it likes, if it does not look at the sampled tokens."""
    [whims, results] = whimsical(monkeypatch), run(RuleConfig(rule), replace(TREE, adaptive=True))
    assert whims[0].plain_rounds
    assert P_VALUE < tail_probability(results, joint_law()) < 1 - P_VALUE


def test_a_filtered_run_follows_the_filtered_law():
    """Target and draft are cut by min-p, so that a node may have fewer children than the tree asks for."""
    results = run(*RULES["rejection tree"], min_p=0.15)
    assert 0 < int((joint_law(0.15) == 0).sum()) < VOCAB**3 - 10
    assert P_VALUE < tail_probability(results, joint_law(0.15)) < 1 - P_VALUE


def test_the_threshold_rule_is_seen_to_be_lossy():
    assert tail_probability(run(RuleConfig("threshold", threshold=0.3), TREE), joint_law()) < CAUGHT


def test_p_over_q_on_drafts_that_were_not_sampled_is_seen(monkeypatch):
    monkeypatch.setattr(proposals, "mixed_gumbel", lambda *key: torch.zeros(VOCAB))
    assert tail_probability(run(*RULES["rejection chain"]), joint_law()) < CAUGHT


def test_a_residual_drawn_from_p_is_seen(monkeypatch):
    right = rules.sequential_law
    monkeypatch.setattr(rules, "sequential_law", lambda p, *node: right(p, *node)._replace(residual=p))
    assert tail_probability(run(*RULES["target only"]), joint_law()) < CAUGHT


def draw_by_position(seed: int, purpose: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Noise that all requests share, and that only ever wants one token of a position."""
    return torch.zeros(vocab_size, device=device).index_fill(0, torch.tensor(position % vocab_size), 1e30)


def no_noise(seed: int, purpose: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    return torch.zeros(vocab_size, device=device)


def drowning_noise(seed: int, purpose: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    return -1e6 * torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed + position))


@pytest.mark.parametrize("noise", [reference.vocabulary_gumbel, draw_by_position, no_noise, drowning_noise])
def test_the_match_rule_is_plain_decoding_whatever_the_noise(noise, monkeypatch):
    monkeypatch.setattr(reference, "vocabulary_gumbel", noise)
    plain = [result.token_ids for result in run(None, None, requests=60)]
    for rule, tree in ((RuleConfig("match"), CHAIN), RULES["match"], RULES["shared noise"]):
        assert [result.token_ids for result in run(rule, tree, requests=60)] == plain
