"""Where a target lies that is too large for one device: its layers spread over devices, or divided among ranks.

Embedding, final norm and lm_head stay whole on the head's device, in every process: heads read them row by row.
"""

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from eagle3.errors import ConfigError, UnsupportedTargetError

PLACEMENTS = ("whole", "device_map", "tensor_parallel")
# of what is free on the head's device: the rest is for the head's training
HEAD_DEVICE_SHARE = 0.5
_WITHOUT_INDEX = ("cpu", "mps")


def device_map(model: Any, layers_name: str, places: Sequence[int | str], device: torch.device) -> dict[str, Any]:
    """transformers' device map: layer i on `places[i]`, everything else on `device`.

    Args:
        layers_name: of the list of decoder layers, as model.layers.
        places: a device index, cpu or disk for each layer.
    """
    main = _key(device)
    found: dict[str, Any] = {f"{layers_name}.{i}": place for i, place in enumerate(places)}
    owner = model
    path = ""
    for part in layers_name.split("."):
        found |= {path + name: main for name, _ in owner.named_children() if name != part}
        found |= {path + name: main for name, _ in owner.named_parameters(recurse=False)}
        owner, path = getattr(owner, part), f"{path}{part}."
    return found


def spread_layers(model: Any, layers: nn.ModuleList, device: torch.device, dtype: torch.dtype) -> list[int | str]:
    """A place for each layer, by what is free on the devices of this process.

    The devices that this process sees are shared among the processes of its machine: the i-th takes i, i + n, ...

    Args:
        model: on the meta device.
        device: the head's; the weights outside of the layers lie there, too.
    """
    if device.type in _WITHOUT_INDEX:
        return [device.type] * len(layers)
    size = torch.finfo(dtype).bits // 8
    sizes = [size * sum(p.numel() for p in layer.parameters()) for layer in layers]
    rest = size * sum(p.numel() for p in model.parameters()) - sum(sizes)
    main, count = device.index or 0, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = torch.get_device_module(device)
    room = {i: backend.mem_get_info(i)[0] for i in range(main % count, backend.device_count(), count)}
    room[main] = int(HEAD_DEVICE_SHARE * (room[main] - rest))
    # the first layer lies where the embedding does
    places = spread(sizes, {main: room.pop(main), **room})
    if "cpu" in places:
        warnings.warn(
            f"{places.count('cpu')} of the target's {len(places)} layers do not fit on the devices {[main, *room]}: "
            "they stay in the CPU's memory, which is slow; tensor_parallel over more processes, or offline features?",
            stacklevel=2,
        )
    return places


def spread(sizes: Sequence[int], room: Mapping[int, int]) -> list[int | str]:
    """A device for each layer: neighbours together, in proportion to the room; the CPU takes what fits nowhere."""
    places: list[int | str] = []
    total, left, at = sum(sizes), sum(room.values()), 0
    share = min(1.0, total / left) if left > 0 else 1.0
    for device, free in room.items():
        used = 0
        last = device == next(reversed(room))
        while at < len(sizes) and used + sizes[at] <= free and (last or used + sizes[at] / 2 <= share * free):
            used, at = used + sizes[at], at + 1
            places.append(device)
    return places + ["cpu"] * (len(sizes) - at)


def tensor_plan(model: Any, layers_name: str, device: torch.device) -> dict[str, str]:
    """The model's own tensor-parallel plan, of its decoder layers alone.

    Raises:
        ConfigError: one process, or a device that transformers would not divide over.
        UnsupportedTargetError: a family without a plan.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() < 2:
        raise ConfigError("tensor_parallel divides the target among processes and there is one: accelerate launch more")
    accelerator = torch.accelerator.current_accelerator()
    if device.type != ("cpu" if accelerator is None else accelerator.type):
        raise ConfigError(f"tensor_parallel divides over this machine's {accelerator} devices, not over {device}")
    names = [name for name, _ in model.named_parameters()]
    plan = {
        pattern: style
        for pattern, style in (model.tp_plan or {}).items()
        if pattern.startswith(f"{layers_name}.") and any(re.match(pattern.replace("*", r"\d+"), x) for x in names)
    }
    if not plan:
        raise UnsupportedTargetError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; use device_map or offline features"
        )
    return plan


def _key(device: torch.device) -> int | str:
    """How transformers' device maps name a device."""
    return device.type if device.type in _WITHOUT_INDEX else device.index or 0
