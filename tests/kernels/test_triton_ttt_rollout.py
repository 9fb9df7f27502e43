"""A head's rollout on Triton's kernels: loss and gradients are those of the torch path.

Catches a kernel that is right alone and wrong in training: strides of the head's views, dtypes of autocast, rows that
nobody supervises, recomputed steps.
"""

import copy

import pytest
import torch

from eagle3_kernels.dispatch import set_kernels
from eagle3_kernels.testing import device
from eagle3_train.batches import pack, supervise
from eagle3_train.config import TTTConfig
from eagle3_train.features import Features
from eagle3_train.ttt import TTTRollout
from oracles.overfit import mapped_head
from oracles.tiny import tiny_target

loss_kernel, attention_kernel = (
    pytest.importorskip(f"eagle3_kernels.{op}.kernel", reason="needs triton", exc_type=ImportError)
    for op in ("draft_loss", "ttt_attention")
)
pytestmark = pytest.mark.filterwarnings("ignore:only .* distinct tokens")
STEPS, TERMS = 3, {"soft_ce": 1.0, "lk_lambda": 0.5}


@pytest.fixture
def triton(monkeypatch):
    """Chooses Triton; the calls of its two ops."""
    calls = []
    for module, name in ((attention_kernel, "ttt_attention"), (loss_kernel, "draft_loss")):
        op = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, op=op, name=name: calls.append(name) or op(*args))
    yield lambda: set_kernels("triton") or calls
    set_kernels(None)


def rollout(**options):
    """A tiny head of three query heads per KV head, two documents, the second with two replies."""
    target = tiny_target("llama")
    target.model.to(device())
    ids = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0)).tolist()
    spans = [[0] * 3 + [1] * 14, [0] * 3 + [1] * 5 + [0] * 2 + [2] * 7]
    batch = pack([{"input_ids": i, "span_ids": s} for i, s in zip(ids, spans, strict=True)])
    head = mapped_head(target, batch, 30, num_attention_heads=3, num_key_value_heads=1, head_dim=10, **options)
    batch = batch.to(device())
    inputs = Features(target, head, len(batch.ids)).prepare(batch, supervise(batch, head.t2d, STEPS))
    return head, inputs


def trained(head, inputs, config, dtype):
    """(loss, numbers of the metrics, gradients by name)."""
    head = copy.deepcopy(head).to(device())
    with torch.autocast(device().type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = TTTRollout(head, config, TERMS)(inputs, inputs.supervision.counted.sum(1).float())
    out.loss.backward()
    return out, {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "config, options",
    [(TTTConfig(), {}), (TTTConfig(checkpointing=True, weights="dpace"), {"sliding_window": 6})],
    ids=["plain", "window, dpace, checkpointing"],
)
def test_training_is_the_torch_paths(config, options, triton):
    head, inputs = rollout(**options)
    expected, expected_grads = trained(head, inputs, config, torch.float32)
    calls = triton()
    found, grads = trained(head, inputs, config, torch.float32)
    assert {"ttt_attention", "draft_loss"} == set(calls)
    for name in ("loss", "step_loss", "step_alpha"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.prediction, expected.prediction)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).norm() <= 1e-5 * expected_grads[name].norm() + 1e-9, name


def test_training_in_bfloat16(triton):
    """As far from fp32 as the torch path is, in the same dtype, or twice that."""
    head, inputs = rollout()
    exact, exact_grads = trained(head, inputs, TTTConfig(), torch.float32)
    plain, plain_grads = trained(head, inputs, TTTConfig(), torch.bfloat16)
    triton()
    found, grads = trained(head, inputs, TTTConfig(), torch.bfloat16)
    assert (found.loss - exact.loss).abs() <= 2 * (plain.loss - exact.loss).abs() + 0.004 * exact.loss
    for name, grad in grads.items():
        off, allowed = ((x - exact_grads[name]).norm() for x in (grad, plain_grads[name]))
        assert off <= 2 * allowed, name
