"""What the loader of a serving engine reads of a head, and what of a head it would not read as it is meant.

The engines' loaders are lax: an option or a numbering that they do not know, a tensor that is not there, cost
acceptance, mostly without a line in the log. So whatever is not known to be read is refused here. Knows no files; one
file per engine fills this in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.checkpoint import reference
from eagle3.config import HeadConfig, HeadOptions
from eagle3.errors import CheckpointError

# options of a head that the reference EAGLE-3 code lacks
OPTIONS = ("num_layers", *reference.OPTIONS)
# those that engines read as keys of config.json
_SWITCHES = ("fc_norm", "norm_before_residual", "norm_output")
_THETA = frozenset({"rope_theta", "rope_type"})
ROPES = {
    "default": _THETA,
    "linear": _THETA | {"factor"},
    "llama3": _THETA | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


@dataclass(frozen=True)
class Launch:
    """One way of running the exported head.

    Args:
        folder: the exported one.
        target: folder or hub id of the target.
        drafts: tokens drafted per round, as a chain.
    """

    folder: str
    target: str
    drafts: int


@dataclass(frozen=True)
class ServingFormat:
    """A head's folder as one engine reads it.

    Args:
        engine: its name, with the version whose loader was read.
        shift: what the engine's number of a captured stream is above ours (the output of 0-based layer i).
        options: of OPTIONS, those that it reads; the others must be at their defaults.
        ropes: rope types that it computes as transformers does, and the parameters that it reads of each.
        own_width: whether the head may have another width than the target, and then its own embedding.
        fc_by_width: it applies fc to what is not as wide as the head, so a feature of the head's width goes past it.
        reads_layers: it reads the captured streams' numbers from config.json.
        command: the shell command that serves the head.
        texts: further files of the folder, by name.
    """

    engine: str
    shift: int
    options: frozenset[str]
    ropes: Mapping[str, frozenset[str]]
    own_width: bool
    fc_by_width: bool
    reads_layers: bool
    command: Callable[[Launch], str]
    texts: Callable[[HeadConfig, Launch], dict[str, str]] = lambda config, launch: {}

    def layer_ids(self, config: HeadConfig) -> list[int]:
        """The capture layers in the engine's numbering."""
        return [layer + self.shift for layer in config.capture_layers]

    def config_json(self, config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
        """The reference's keys with our block, which this package reads back, and the engine's."""
        content = reference.config_json(config, dtype) | {"rope_scaling": _rope_scaling(config.rope_parameters)}
        content |= {name: True for name in _SWITCHES if getattr(config, name)}
        if config.sliding_window is not None:
            kinds = ["sliding_attention"] * config.num_layers
            content |= {"sliding_window": config.sliding_window, "layer_types": kinds}
        if self.reads_layers:
            ids = self.layer_ids(config)
            content["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        return content

    def check(self, config: HeadConfig) -> None:
        """Raise CheckpointError naming all of the head that the engine would not read as it is meant."""
        if unread := [*self._unread_options(config), *self._unread_rope(config), *self._unread_sizes(config)]:
            raise CheckpointError(
                f"{self.engine} does not read {'; '.join(unread)}: it would refuse the head, or draft with another, of "
                "low acceptance. Train a head without that (recipes/base), or run this one with eagle3-infer"
            )

    def _unread_options(self, config: HeadConfig) -> list[str]:
        usual = HeadOptions()
        chosen = {name: getattr(config, name) for name in OPTIONS if getattr(config, name) != getattr(usual, name)}
        return [f"head.{name} ({value})" for name, value in chosen.items() if name not in self.options]

    def _unread_rope(self, config: HeadConfig) -> list[str]:
        kind = config.rope_parameters.get("rope_type", "default")
        if kind not in self.ropes:
            return [f"rope_type {kind!r} (only {', '.join(sorted(self.ropes))})"]
        given = {key for key, value in config.rope_parameters.items() if value is not None}
        return [f"{key} of rope_type {kind!r}" for key in sorted(given - self.ropes[kind])]

    def _unread_sizes(self, config: HeadConfig) -> list[str]:
        unread = []
        if config.hidden_size % config.num_attention_heads:
            # transformers' LlamaConfig, which all of them read config.json by, refuses it
            unread.append(f"{config.num_attention_heads} attention heads, which {config.hidden_size} is no multiple of")
        if config.owns_embedding and not self.own_width:
            unread.append(f"head.hidden_size ({config.hidden_size}, the target's is {config.target_hidden_size})")
        if self.fc_by_width and config.feature_size == config.hidden_size:
            unread.append(
                f"fc of head.capture_layers {list(config.capture_layers)} (the feature is as wide as the head, "
                f"{config.hidden_size}, which to it means that fc was applied)"
            )
        return unread


def _rope_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """What transformers 4 reads beside rope_theta; 5 reads rope_parameters."""
    if parameters.get("rope_type", "default") == "default":
        return None
    return {key: value for key, value in parameters.items() if key != "rope_theta"}
