"""The seam's call and the dense context: what a query sees, and what is refused rather than dropped."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from eagle3.attention import SEAM, AttentionCall, DenseCausal, attend_through_seam, attending, register_seam
from eagle3.errors import UnsupportedTargetError


def random_call(rows: int, heads=4, kv_heads=2, dim=8, value_dim=8, seed=0, **settings) -> AttentionCall:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((heads, rows, dim), (kv_heads, rows, dim), (kv_heads, rows, value_dim))
    query, key, value = (torch.randn(shape, generator=draw) for shape in shapes)
    return AttentionCall(0, query, key, value, scaling=0.4, **settings)


def by_hand(call: AttentionCall, lengths: list[int]) -> torch.Tensor:
    """One query and one key at a time, in float64."""
    heads, rows, _ = call.query.shape
    out = torch.zeros(rows, heads, call.value.shape[-1], dtype=torch.float64)
    first_of = [start for start, n in zip(starts(lengths), lengths, strict=True) for _ in range(n)]
    for t in range(rows):
        seen = [j for j in range(first_of[t], t + 1) if call.window is None or t - j < call.window]
        for h in range(heads):
            kv = h // (heads // call.key.shape[0])
            scores = torch.stack([call.query[h, t].double() @ call.key[kv, j].double() for j in seen]) * call.scaling
            if call.softcap is not None:
                scores = call.softcap * torch.tanh(scores / call.softcap)
            mass = scores.exp()
            total = mass.sum() + (call.sinks[h].double().exp() if call.sinks is not None else 0)
            out[t, h] = sum(m / total * call.value[kv, j].double() for m, j in zip(mass, seen, strict=True))
    return out


def starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("lengths", [[9], [1], [4, 1, 7]])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 3},
        {"window": 100},
        {"softcap": 0.7},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"window": 2, "softcap": 0.7, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    ],
    ids=["full", "window", "long window", "softcap", "sinks", "all"],
)
def test_dense_equals_the_formula(settings, lengths, plain):
    """Catches: a dropped cap, sink or scale, an off-by-one window, documents that see each other."""
    call = random_call(sum(lengths), **settings)
    out = DenseCausal(lengths, plain=plain).attend(call)
    torch.testing.assert_close(out.double(), by_hand(call, lengths), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "heads, kv_heads, dim, value_dim", [(4, 4, 8, 8), (6, 2, 16, 16), (8, 1, 8, 8), (4, 4, 24, 16)]
)
def test_dense_takes_any_heads_and_widths(heads, kv_heads, dim, value_dim, plain):
    """Catches: query heads paired with the wrong KV head, values assumed as wide as keys (MLA)."""
    call = random_call(7, heads, kv_heads, dim, value_dim)
    out = DenseCausal([3, 4], plain=plain).attend(call)
    assert out.shape == (7, heads, value_dim)
    torch.testing.assert_close(out.double(), by_hand(call, [3, 4]), rtol=1e-5, atol=1e-5)


def test_dense_notes_every_layers_window():
    """Catches: a probe that cannot tell which layers came, or with which window."""
    ctx = DenseCausal([3])
    ctx.attend(random_call(3, window=2))
    assert ctx.windows == {0: 2}


def test_a_layer_that_attends_twice_is_refused():
    """Catches: differential attention, or a context used for a second forward, overwriting the first's rows."""
    ctx = DenseCausal([3])
    ctx.attend(random_call(3))
    with pytest.raises(UnsupportedTargetError, match="layer 0 attends twice"):
        ctx.attend(random_call(3))


def test_rows_that_no_document_holds_raise():
    """Catches: a packed row longer than its documents, whose tail would be dropped."""
    with pytest.raises(RuntimeError, match="5 rows for documents of 4 tokens"):
        DenseCausal([3, 1]).attend(random_call(5))


def test_some_rows_only_are_refused():
    """Catches: queries of some rows answered as if they were the first ones."""
    call = random_call(4)
    with pytest.raises(RuntimeError, match="query_rows"):
        DenseCausal([4]).attend(replace(call, query_rows=torch.tensor([3, 1, 2, 0])))


class Recorder:
    """A context that keeps its calls and returns zeros."""

    def __init__(self):
        self.calls: list[AttentionCall] = []

    def attend(self, call):
        self.calls.append(call)
        return call.value.new_zeros(call.query.shape[1], call.query.shape[0], call.value.shape[-1])


MODULE = SimpleNamespace(layer_idx=3)
ROWS = (torch.zeros(1, 4, 5, 16), torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 8))


def test_seam_hands_everything_to_the_context():
    """Catches: an argument that is lost on the way."""
    ctx, sinks = Recorder(), torch.ones(4)
    out, weights = attend_through_seam(
        MODULE, *ROWS, None, scaling=0.3, sliding_window=7, softcap=2.0, s_aux=sinks, ctx=ctx, dropout=0.0
    )
    (call,) = ctx.calls
    assert (call.layer, call.scaling, call.window, call.softcap) == (3, 0.3, 7, 2.0)
    assert call.sinks is sinks
    assert call.query.shape == (4, 5, 16)
    assert out.shape == (1, 5, 4, 8)
    assert weights is None


def test_seam_defaults():
    """Catches: a missing scale taken as 1, a window of 0 taken as "sees nothing"."""
    ctx = Recorder()
    attend_through_seam(MODULE, *ROWS, sliding_window=0, ctx=ctx)
    assert ctx.calls[0].scaling == 16**-0.5
    assert ctx.calls[0].window is None


def test_seam_finds_the_current_context():
    """Catches: families that drop keywords; a context that survives its block, after an error too."""
    outer, inner = Recorder(), Recorder()
    with attending(outer):
        with attending(inner):
            attend_through_seam(MODULE, *ROWS)
        with pytest.raises(ValueError, match="inside"), attending(inner):
            raise ValueError("inside")
        attend_through_seam(MODULE, *ROWS)
    assert (len(outer.calls), len(inner.calls)) == (1, 1)
    with pytest.raises(RuntimeError, match=r"Target\.stock"):
        attend_through_seam(MODULE, *ROWS)


def test_seam_keyword_wins_over_the_current_context():
    """Catches: a nested forward writing into the outer forward's rows."""
    current, given = Recorder(), Recorder()
    with attending(current):
        attend_through_seam(MODULE, *ROWS, ctx=given)
    assert (len(current.calls), len(given.calls)) == (0, 1)


@pytest.mark.parametrize("extra", ["position_bias", "indices", "block_indices", "sinks", "ctx2"])
def test_seam_refuses_what_it_does_not_know(extra):
    """Catches: an argument that changes the result being swallowed by **kwargs."""
    given: dict[str, Any] = {extra: torch.ones(1)}
    with pytest.raises(UnsupportedTargetError, match=extra):
        attend_through_seam(MODULE, *ROWS, ctx=Recorder(), **given)
    attend_through_seam(MODULE, *ROWS, ctx=Recorder(), **dict.fromkeys(given))


def test_seam_refuses_a_mask():
    """Catches: a model that builds its own mask, which no context would apply."""
    with pytest.raises(UnsupportedTargetError, match="own mask: True"):
        attend_through_seam(MODULE, *ROWS, attention_mask=torch.ones(1, 1, 5, 5), ctx=Recorder())


def test_seam_refuses_a_batch():
    """Catches: a batch of two, of which only the first row would be read."""
    query, key, value = (x.expand(2, -1, -1, -1) for x in ROWS)
    with pytest.raises(RuntimeError, match="one packed row"):
        attend_through_seam(MODULE, query, key, value, ctx=Recorder())


def test_seam_refuses_a_layer_without_a_number():
    """Catches: attention modules that do not say which layer they are: their K/V would have no place."""
    with pytest.raises(UnsupportedTargetError, match="layer None"):
        attend_through_seam(SimpleNamespace(), *ROWS, ctx=Recorder())


def test_registration_builds_no_mask():
    """Catches: a registered mask function, which costs a host sync per forward and mask kind."""
    register_seam()
    register_seam()
    assert AttentionInterface()[SEAM] is attend_through_seam
    assert SEAM not in AttentionMaskInterface()
    # transformers reads these words and signs in a name
    assert not any(word in SEAM for word in ("flash", "sdpa", "flex_attention", "/", "|"))
