"""DeepSpeed ZeRO-1, 2 and 3: an engine that reduces, clips and steps by itself, over flat partitions of the weights.

DeepSpeed runs in fp32 here (autocast does the rest), so that master weights and weights are the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3.errors import ConfigError
from eagle3_train.optim import set_learning_rate
from eagle3_train.parallel import Parallel


class Zero(Parallel):
    """`Parallel` over a DeepSpeed engine."""

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float):
        if type(optimizer) is not torch.optim.AdamW:
            # flat partitions know no matrices, and checkpoints no blocks of them
            raise ConfigError(
                "DeepSpeed steps over flat pieces of the weights: set optim.name adamw, or use DDP or FSDP2"
            )
        _configure(accelerator.deepspeed_plugin, clip)
        super().__init__(accelerator, module, optimizer, clip)
        self.engine: Any = self.wrapped
        # DeepSpeed's wrapper, and the optimiser inside, whose parameters are flat fp32 partitions
        self.zero: Any = self.optimizer
        self.optimizer = self.zero.optimizer

        self._autocast: Any = (torch.bfloat16, False)
        self._take_autocast_inside(module)

    def __call__(self, *inputs: Any) -> Any:
        kind = self.accelerator.device.type
        self._autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            return self.wrapped(*inputs)

    def _take_autocast_inside(self, module: nn.Module) -> None:
        """Engines turn off what autocast is on around them: it is turned on again inside."""
        forward, kind = module.forward, self.accelerator.device.type

        def autocast(*inputs: Any) -> Any:
            dtype, enabled = self._autocast
            with torch.autocast(kind, dtype, enabled=enabled):
                return forward(*inputs)

        module.forward = autocast

    @property
    def hooked(self) -> bool:
        return True

    @property
    def _sharded(self) -> bool:
        plugin: Any = self.accelerator.deepspeed_plugin
        return plugin.zero_stage == 3

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._note(loss)
        self.engine.backward(loss * self.world, scale_wrt_gas=False)

    def step(self, lr: float, step: int) -> float:
        set_learning_rate(self.optimizer, lr)
        # skips by itself what is not finite, and then tells of an infinite norm
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        self._check(norm, step)
        return norm

    def _held(self, parameter: Any) -> Tensor:
        return parameter.ds_tensor if self._sharded else parameter.detach()

    def _shape(self, name: str) -> torch.Size:
        parameter: Any = self.parameters[name]
        return parameter.ds_shape if self._sharded else parameter.shape

    def _gather(self, name: str, local: Tensor) -> Tensor:
        if not self._sharded:
            return local
        shape = self._shape(name)
        parts = torch.empty(self.world, local.numel(), dtype=local.dtype, device=self.accelerator.device)
        torch.distributed.all_gather([*parts], local.to(parts.device))
        return parts.flatten()[: shape.numel()].view(shape)

    def _fill(self, local: Tensor, whole: Tensor) -> None:
        local.copy_(self._part(whole) if self._sharded else whole)

    def _set(self, name: str, whole: Tensor) -> None:
        """Into what forwards use, and into the optimiser's masters."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        parameter = self.parameters[name]
        if not self._sharded:
            parameter.copy_(whole)
            safe_set_full_fp32_param(parameter, whole)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(whole)
        safe_set_local_fp32_param(parameter, self._part(whole))

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's piece of a flattened parameter, padded with zeros to equal pieces."""
        size = -(-whole.numel() // self.world)
        padded = F.pad(whole.flatten(), (0, size * self.world - whole.numel()))
        return padded.narrow(0, size * self.accelerator.process_index, size)

    def _flat(self, name: str) -> Tensor:
        """The partition of this rank that holds its share of the parameter, a key of the optimiser's states."""
        parameter = self.parameters[name]
        if self._sharded:
            group, _, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
            return self.zero.fp32_partitioned_groups_flat[group]
        group = next(i for i, ps in enumerate(self.zero.bit16_groups) if any(p is parameter for p in ps))
        return self.zero.single_partition_of_fp32_groups[group]

    def _whole_state(self, name: str) -> Iterator[tuple[str, Any]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flat(name)
        self._link(self.parameters[name], flat)
        for key, value in self.optimizer.state.get(flat, {}).items():
            of_weights = isinstance(value, Tensor) and value.shape == flat.shape
            yield key, safe_get_full_optimizer_state(self.parameters[name], key) if of_weights else value

    def _load_states(self, states: Iterator[tuple[str, dict[str, Any]]]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        for name, state in states:
            flat, parameter, shape = self._flat(name), self.parameters[name], self._shape(name)
            kept = self.optimizer.state[flat]
            for key, value in state.items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    kept[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                if value.shape != shape:
                    raise ConfigError(
                        f"the checkpoint's optimiser keeps {key} {list(value.shape)} for {name} {list(shape)}: "
                        "DeepSpeed partitions states of the weights' own shape alone; resume without it"
                    )
                kept.setdefault(key, torch.zeros_like(flat))
                if self._sharded:
                    safe_set_local_optimizer_state(parameter, self._part(value), key)
                else:
                    self._link(parameter, flat)
                    safe_set_full_optimizer_state(parameter, value, key)

    def _link(self, parameter: Any, flat: Tensor) -> None:
        """Tell ZeRO-1 and 2 which states there are: they look once, when the first group alone has stepped."""
        if not self._sharded and parameter._hp_mapping is not None:
            parameter._hp_mapping.set_optim_state_fragment(flat, self.optimizer.state[flat])


def _configure(plugin: Any, clip: float) -> None:
    """Our settings are the only ones of clipping, precision and accumulation.

    Raises:
        ConfigError: a ZeRO stage or a precision that we do not train in, an optimiser of DeepSpeed's own.
    """
    config = plugin.deepspeed_config
    if plugin.zero_stage not in (1, 2, 3):
        raise ConfigError(f"zero_stage is {plugin.zero_stage}; use 1, 2 or 3, or launch without DeepSpeed for DDP")
    for name in ("fp16", "bf16"):
        if config.get(name, {}).get("enabled") is True:
            raise ConfigError(f"the DeepSpeed config enables {name}; remove that, and set autocast: bfloat16 instead")
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ConfigError(f"the DeepSpeed config has its own {name}; remove it, and set optim in the run's config")
    config.update(gradient_clipping=clip, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=1)
    config["train_batch_size"] = "auto"
