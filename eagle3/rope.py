"""Rotary position tables of heads: the target's own, for every rope type that transformers knows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3.errors import ConfigError, UnsupportedTargetError

# types whose frequencies depend on the longest position of a batch: rows must stay below a threshold
SWITCHING_TYPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary parameters in transformers' naming (`rope_type`, `rope_theta`, `factor`, ...), per head_dim."""

    parameters: Mapping[str, Any]
    head_dim: int
    max_positions: int

    def tables(self) -> tuple[Tensor, float]:
        """Inverse frequencies [rotary_dim / 2] fp32 and the factor on cos and sin.

        Raises:
            ConfigError: the rope type is unknown to the installed transformers.
        """
        parameters = dict(self.parameters)
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            dim = int(self.head_dim * parameters.get("partial_rotary_factor", 1.0))
            theta = parameters["rope_theta"]
            return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0
        return _scaled_tables(kind, parameters, self.head_dim, self.max_positions)


def _scaled_tables(kind: str, parameters: dict, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"rope_type {kind!r} is unknown; known: {sorted(['default', *ROPE_INIT_FUNCTIONS])}")
    # one head of the right width: LlamaConfig is only the carrier that the init functions read from
    carrier = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](carrier, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `cos.shape[-1]` dims of x [heads, T, d] by cos, sin [T, rotary_dim] (NeoX halves)."""
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def cos_sin(inv_freq: Tensor, scaling: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables [T, rotary_dim] at `positions` [T], computed in fp32 and rounded to `dtype`."""
    angles = positions.float()[:, None] * inv_freq.float()
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def target_rope(text_config, head_dim: int) -> RopeSpec:
    """The rotary parameters of a target's full-attention layers; theta 10000 where the target has no rope."""
    parameters = getattr(text_config, "rope_parameters", None) or {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }
    if "rope_theta" not in parameters and "rope_type" not in parameters:
        # one set per layer type (Gemma 3): drafts attend to everything
        if "full_attention" not in parameters:
            raise UnsupportedTargetError(f"rope parameters per layer type without full_attention: {list(parameters)}")
        parameters = parameters["full_attention"]
    parameters = {k: v for k, v in parameters.items() if v is not None}
    return RopeSpec(parameters, head_dim, text_config.max_position_embeddings)


def position_limit(text_config) -> int:
    """Positions a row may use: the model's maximum, or the point where its rope would switch tables."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    limit = text_config.max_position_embeddings
    for one in nested:
        if one.get("rope_type") in SWITCHING_TYPES:
            limit = min(limit, one.get("original_max_position_embeddings") or limit)
    return limit


def check_against_target(model, inv_freq: Tensor, head_dim: int) -> None:
    """Raise if the target's own rotary buffers differ from ours (head dims that differ are not compared)."""
    buffers = {
        name: b
        for name, b in model.named_buffers()
        if name.endswith(("inv_freq",)) and "original" not in name and "sliding_attention" not in name
    }
    same_width = [b for b in buffers.values() if b.shape == inv_freq.shape]
    if same_width and not any(torch.allclose(b.float().cpu(), inv_freq, rtol=1e-6, atol=0) for b in same_width):
        raise UnsupportedTargetError(
            f"none of the target's rotary tables {sorted(buffers)} equals the one built from its config "
            f"(head_dim {head_dim}); the head would be trained with other angles than the target's"
        )
