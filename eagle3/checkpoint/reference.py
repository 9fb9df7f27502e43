"""Save and load heads as `model.safetensors` + `config.json` in the reference EAGLE-3 naming.

What other tools do not know stands in our `eagle3` block of config.json; without that block a folder is read as
the reference code's (three default capture layers, no options), or as speculators' where it says so.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3.capture import default_layers
from eagle3.checkpoint import speculators
from eagle3.checkpoint.folder import CONFIG, WEIGHTS, write_folder
from eagle3.config import SCHEMA, HeadConfig, HeadOptions
from eagle3.errors import CheckpointError, ConfigError
from eagle3.heads.eagle3 import Eagle3Head
from eagle3.target import Target
from eagle3.vocab import check_vocab_map, identity_map

# a head's options beside its sizes and number of layers
OPTIONS = ("fc_norm", "norm_before_residual", "norm_output", "qk_norm", "attention_bias", "sliding_window")
_OWN = ("capture_layers", "target_fingerprint", "trained_length", "num_layers", *OPTIONS)
_SIZES = tuple(f.name for f in dataclasses.fields(HeadConfig) if f.name not in _OWN)
_REPAIR = 'add "eagle3": {"schema": 1, "capture_layers": [...]} naming the 0-based layers whose outputs it reads'
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_head(folder: str | Path, head: Eagle3Head, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the head's folder; floating weights are stored in `dtype`. The folder appears complete or not at all.

    Raises:
        CheckpointError: the folder cannot be written, or holds something that is no head.
    """
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / WEIGHTS).is_file()):
        raise CheckpointError(f"{str(folder)!r} exists and is no head's folder: it is not overwritten")
    return write_folder(folder, stored_tensors(head, dtype), config_json(head.config, dtype), {})


def stored_tensors(head: Eagle3Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a checkpoint of the head holds: its tensors on the CPU, floating ones in `dtype`."""
    state = {k: v.detach().cpu() for k, v in head.state_dict().items()}
    return {k: (v.to(dtype) if v.is_floating_point() else v).contiguous() for k, v in state.items()}


def config_json(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The reference config's keys, plus the `eagle3` block."""
    reference = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_parameters.get("rope_theta"),
        "rope_parameters": config.rope_parameters,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    own = {name: getattr(config, name) for name in _OWN}
    return {**reference, "eagle3": {"schema": SCHEMA, **own}}


def load_head(folder: str | Path, target: Target, dtype: torch.dtype | None = None) -> Eagle3Head:
    """Load a head for `target`.

    Args:
        folder: holds model.safetensors and config.json.
        dtype: of the weights; None = the target's.
    Raises:
        CheckpointError: files missing or broken, a tensor missing, extra or mis-shaped, made for another target.
        VocabMapError: the map is no injection into the target's vocabulary.
    """
    folder = Path(folder)
    config = read_config(folder, target)
    state = _read_weights(folder / WEIGHTS)
    _check_sizes(config, state, folder)
    with torch.random.fork_rng(devices=[]):
        head = _skeleton(config, state)
    _check_state(head, state, folder)
    head.load_state_dict(state)
    head.check_target(target)
    return head.to(target.device, dtype or target.dtype).eval()


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the weights in the folder of a head that load_head takes."""
    return _read_weights(folder / WEIGHTS)["fc.weight"].dtype


def read_config(folder: Path, target: Target) -> HeadConfig:
    """The head's settings; a folder without our block gets the reference's defaults for `target`.

    Raises:
        CheckpointError: a file is missing or broken, a setting is unknown, absent or impossible.
    """
    content = _read_json(folder)
    if speculators.MARK in content:
        try:
            content = speculators.reference_config(content)
        except (CheckpointError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{folder / CONFIG}: {error}") from error
    if content.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{folder / CONFIG}: hidden_act {content['hidden_act']!r} is not silu, the only one here")
    try:
        return _config_of(content, target, folder)
    except (TypeError, ValueError, AttributeError, ConfigError) as error:
        # the file is another tool's, or edited by hand: any value may be of any type
        raise CheckpointError(f"{folder / CONFIG}: {error}") from error


def _config_of(content: dict[str, Any], target: Target, folder: Path) -> HeadConfig:
    own = content["eagle3"] if "eagle3" in content else _foreign_block(content, target, folder)
    if not isinstance(own, dict) or own.get("schema") != SCHEMA:
        schema = own.get("schema") if isinstance(own, dict) else own
        raise CheckpointError(f"{folder / CONFIG}: schema {schema!r} is not {SCHEMA}, the one this version reads")
    if unknown := sorted(own.keys() - {"schema", *_OWN}):
        raise CheckpointError(f"{folder / CONFIG}: the eagle3 block has unknown settings {unknown}; known: {_OWN}")
    sizes = {name: content[name] for name in _SIZES if content.get(name) is not None}
    options = {name: value for name, value in own.items() if name != "schema"}
    return HeadConfig(**{**_implied(content, folder), **sizes, **options})


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"draft head folder {str(folder)!r} {what}")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = name == WEIGHTS and (folder / "pytorch_model.bin").is_file()
            hint = "; convert its pytorch_model.bin to safetensors first" if pickled else ""
            raise CheckpointError(f"{str(folder)!r} is no head: {name} is missing{hint}")
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG} holds no JSON object")
    return content


def _implied(content: dict, folder: Path) -> dict[str, Any]:
    """What a reference config.json may leave out."""
    hidden, heads = content.get("hidden_size"), content.get("num_attention_heads")
    defaults = HeadOptions()
    implied = {
        **{name: getattr(defaults, name) for name in OPTIONS},
        "target_hidden_size": hidden,
        "draft_vocab_size": content.get("vocab_size"),
        "num_key_value_heads": heads,
        "num_layers": content.get("num_hidden_layers", defaults.num_layers),
    }
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        implied["head_dim"] = hidden // heads
    if not content.get("rope_parameters"):
        implied["rope_parameters"] = _rope_parameters(content, folder)
    return implied


def _rope_parameters(content: dict, folder: Path) -> dict[str, Any]:
    """transformers 4 kept rope_theta and rope_scaling apart."""
    if content.get("rope_theta") is None:
        raise CheckpointError(
            f"{folder / CONFIG} has neither rope_parameters nor rope_theta; add the one it was trained with"
        )
    scaling = dict(content.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    return {"rope_type": kind, "rope_theta": content["rope_theta"], **scaling}


def _foreign_block(content: dict, target: Target, folder: Path) -> dict[str, Any]:
    """Our block for a reference checkpoint: default layers, unless it names others (in which numbering?)."""
    if target.num_layers < 7:
        raise CheckpointError(f"{folder / CONFIG} does not say which of {target.num_layers} layers it reads; {_REPAIR}")
    layers = default_layers(target.num_layers)
    key = "eagle_aux_hidden_state_layer_ids"
    named = (content.get("eagle_config") or {}).get(key) or content.get(key) or list(layers)
    # listed in any order, they are concatenated in layer order
    if sorted(named) not in (list(layers), [i + 1 for i in layers]):
        raise CheckpointError(
            f"{folder / CONFIG} captures layers {named}, and tools number them in two ways (output of layer i, or of "
            f"layer i - 1); {_REPAIR}"
        )
    unknown = [k for k in ("fc_norm", "norm_output", "norm_before_residual", "norm_before_fc") if content.get(k)]
    if unknown:
        raise CheckpointError(
            f"{folder / CONFIG} sets {unknown}: only plain reference heads are read without our block"
        )
    return {"schema": SCHEMA, "capture_layers": layers, "attention_bias": bool(content.get("attention_bias"))}


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    # the serving engines' naming of the same tensors
    return {k.replace("layers.0.", "midlayer.", 1) if k.startswith("layers.0.") else k: v for k, v in state.items()}


def _skeleton(config: HeadConfig, state: dict[str, Tensor]) -> Eagle3Head:
    """A head with the checkpoint's vocabulary map; equal vocabulary sizes need no map."""
    if "d2t" not in state:
        if config.draft_vocab_size != config.vocab_size:
            raise CheckpointError(
                f"d2t is missing although the draft vocabulary ({config.draft_vocab_size}) is smaller than the "
                f"target's ({config.vocab_size})"
            )
        vocab_map = identity_map(config.vocab_size)
    else:
        vocab_map = check_vocab_map(state["d2t"], state.get("t2d"), config.vocab_size)
    state["d2t"], state["t2d"] = vocab_map.d2t, vocab_map.t2d
    if vocab_map.d2t.shape[0] != config.draft_vocab_size:
        raise CheckpointError(f"d2t has {vocab_map.d2t.shape[0]} entries, config.json says {config.draft_vocab_size}")
    return Eagle3Head(config, vocab_map)


def _check_sizes(config: HeadConfig, state: dict[str, Tensor], folder: Path) -> None:
    """Compare the sizes in config.json with the file's before a head of those sizes is built."""
    layers = 1 + len({name.split(".")[1] for name in state if name.startswith("layers.")})
    if config.num_layers != layers:
        raise CheckpointError(f"{folder / CONFIG} says {config.num_layers} layers, {folder / WEIGHTS} holds {layers}")
    wanted = {
        "fc.weight": (config.hidden_size, config.feature_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "midlayer.self_attn.q_proj.weight": (config.num_attention_heads * config.head_dim, 2 * config.hidden_size),
        "midlayer.self_attn.k_proj.weight": (config.num_key_value_heads * config.head_dim, 2 * config.hidden_size),
        "midlayer.mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
    }
    for name, shape in wanted.items():
        if name in state and tuple(state[name].shape) != shape:
            raise _mis_shaped(folder, name, state[name], shape)


def _mis_shaped(folder: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{folder / WEIGHTS}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")


def _check_state(head: Eagle3Head, state: dict[str, Tensor], folder: Path) -> None:
    wanted = head.state_dict()
    if not head.config.owns_embedding:
        # the reference code saves no embedding, some tools save the target's: not ours to use
        state.pop("embed_tokens.weight", None)
    if missing := sorted(wanted.keys() - state.keys()):
        raise CheckpointError(f"{folder / WEIGHTS} lacks {', '.join(missing)}")
    if extra := sorted(state.keys() - wanted.keys()):
        raise CheckpointError(f"{folder / WEIGHTS} has tensors that this head does not: {', '.join(extra)}")
    for name, tensor in wanted.items():
        if state[name].shape != tensor.shape:
            raise _mis_shaped(folder, name, state[name], tensor.shape)
        if tensor.is_floating_point() and state[name].dtype not in _FLOATS:
            raise CheckpointError(f"{folder / WEIGHTS}: {name} is {state[name].dtype}; quantised heads are not read")
        if tensor.is_floating_point() and not state[name].isfinite().all():
            raise CheckpointError(f"{folder / WEIGHTS}: {name} holds NaN or infinity")
