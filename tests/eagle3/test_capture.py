"""Capture: the right layer in the right columns, exactly the asked rows, and copies."""

from types import SimpleNamespace

import pytest
import torch

from eagle3.attention import DenseCausal
from eagle3.capture import Capture, check_layers, default_layers
from eagle3.errors import ConfigError
from eagle3.target import Target


@pytest.fixture(scope="module")
def target(build) -> Target:
    return Target(build("llama"))


def run(target: Target, capture: Capture, ids: torch.Tensor) -> torch.Tensor:
    """Features of one document, copied."""
    with torch.no_grad(), capture.rows(len(ids)):
        target.hidden(ids, torch.arange(len(ids)), DenseCausal([len(ids)], plain=True))
    return capture.features.clone()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt2"])
def test_layer_i_is_the_output_of_layer_i(build, document, family):
    """Catches: the off-by-one between "output of layer i" and "input of layer i", columns in another order."""
    model, (ids, _) = build(family), document(20)
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    features = run(Target(model), Capture(Target(model), (0, 1, 2), 32), ids)
    torch.testing.assert_close(features, torch.cat([states[i + 1][0] for i in range(3)], -1), rtol=1e-5, atol=1e-4)


def test_last_layer_is_before_the_final_norm(build, document):
    """Catches: HF's hidden_states[-1], which is normed, taken for the last layer's output."""
    model, (ids, _) = build("llama"), document(12)
    with torch.no_grad():
        normed = model(ids[None], output_hidden_states=True, use_cache=False).hidden_states[-1][0]
        last = run(Target(model), Capture(Target(model), (3,), 12), ids)
        torch.testing.assert_close(model.model.norm(last), normed, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(last, normed, atol=0.1)


def test_explicit_layers_on_a_two_layer_target(build, document):
    """Catches: shallow targets that cannot be used although the layers were named."""
    target, (ids, _) = Target(build("llama", num_hidden_layers=2)), document(6)
    assert run(target, Capture(target, (1, 0), 6), ids).shape == (6, 128)


@pytest.mark.parametrize("count, layers", [(7, (1, 2, 3)), (8, (1, 3, 4)), (30, (1, 14, 26)), (36, (1, 17, 32))])
def test_default_layers(count, layers):
    """Catches: another toolkit's numbering (2, L/2, L-3 are inputs)."""
    assert default_layers(count) == layers


@pytest.mark.parametrize("count", [1, 2, 6])
def test_default_layers_need_seven(count):
    """Catches: two of the three default layers being one and the same."""
    with pytest.raises(ConfigError, match=f"{count} layers.*head.capture_layers"):
        default_layers(count)


@pytest.mark.parametrize("layers", [(1, 1), (0, 4), (-1, 2), (4,)])
def test_bad_layers_raise(target, layers):
    """Catches: repeated columns, an index from the end, an index past the last layer."""
    with pytest.raises(ConfigError, match="distinct and in"):
        Capture(target, layers, 8)


def test_layers_are_ascending():
    """Catches: columns of `fc` that depend on the order in which a user named the layers."""
    assert check_layers([3, 0, 2], 4) == (0, 2, 3)


def test_wrong_row_counts_raise(target, document):
    """Catches: padding rows that reach the buffer, or rows of the forward that do not."""
    capture, (ids, _) = Capture(target, (0, 2), 8), document(8)
    with pytest.raises(RuntimeError, match="gave 8 rows, expected 7"), capture.rows(7):
        target.hidden(ids, torch.arange(8), DenseCausal([8]))
    with pytest.raises(RuntimeError, match="9 rows exceed the capture buffer of 8"), capture.rows(9):
        pass


def test_a_block_holds_exactly_one_forward(target, document):
    """Catches: features of an older forward handed out as new, or of two forwards mixed."""
    capture, (ids, positions) = Capture(target, (0, 2), 8), document(8)
    with pytest.raises(RuntimeError, match="not once"), capture.rows(8):
        pass
    with pytest.raises(RuntimeError, match="not once"), capture.rows(8):
        [target.hidden(ids, positions, DenseCausal([8])) for _ in range(2)]


def test_hooks_are_gone_after_the_block(target, document):
    """Catches: hooks that pile up, after an error too, and overwrite the features in later forwards."""
    capture, (ids, positions) = Capture(target, (0, 2), 8), document(8)
    before = run(target, capture, ids)
    with pytest.raises(ValueError, match="stop"), capture.rows(8):
        raise ValueError("stop")
    target.hidden(ids.flip(0), positions, DenseCausal([8]))
    assert not any(layer._forward_hooks for layer in target.layers)
    assert torch.equal(capture.features, before)


def test_no_layers_hook_nothing(target, document):
    """Catches: plain decoding that pays for capture."""
    capture, (ids, positions) = Capture(target, (), 8), document(8)
    assert capture.buffer is None
    with capture.rows(99):
        assert not any(layer._forward_hooks for layer in target.layers)
        target.hidden(ids, positions, DenseCausal([8]))
    with pytest.raises(RuntimeError, match="no capture layers"):
        _ = capture.features


def test_captured_rows_are_copies(target, document):
    """Catches: features that alias the target's residual stream, and buffers that are reallocated per forward."""
    capture, (ids, _) = Capture(target, (0, 2), 16), document(8)
    first = run(target, capture, ids)
    place = capture.features.data_ptr()
    run(target, capture, ids.flip(0))
    again = run(target, capture, ids)
    assert torch.equal(first, again)
    assert capture.features.data_ptr() == place
    capture.features.zero_()
    assert torch.equal(run(target, capture, ids), first)


def test_features_follow_the_rows_of_the_last_forward(target, document):
    """Catches: rows of a longer, earlier forward still being visible."""
    capture, (ids, _) = Capture(target, (0, 2), 16), document(16)
    run(target, capture, ids)
    assert run(target, capture, ids[:5]).shape == (5, 128)
    assert capture.features.dtype == target.dtype


class TupleLayer(torch.nn.Module):
    def forward(self, x):
        return x, None


def test_layers_that_return_tuples():
    """Catches: families whose decoder layers return (hidden, ...)."""
    layer, rows = TupleLayer(), torch.randn(1, 3, 4)
    shallow = SimpleNamespace(
        layers=[layer], num_layers=1, hidden_size=4, dtype=torch.float32, device="cpu", need_layers=lambda purpose: None
    )
    capture = Capture(shallow, (0,), 8)
    with capture.rows(3):
        layer(rows)
    assert torch.equal(capture.features, rows[0])
