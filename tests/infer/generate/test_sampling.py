"""Sampling inside `generate`: torch's seed governs it, and tokens follow transformers' own law."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_infer import generator
from eagle3_infer.config import EngineConfig, TreeConfig
from oracles.prompted import PROMPTS, encode


def test_torchs_seed_governs_sampling(model, tokenizer, speculate, folder):
    """Whatever the tree; greedy calls draw no random number."""
    inputs = encode(tokenizer, *PROMPTS)

    def sample(seed: int, custom: Any) -> Tensor:
        torch.manual_seed(seed)
        model.generate(**inputs, max_new_tokens=2, custom_generate=custom)
        return model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=0, custom_generate=custom)

    first = sample(0, speculate)
    assert torch.equal(sample(0, speculate), first)
    assert torch.equal(sample(0, generator(folder / "head", tree=TreeConfig.chain(2))), first)
    assert not torch.equal(sample(1, speculate), first)
    # not seeded anew by each call
    again = model.generate(**inputs, max_new_tokens=12, do_sample=True, top_k=0, custom_generate=speculate)
    assert not torch.equal(again, sample(1, speculate))


def test_samples_of_one_prompt_differ(model, tokenizer, speculate):
    inputs = encode(tokenizer, *PROMPTS[:2])
    torch.manual_seed(0)
    out = model.generate(
        **inputs, max_new_tokens=8, do_sample=True, top_k=0, num_return_sequences=3, custom_generate=speculate
    )
    width = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :width], inputs["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out[:, width:].tolist()}) == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4, "temperature": 1.5},
        {"top_k": 0, "top_p": 0.3, "temperature": 3.0},
        {"top_k": 0, "min_p": 0.2, "temperature": 3.0, "repetition_penalty": 1.2},
        {"top_k": 8, "typical_p": 0.5, "temperature": 3.0},
        {"top_k": 6, "temperature": 2.0, "renormalize_logits": True, "sequence_bias": [[[97], 3.0]]},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_the_law_of_a_sampled_token(model, tokenizer, folder, settings):
    """Chi-square of 600 draws against the probabilities that transformers itself draws from."""
    inputs = encode(tokenizer, PROMPTS[1])
    count, width = 600, inputs["input_ids"].shape[1]
    asked = {"do_sample": True, "max_new_tokens": 1, **settings}
    scored = model.generate(**inputs, **asked, output_scores=True, return_dict_in_generate=True)
    law = scored.scores[0][0].softmax(-1)
    torch.manual_seed(0)
    custom = generator(folder / "head", config=EngineConfig(slots=50))
    rows = model.generate(**inputs, **asked, num_return_sequences=count, custom_generate=custom)
    drawn = Counter(rows[:, width].tolist())
    assert all(law[token] > 0 for token in drawn)
    expected = {i: count * float(p) for i, p in enumerate(law) if p > 0}
    rare = sum(e for e in expected.values() if e < 5)
    cells = [(drawn[i], e) for i, e in expected.items() if e >= 5]
    if rare >= 5:
        cells.append((count - sum(seen for seen, _ in cells), rare))
    assert len(cells) >= 3
    statistic = sum((seen - e) ** 2 / e for seen, e in cells)
    # a right engine fails at one seed in 10^4: Wilson-Hilferty's cube root of chi-square, 3.72 sigma
    freedom = len(cells) - 1
    assert (statistic / freedom) ** (1 / 3) < 1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5
