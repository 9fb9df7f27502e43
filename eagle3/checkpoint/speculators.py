"""Read the config of vllm-project/speculators' EAGLE-3 checkpoints as a reference one with our block.

Their tensors carry the serving engines' names, which eagle3.checkpoint.reference knows. Their layer id i is the
INPUT of decoder layer i, one more than our number of the same stream.
"""

from typing import Any

from eagle3.config import SCHEMA
from eagle3.errors import CheckpointError

MARK = "speculators_model_type"
# what a checkpoint must say, because no default would be safe to assume
_REQUIRED = ("transformer_layer_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
_SHARED = ("fc_norm", "norm_output", "norm_before_residual")


def reference_config(content: dict[str, Any]) -> dict[str, Any]:
    """The keys of a reference config.json, `eagle3` block included, for a speculators one.

    Raises:
        CheckpointError: another algorithm's checkpoint, a key that is missing, or an option that heads here lack.
    """
    if content[MARK] != "eagle3":
        raise CheckpointError(f"a speculators checkpoint of {content[MARK]!r}; only 'eagle3' is read here")
    if absent := [key for key in _REQUIRED if not content.get(key)]:
        raise CheckpointError(f"a speculators config without {', '.join(absent)}")
    if content.get("norm_before_fc"):
        raise CheckpointError(
            "norm_before_fc (one norm over all captured states) is no option of a head here; train it with "
            "--no-norm-before-fc, or with --fc-norm, one norm for each"
        )
    layer = _whole(content["transformer_layer_config"])
    sizes = {key: value for key, value in layer.items() if key not in ("sliding_window", "layer_types")}
    hidden = content.get("target_hidden_size") or layer.get("hidden_size")
    own = {
        "schema": SCHEMA,
        "capture_layers": _our_layers(content["eagle_aux_hidden_state_layer_ids"]),
        **{key: bool(content.get(key)) for key in _SHARED},
        "qk_norm": layer.get("model_type") == "qwen3",
        "attention_bias": bool(layer.get("attention_bias")),
        "sliding_window": _window(layer),
    }
    return {**sizes, "draft_vocab_size": content["draft_vocab_size"], "target_hidden_size": hidden, "eagle3": own}


def _whole(layer: dict[str, Any]) -> dict[str, Any]:
    """The decoder layer's config in full: the file holds only what differs from the class's defaults."""
    from transformers import AutoConfig

    kind = layer.get("model_type")
    if kind not in ("llama", "qwen3"):
        raise CheckpointError(f"transformer_layer_config is of model_type {kind!r}; llama and qwen3 are read")
    given = {key: value for key, value in layer.items() if key != "model_type"}
    return AutoConfig.for_model(kind, **given).to_dict()


def _our_layers(ids: list[int]) -> list[int]:
    if min(ids) < 1:
        raise CheckpointError(f"captures layer ids {ids}: id 0 is the embedding, which heads here do not read")
    return sorted(i - 1 for i in ids)


def _window(layer: dict[str, Any]) -> int | None:
    """The window of all layers, None where all attend to everything; theirs may mix the two."""
    kinds = set(layer.get("layer_types") or ["full_attention"])
    if len(kinds) > 1:
        raise CheckpointError(f"mixes layers of {' and '.join(sorted(kinds))}; a head here has one kind")
    return layer.get("sliding_window") if kinds == {"sliding_attention"} else None
