"""Rotary position tables of heads: the target's own, for every rope type that transformers knows."""

import warnings
from collections.abc import Iterator, Mapping
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
            ConfigError: the rope type is unknown to the installed transformers, or its parameters do not fit.
        """
        parameters = dict(self.parameters)
        kind = parameters.get("rope_type", "default")
        if kind == "default":
            dim = int(self.head_dim * parameters.get("partial_rotary_factor", 1.0))
            if parameters.get("rope_theta") is None:
                raise ConfigError(f"rope parameters {parameters} lack rope_theta")
            if not isinstance(parameters["rope_theta"], int | float) or not parameters["rope_theta"] > 0:
                raise ConfigError(f"rope_theta is {parameters['rope_theta']!r}; it must be a number above 0")
            return 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim), 1.0
        return _scaled_tables(kind, parameters, self.head_dim, self.max_positions)


def _scaled_tables(kind: str, parameters: dict, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"rope_type {kind!r} is unknown; known: {sorted(['default', *ROPE_INIT_FUNCTIONS])}")
    try:
        # one head of the right width: LlamaConfig is only the carrier that the init functions read from
        carrier = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](carrier, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"rope parameters {parameters} do not fit a head_dim of {head_dim} ({error}); longrope's factors belong to "
            "the target's own head_dim: set head.head_dim to it"
        ) from error
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


def has_rotary(model) -> bool:
    """Whether the model turns its queries and keys by rotary tables."""
    return any(True for _ in _rotary_tables(model))


def target_rope(text_config, head_dim: int, rotary: bool = True) -> RopeSpec:
    """The rotary parameters of a target's full-attention layers; theta 10000, with a warning, where it has no rope.

    Args:
        rotary: whether the model has rotary tables (has_rotary); its config must then tell their parameters.
    Raises:
        UnsupportedTargetError: parameters that are not told, or told for layer types without full attention.
    """
    parameters = text_config.to_dict().get("rope_parameters")
    if not parameters:
        if rotary:
            raise UnsupportedTargetError(
                f"{type(text_config).__name__} has no rope_parameters, so the angles of its rotary tables are unknown"
            )
        warnings.warn("the target has no rotary positions; the head gets its own, of theta 10000", stacklevel=3)
        parameters = {"rope_type": "default", "rope_theta": 10000.0}
    if "rope_theta" not in parameters and "rope_type" not in parameters:
        # one set per layer type (Gemma 3): drafts attend to everything
        if "full_attention" not in parameters:
            raise UnsupportedTargetError(f"rope parameters per layer type without full_attention: {list(parameters)}")
        parameters = parameters["full_attention"]
    parameters = {k: v for k, v in parameters.items() if v is not None}
    return RopeSpec(parameters, head_dim, text_config.max_position_embeddings)


def position_limit(text_config) -> int:
    """Positions a row may use: the model's maximum, or the point where its rope would switch tables."""
    parameters = text_config.to_dict().get("rope_parameters") or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    limit = text_config.max_position_embeddings
    for one in nested:
        if one.get("rope_type") in SWITCHING_TYPES:
            limit = min(limit, one.get("original_max_position_embeddings") or limit)
    return limit


def other_tables(model, inv_freq: Tensor, scaling: float) -> list[str]:
    """Names of the target's rotary tables of this width where none of them is ours (other widths are no match)."""
    tables = [table for table in _rotary_tables(model) if table[1].shape == inv_freq.shape]
    same = any(_same_table(theirs, factor, inv_freq, scaling) for _, theirs, factor in tables)
    return [] if same else [name for name, *_ in tables]


def check_against_target(model, inv_freq: Tensor, scaling: float) -> None:
    """Raise if none of the target's rotary tables of this width is ours (other widths cannot be compared)."""
    if names := other_tables(model, inv_freq, scaling):
        raise UnsupportedTargetError(
            f"none of the target's rotary tables {names} equals the one built from its config; "
            "the head would be trained with other angles than the target's"
        )


def _rotary_tables(model) -> Iterator[tuple[str, Tensor, float]]:
    """Name, inverse frequencies and cos/sin factor of the tables for full attention."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and "sliding_attention" not in name:
                factor = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                yield f"{path}.{name}", buffer, float(factor)


def _same_table(theirs: Tensor, their_scaling: float, ours: Tensor, our_scaling: float) -> bool:
    # a model that was cast as a whole holds rounded frequencies
    rtol = max(1e-6, torch.finfo(theirs.dtype).eps if theirs.dtype != torch.float32 else 0.0)
    close = torch.allclose(theirs.float().cpu(), ours.float().cpu(), rtol=rtol, atol=0)
    return close and abs(their_scaling - our_scaling) <= 1e-6 * abs(our_scaling)
