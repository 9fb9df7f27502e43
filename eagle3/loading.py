"""Read a causal LM from its files: whole, cut to its first decoder layers, or placed on several devices.

Knows transformers' loading, not the seam.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.placement import device_map, spread_layers, tensor_plan

# what transformers raises on files that are missing, broken, foreign or do not fit together
LOAD_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
_FSDP_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_SAMPLES, _SAMPLE_BYTES = 1024, 4096


def load_model(
    folder: str,
    dtype: torch.dtype | None,
    device: torch.device,
    layers: int | None = None,
    placement: str | Sequence[int | str] = "whole",
) -> tuple[Any, int]:
    """The checkpoint's model where it shall lie, and its number of decoder layers; dtype None is the checkpoint's own.

    Args:
        layers: read only the first `layers` decoder layers, beside embedding, final norm and lm_head; the others'
            tensors are never read. The model's config then tells `layers` as its number of layers, and keeps every
            list that has one entry per layer, as each layer looks its own up.
        placement: one of eagle3.placement.PLACEMENTS, or a place for each layer (device index, cpu, disk).
    Raises:
        ConfigError: weights that are missing or have another shape than the config says.
        UnsupportedTargetError: the model cannot be cut, as its other weights depend on the number of layers, or not
            be divided.
        LOAD_ERRORS: whatever transformers raises on broken files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config(decoder=True)
    depth = text.num_hidden_layers
    text.num_hidden_layers = kept = depth if layers is None else min(layers, depth)
    with undivided(), _quiet() if kept < depth else nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype or "auto",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **({} if placement == "whole" else _placed(config, dtype, device, placement)),
        )
    model, report = loaded
    if kept < depth:
        _check_cut(model, report, kept, depth)
    _check_weights(folder, report)
    return model.to(device) if placement == "whole" else model, depth


def _placed(config: Any, dtype: torch.dtype | None, device: torch.device, placement: str | Sequence) -> dict[str, Any]:
    """What from_pretrained is told of the placement, found on a model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    name, layers = decoder_layers(model, config.get_text_config(decoder=True).num_hidden_layers)
    if placement == "tensor_parallel":
        from transformers.distributed.configuration_utils import DistributedConfig

        plan = tensor_plan(model, name, device)
        return {"distributed_config": DistributedConfig(tp_size=torch.distributed.get_world_size(), tp_plan=plan)}
    if placement == "device_map":
        placement = spread_layers(model, layers, device, dtype or config.dtype or torch.float32)
    return {"device_map": device_map(model, name, placement, device)}


def decoder_layers(model: Any, count: int) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's `count` decoder layers."""
    lists = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    for name, layers in lists:
        if any(hasattr(part, "layer_idx") for part in layers[0].modules()):
            return name, layers
    raise UnsupportedTargetError(f"{type(model).__name__}: no list of {count} decoder layers with attention was found")


@contextmanager
def undivided() -> Iterator[None]:
    """Every rank loads whole weights, although the head's framework (ZeRO-3, FSDP) is set up to divide a model's.

    transformers asks a live HfDeepSpeedConfig (then it partitions what it loads) and accelerate's FSDP variables
    (then every rank but the first gets empty weights, to be filled by FSDP); the target is in neither's hands.
    """
    from transformers.integrations import deepspeed

    reference, variable = deepspeed._hf_deepspeed_config_weak_ref, os.environ.get(_FSDP_LOADING)
    zero_config = None if reference is None else reference()
    deepspeed.unset_hf_deepspeed_config()
    os.environ[_FSDP_LOADING] = "false"
    try:
        yield
    finally:
        if zero_config is not None:
            deepspeed.set_hf_deepspeed_config(zero_config)
        del os.environ[_FSDP_LOADING]
        if variable is not None:
            os.environ[_FSDP_LOADING] = variable


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' table of unused weights, which a cut makes on purpose."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check_weights(folder: str, report: dict[str, Any]) -> None:
    why = f"target {folder!r} cannot be loaded"
    if odd := sorted(report["mismatched_keys"]):
        name, found, expected = odd[0]
        raise ConfigError(f"{why}: {name} has the shape {list(found)}; its config asks for {list(expected)}")
    if absent := sorted(report["missing_keys"]):
        raise ConfigError(f"{why}: it lacks {len(absent)} weights, which would stay random: {', '.join(absent[:4])}")


def _check_cut(model: Any, report: dict[str, Any], layers: int, depth: int) -> None:
    """Raise unless exactly the other decoder layers were left out, and the rest is what the whole model has."""
    why = f"{type(model).__name__} cannot be cut to {layers} of its {depth} layers, as offline features need"
    # Gemma 3n and some of Gemma 4 embed each token once per layer, in one matrix
    if wide := sorted(name for name, *_ in report["mismatched_keys"]):
        raise UnsupportedTargetError(f"{why}: the shapes of {', '.join(wide[:4])} depend on their number; use online")
    name, _ = decoder_layers(model, layers)
    inside = [re.search(rf"(?:^|\.){name.rpartition('.')[2]}\.(\d+)\.", key) for key in report["unexpected_keys"]]
    indexes = {int(match[1]) for match in inside if match}
    # past the last one may lie layers for multi-token prediction, which the whole model leaves out, too
    if not indexes or min(indexes) < layers:
        raise UnsupportedTargetError(f"{why}: the weights left out are of layers {sorted(indexes)}; use online")


def weights_digest(folder: str) -> str | None:
    """Short hash of a checkpoint's files, whatever of them was loaded: their sizes, and samples that meet every tensor
    above a thousandth of its file. None: no safetensors files on this disk.

    Args:
        folder: as resolve_path gives it; of a hub id the cached files count.
    """
    digest, files = hashlib.blake2b(digest_size=8), _weight_files(folder)
    for path in files:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest() if files else None


def _weight_files(folder: str) -> list[Path]:
    path = Path(folder)
    if not path.is_dir():
        found = try_to_load_from_cache(folder, "config.json")
        if not isinstance(found, str):
            return []
        path = Path(found).parent
    return sorted(path.glob("*.safetensors"))
