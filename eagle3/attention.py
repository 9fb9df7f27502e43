"""The one attention seam: targets and heads attend through a context object, so no model is copied or patched.

Knows the call, not where keys live: a context decides where K/V go and what each query may see.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3.errors import UnsupportedTargetError
from eagle3_kernels.tree_attention import formula_attention

# no "flash", "sdpa", "flex_attention", "/" or leading "paged|" in it: transformers gives those a meaning
SEAM = "eagle3_seam"

# arguments that transformers hands to attention functions and that change nothing in a frozen forward
_HARMLESS = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "output_router_logits",
        "output_attentions",
        "output_hidden_states",
        "is_causal",
    }
)


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over a packed row of T tokens.

    query [Hq, R, d], key [Hkv, T, d], value [Hkv, T, dv] are of the T new tokens; `window` counts
    positions (a query at position p sees positions > p - window); `sinks` [Hq] are per-head logits;
    `query_rows` int64 [R] are the new tokens whose queries came, None = all of them (R = T).
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    query_rows: Tensor | None = None


class AttentionContext(Protocol):
    """Owns the K/V rows and the visibility of one forward."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [R, Hq, dv] of `call`."""
        ...


# two families (Nemotron, StableLM) drop keywords in their decoder layer: the context is also kept here
_current: ContextVar[AttentionContext | None] = ContextVar("eagle3_attention_context", default=None)


@contextmanager
def attending(ctx: AttentionContext) -> Iterator[None]:
    """Make `ctx` the context of every seam call inside the block."""
    token = _current.set(ctx)
    try:
        yield
    finally:
        _current.reset(token)


def attend_through_seam(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ctx: AttentionContext | None = None,
    **extra,
) -> tuple[Tensor, None]:
    """The function registered with transformers' AttentionInterface; parameter names are part of that interface.

    query [1, Hq, T, d], key [1, Hkv, T, d], value [1, Hkv, T, dv] -> ([1, T, Hq, dv], None).

    Raises:
        RuntimeError: no context, or more than the one packed row: the model was called past Target.
        UnsupportedTargetError: the model brings a mask or an argument that the seam would have to drop.
    """
    ctx = ctx if ctx is not None else _current.get()
    name, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if ctx is None or query.shape[0] != 1:
        raise RuntimeError(
            f"{name}: the attention seam needs a context and one packed row (context: {ctx is not None}, rows: "
            f"{query.shape[0]}); call the model through eagle3.target.Target, or inside Target.stock() for plain "
            "transformers; while generate runs with a custom_generate of eagle3, nobody else may call it"
        )
    odd = sorted(key for key, x in extra.items() if x is not None and key not in _HARMLESS)
    if layer is None or attention_mask is not None or odd:
        raise UnsupportedTargetError(
            f"{name}: the attention seam cannot honour its call (layer {layer}, own mask: "
            f"{attention_mask is not None}, unknown arguments: {odd})"
        )
    call = AttentionCall(
        layer=layer,
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or None,
        softcap=softcap,
        sinks=s_aux,
    )
    return ctx.attend(call)[None], None


def register_seam() -> None:
    """Register the seam with transformers; idempotent. No mask function: transformers then builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(SEAM, attend_through_seam)


class DenseCausal:
    """Packed documents, each causal in itself, no K/V kept: the training target, probes and references.

    One object serves one forward; `windows` then holds every layer's window.

    Args:
        lengths: tokens of each document, in row order; their sum is T.
        plain: use the formula even where torch's fused attention would do (bit-equal to "eager", but for sinks
            in half precision, where "eager" rounds the scores once more).
    """

    def __init__(self, lengths: Sequence[int], plain: bool = False):
        self.lengths = tuple(lengths)
        self.plain = plain
        self.windows: dict[int, int | None] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        if call.layer in self.windows:
            raise UnsupportedTargetError(f"layer {call.layer} attends twice in one forward (one context serves one)")
        if call.query_rows is not None:
            raise RuntimeError("dense documents answer every row, not query_rows")
        if call.query.shape[1] != sum(self.lengths):
            raise RuntimeError(f"{call.query.shape[1]} rows for documents of {sum(self.lengths)} tokens")
        self.windows[call.layer] = call.window
        outputs, start = [], 0
        for length in self.lengths:
            rows = slice(start, start + length)
            part = replace(call, query=call.query[:, rows], key=call.key[:, rows], value=call.value[:, rows])
            outputs.append(self._document(part, length))
            start += length
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _document(self, call: AttentionCall, length: int) -> Tensor:
        windowed = call.window is not None and call.window < length
        if self.plain or call.softcap is not None or call.sinks is not None:
            groups = call.query.shape[0] // call.key.shape[0]
            # repeated, not folded into rows: products of other shapes would round otherwise than "eager"
            key, value = (x.repeat_interleave(groups, 0) for x in (call.key, call.value))
            bias = torch.zeros(length, length, device=key.device).masked_fill_(~_visible(call, length), -torch.inf)
            sinks = None if call.sinks is None else call.sinks.float()[:, None, None].expand(-1, length, 1)
            out = formula_attention(call.query, [key], [value], bias, call.scaling, call.softcap, sinks)
        else:
            out = F.scaled_dot_product_attention(
                *(x[None] for x in (call.query, call.key, call.value)),
                attn_mask=_visible(call, length) if windowed else None,
                is_causal=not windowed,
                scale=call.scaling,
                enable_gqa=True,
            )[0]
        return out.transpose(0, 1).contiguous()


def _visible(call: AttentionCall, length: int) -> Tensor:
    """What each row of a causal document sees, bool [length, length]."""
    at = torch.arange(length, device=call.query.device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < (call.window or length))
