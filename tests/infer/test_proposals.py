"""Ranking keys of drafts that share the target's noise: pure functions of log-probabilities."""

import torch

from eagle3_infer.proposals import noisy_keys

V = 400


def test_the_noise_and_the_draft_together_guess_the_targets_draw():
    """Of a head whose law is flatter than the target's; catches: keys that ignore the noise, q, or its sharpness."""
    random = torch.Generator().manual_seed(0)
    log_q = (2.5 * torch.randn(4000, V, generator=random)).log_softmax(-1)
    log_p = (1.4 * log_q + torch.randn(4000, V, generator=random)).log_softmax(-1)
    noise = -torch.log(-torch.log(torch.rand(4000, V, generator=random).clamp(1e-30, 1 - 1e-7)))
    drawn = (log_p + noise).argmax(-1)

    def accepted(keys):
        return float((keys.argmax(-1) == drawn).float().mean())

    found = accepted(noisy_keys(log_q, noise, 1.4))
    assert found > accepted(noisy_keys(log_q, noise, 1.0)) + 0.02
    assert found > max(accepted(log_q), accepted(noise)) + 0.05
    # a head that knows the target's law misses nothing
    assert accepted(noisy_keys(log_p, noise, 1.0)) == 1


def test_a_filtered_token_is_never_proposed():
    keys = noisy_keys(torch.tensor([[-0.1, -torch.inf, -2.0]]), torch.tensor([[0.0, 50.0, 1.0]]), 1.2)
    assert keys.isneginf().tolist() == [[False, True, False]]
