"""accelerate as this trainer needs it, whatever launched it: on GPUs or CPU ranks, for DDP, FSDP2 or DeepSpeed."""

import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)

from eagle3.errors import ConfigError

# how long a process waits for the others before it gives them up; the longest thing that one does alone is writing
# a checkpoint
TIMEOUT = timedelta(minutes=30)


def open_accelerator(device: str, **settings: Any) -> Accelerator:
    """accelerate for `device` (cpu, cuda, ..., auto) in the launcher's environment, ready for CPU ranks too.

    Raises:
        ConfigError: the environment asks for what cannot be had: FSDP of version 1, DeepSpeed that is not
            installed, or DeepSpeed on the CPU of a machine with visible GPUs.
    """
    on_cpu = device == "cpu" or (device == "auto" and not torch.accelerator.is_available())
    zero, sharded = _asked_for("ACCELERATE_USE_DEEPSPEED"), _asked_for("ACCELERATE_USE_FSDP")
    if sharded and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP of version 1 is not supported: set fsdp_version: 2 (recipes/accelerate/fsdp2.yaml)")
    if zero:
        _prepare_deepspeed(on_cpu)
    accelerator = Accelerator(
        # under DeepSpeed accelerate takes `cpu` as a wish to go without it
        cpu=on_cpu and not zero,
        # `autocast` is the one setting of precision, whatever `accelerate config` says
        mixed_precision="no",
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="gloo" if on_cpu and zero else None, timeout=TIMEOUT),
            # the head's buffers never change; sent at every forward, they would tie evaluations together
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
        **settings,
    )
    if sharded and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate engages FSDP on accelerators only; this is the state that it would be in there
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    if zero:
        # transformers would shard every model that it loads from now on, the target too
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
    return accelerator


def _asked_for(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("true", "1")


def _prepare_deepspeed(on_cpu: bool) -> None:
    if find_spec("deepspeed") is None:
        raise ConfigError("this launch asks for DeepSpeed, which is not installed: pip install '.[scale]'")
    if not on_cpu:
        return
    if torch.accelerator.is_available():
        raise ConfigError("DeepSpeed on the CPU needs the GPUs hidden: set CUDA_VISIBLE_DEVICES='' for this launch")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # gloo serves; for this one DeepSpeed would call a compiler for a minute at its first start
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
