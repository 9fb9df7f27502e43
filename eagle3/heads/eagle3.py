"""The EAGLE-3 head (arXiv 2503.01840, section 3.1): one decoder layer over [embedding ; hidden], 2H wide.

Parameter names are the reference checkpoint's; `step` never knows where keys and values live.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.attention import AttentionCall, AttentionContext
from eagle3.capture import check_layers, default_layers
from eagle3.config import HeadConfig, HeadOptions
from eagle3.errors import CheckpointError, ConfigError
from eagle3.heads.lean import rms_norm, silu_times
from eagle3.rope import RopeSpec, check_against_target, cos_sin, has_rotary, other_tables, rotate, target_rope
from eagle3.target import Target
from eagle3.vocab import VocabMap


class RMSNorm(nn.Module):
    """Root-mean-square norm, in fp32 whatever the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, through the attention seam."""

    def __init__(self, config: HeadConfig, layer: int, input_size: int):
        super().__init__()
        self.layer, self.head_dim, self.window = layer, config.head_dim, config.sliding_window
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(input_size, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: AttentionContext, rows: Tensor | None = None) -> Tensor:
        """x [T, input] -> [T, H]; with `rows` [R], queries of those rows only -> [R, H]."""
        split = (-1, self.head_dim)
        asked = x if rows is None else x[rows]
        query = self.q_norm(self.q_proj(asked).unflatten(-1, split)).transpose(0, 1)
        key = self.k_norm(self.k_proj(x).unflatten(-1, split)).transpose(0, 1)
        value = self.v_proj(x).unflatten(-1, split).transpose(0, 1)
        q_cos, q_sin = (cos, sin) if rows is None else (cos[rows], sin[rows])
        call = AttentionCall(
            layer=self.layer,
            query=rotate(query, q_cos, q_sin),
            key=rotate(key, cos, sin),
            value=value,
            scaling=self.head_dim**-0.5,
            window=self.window,
            query_rows=rows,
        )
        return self.o_proj(ctx.attend(call).flatten(1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu_times(self.gate_proj(x), self.up_proj(x)))


class FirstLayer(nn.Module):
    """The layer that joins the next token's embedding with the hidden state; the residual is the hidden state."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 0, 2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, embeds: Tensor, cos, sin, ctx, rows: Tensor | None = None) -> Tensor:
        normed = self.hidden_norm(h)
        x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        residual = normed if self.norm_before_residual else h
        h = (residual if rows is None else residual[rows]) + self.self_attn(x, cos, sin, ctx, rows)
        return h + self.mlp(self.post_attention_layernorm(h))


class PlainLayer(nn.Module):
    """A standard pre-norm decoder layer, for heads of more than one layer."""

    def __init__(self, config: HeadConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, cos, sin, ctx, rows: Tensor | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(h), cos, sin, ctx, rows)
        h = (h if rows is None else h[rows]) + attended
        return h + self.mlp(self.post_attention_layernorm(h))


class LMHead(nn.Linear):
    """The output matrix. A fused loss runs inside this module's call too: sharded training gathers weights there."""

    def forward(self, h: Tensor, loss: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
        """h [..., H] -> logits [..., Vd]; with `loss`, what loss(h, weight) returns."""
        return super().forward(h) if loss is None else loss(h, self.weight)


class Eagle3Head(nn.Module):
    """Draft head for one target. Weights are trainable; `d2t`, `t2d` and the rotary table are buffers."""

    d2t: Tensor
    t2d: Tensor
    inv_freq: Tensor

    def __init__(self, config: HeadConfig, vocab_map: VocabMap):
        super().__init__()
        self.config = config
        if vocab_map.d2t.shape[0] != config.draft_vocab_size or vocab_map.t2d.shape[0] != config.vocab_size:
            raise ConfigError(
                f"vocab map of {vocab_map.d2t.shape[0]} draft and {vocab_map.t2d.shape[0]} target tokens for a head "
                f"of {config.draft_vocab_size} and {config.vocab_size}"
            )
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.capture_layers]
            self.fc_norm = nn.ModuleList(norms)
        if config.owns_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.midlayer = FirstLayer(config)
        self.layers = nn.ModuleDict({str(i): PlainLayer(config, i) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocab_map.d2t.clone())
        self.register_buffer("t2d", vocab_map.t2d.clone())
        rope = RopeSpec(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        inv_freq, self.rope_scaling = rope.tables()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn, recurse=True):
        """Move and cast like any module, but keep the rotary frequencies in fp32: bf16 bends the angles."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    @classmethod
    def for_target(
        cls, target: Target, vocab_map: VocabMap, options: HeadOptions | None = None, seed: int = 0
    ) -> "Eagle3Head":
        """A fresh fp32 head for `target`: lm_head rows and final norm start as the target's."""
        config = head_config(target, vocab_map.d2t.shape[0], options or HeadOptions())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config, vocab_map)
        check_against_target(target.model, head.inv_freq, head.rope_scaling)
        head.check_target(target)
        with torch.no_grad():
            if not config.owns_embedding:
                head.lm_head.weight.copy_(target.lm_head.weight[vocab_map.target_ids.to(target.device)].float())
                head.norm.weight.copy_(_norm_weight(target))
        return head.to(target.device)

    @property
    def capture_layers(self) -> tuple[int, ...]:
        return self.config.capture_layers

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def feature_size(self) -> int:
        return self.config.feature_size

    def embed(self, ids: Tensor, target: Target) -> Tensor:
        """Embeddings [T, H] of target ids: the target's (frozen, never registered here), or the head's own."""
        return self.embed_tokens(ids) if self.config.owns_embedding else target.embed(ids)

    def start(self, feature: Tensor) -> Tensor:
        """Feature [T, F] -> h [T, H]."""
        feature = feature.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            parts = feature.chunk(len(self.fc_norm), dim=-1)
            feature = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(feature)

    def step(
        self,
        h: Tensor,
        embeds: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """One draft step over packed rows.

        Args:
            h: hidden states [T, H] (fc of the feature, or the previous step's output).
            embeds: embeddings of each row's next token [T, H].
            positions: int64 [T], the position of the feature plus the steps since.
            query_rows: int64 [R]: rows whose output is wanted; the others only lend keys and values.
        Returns:
            [T, H] or [R, H]: the next step's h (pre-norm; post-norm with `norm_output`).
        """
        cos, sin = cos_sin(self.inv_freq, self.rope_scaling, positions, h.dtype)
        last = self.num_layers - 1
        h = self.midlayer(h, embeds.to(h.dtype), cos, sin, ctx, query_rows if last == 0 else None)
        for i, layer in self.layers.items():
            h = layer(h, cos, sin, ctx, query_rows if int(i) == last else None)
        return self.norm(h) if self.config.norm_output else h

    def normed(self, h: Tensor) -> Tensor:
        """What lm_head reads of a step's output [..., H]."""
        return h if self.config.norm_output else self.norm(h)

    def logits(self, h: Tensor) -> Tensor:
        """Logits [..., Vd] of a step's output [..., H]."""
        return self.lm_head(self.normed(h))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids, int64."""
        return draft_ids + self.d2t[draft_ids]

    def check_target(self, target: Target) -> None:
        """Raise CheckpointError if this head cannot draft for `target`; warn if it was made for another one's weights.

        Other rotary angles are a warning too: a loaded head keeps its own, with which it was trained.
        """
        c = self.config
        wanted = {"hidden size": c.target_hidden_size, "vocabulary": c.vocab_size}
        found = {"hidden size": target.hidden_size, "vocabulary": target.vocab_size}
        for name, size in wanted.items():
            if found[name] != size:
                raise CheckpointError(
                    f"the head was made for a target of {name} {size}; {target.path} has {found[name]}"
                )
        if c.capture_layers[-1] >= target.num_layers:
            raise CheckpointError(
                f"the head reads layers {list(c.capture_layers)}; {target.path} has {target.num_layers} layers"
            )
        if names := other_tables(target.model, self.inv_freq, self.rope_scaling):
            warnings.warn(
                f"the head turns by other angles ({c.rope_parameters}) than {target.path} ({', '.join(names)}): "
                "output stays right, few drafts may be accepted unless it was trained so",
                stacklevel=2,
            )
        # fp16 rounds an fp32 checkpoint otherwise than bf16 does
        if c.target_fingerprint not in (None, target.fingerprint) and target.dtype != torch.float16:
            warnings.warn(
                f"the head was trained for a target with other weights than {target.path} (fingerprint "
                f"{c.target_fingerprint}, found {target.fingerprint}): output stays right, few drafts may be accepted",
                stacklevel=2,
            )


def head_config(target: Target, draft_vocab_size: int, options: HeadOptions) -> HeadConfig:
    """Resolve what the user left open from the target.

    Raises:
        ConfigError: capture layers out of range, or sizes that do not fit together.
    """
    text = target.text_config
    fields = text.to_dict()
    same_width = options.hidden_size in (None, target.hidden_size)
    hidden = options.hidden_size or target.hidden_size
    heads = options.num_attention_heads or text.num_attention_heads
    default_dim = fields.get("head_dim") if same_width else None
    head_dim = options.head_dim or default_dim or hidden // heads
    layers = default_layers(target.num_layers) if options.capture_layers is None else options.capture_layers
    return HeadConfig(
        hidden_size=hidden,
        intermediate_size=options.intermediate_size or _told(fields, "intermediate_size", 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=options.num_key_value_heads or fields.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        capture_layers=check_layers(layers, target.num_layers),
        rope_parameters=dict(target_rope(text, head_dim, has_rotary(target.model)).parameters),
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=_told(fields, "rms_norm_eps", 1e-5),
        num_layers=options.num_layers,
        target_fingerprint=target.fingerprint,
        fc_norm=options.fc_norm,
        norm_before_residual=options.norm_before_residual,
        norm_output=options.norm_output,
        qk_norm=options.qk_norm,
        attention_bias=options.attention_bias,
        sliding_window=options.sliding_window,
    )


def _told(fields: dict, name: str, otherwise: Any) -> Any:
    """A setting of the target's config; where the family has none (LayerNorm, GPT-2), `otherwise`, and it is said."""
    if fields.get(name) is None:
        warnings.warn(f"the target's config has no {name}; the head takes {otherwise}", stacklevel=3)
        return otherwise
    return fields[name]


@torch.no_grad()
def _norm_weight(target: Target) -> Tensor:
    """The target's final RMSNorm as a plain multiplier [H] (Gemma stores weight - 1); ones if it has another norm."""
    size, eps = target.hidden_size, 1e-6
    ones = torch.ones(size)
    owner = next(m for m in target.model.modules() if target.layers in m.children())
    norms = [m for m in owner.children() if "norm" in type(m).__name__.lower()]
    if len(norms) != 1:
        return ones
    weight = norms[0](ones.to(target.device, target.dtype)[None])[0].float().cpu()
    x = torch.linspace(-2, 3, size)
    expected = F.rms_norm(x, (size,), weight, eps)
    found = norms[0](x.to(target.device, target.dtype)[None])[0].float().cpu()
    close = torch.allclose(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    return weight if close else ones
