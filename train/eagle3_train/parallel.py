"""One trained module under plain PyTorch, DDP, FSDP2 or DeepSpeed ZeRO: what differs between them, in one place.

Knows processes and parameters, nothing of heads or losses. `local` tensors are what a process holds of a parameter
(all of it, or its shard); `whole` ones are the parameter itself.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3.errors import Eagle3Error
from eagle3_train.optim import set_learning_rate

# name of a parameter -> what its optimiser keeps for it (exp_avg, step, ...), tensors or numbers
States = dict[str, dict[str, Any]]
T = TypeVar("T")


def parallelize(accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float) -> Any:
    """The `Parallel` of this launch. `module` is the one thing that is trained; its weights are fp32.

    Raises:
        ConfigError: the framework cannot run this optimiser, or is configured against our settings.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from eagle3_train.zero import Zero

        return Zero(accelerator, module, optimizer, clip)
    return Parallel(accelerator, module, optimizer, clip)


class Parallel:
    """Plain PyTorch, DDP and FSDP2; eagle3_train.zero has DeepSpeed's.

    The loss given to `backward` is a sum over all ranks and micro-batches already: the means that frameworks take
    are undone here. Methods are collective unless they say otherwise: every process calls them, in the same order.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float):
        self.accelerator, self.module, self.clip = accelerator, module, clip
        self.world, self.is_main = accelerator.num_processes, accelerator.is_main_process
        # frameworks hang what cannot be copied on the modules that they wrap, so it is copied now, without weights
        self._copy = deepcopy(module, {id(p): nn.Parameter(p.new_empty(0)) for p in module.parameters()})
        with warnings.catch_warnings():
            # torch's new name of a setting that accelerate passes on
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            self.wrapped, prepared = accelerator.prepare(module, optimizer)
        self.optimizer: Any = prepared.optimizer
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._finite: Tensor | bool = True

    @property
    def hooked(self) -> bool:
        """Whether the module is the framework's, with its hooks or shards, and not to be called outside training."""
        return self.accelerator.is_fsdp2

    def __call__(self, *inputs: Any) -> Any:
        """The module's forward, in training."""
        return self.wrapped(*inputs)

    # training

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward and backward of each micro-batch: gradients are exchanged with the step's last one alone."""
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped):
            yield

    def backward(self, loss: Tensor) -> None:
        self._note(loss)
        (loss * self.world).backward()

    def step(self, lr: float, step: int) -> float:
        """Clip, step at this learning rate, clear the gradients; the gradients' norm before clipping.

        Raises:
            Eagle3Error: they are not finite (on all ranks alike); weights and optimiser are as they were.
        """
        norm = nn.utils.clip_grad_norm_(list(self.parameters.values()), self.clip)
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self._check(norm, step)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _note(self, loss: Tensor) -> None:
        # read when a step fails, to name the rank; no wait for the device here
        self._finite = loss.detach().isfinite() & self._finite

    def _check(self, norm: float, step: int) -> None:
        if math.isfinite(norm):
            self._finite = True
            return
        ranks = [i for i, finite in enumerate(gather_object([bool(self._finite)])) if not finite]
        where = f" (the loss is not finite on rank {', '.join(map(str, ranks))})" if ranks else ""
        raise Eagle3Error(
            f"step {step}: the gradients are not finite{where}; lower optim.lr, or set autocast: float32 "
            "(the last checkpoint and best/ are as they were)"
        )

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a small tensor."""
        total = self.accelerator.reduce(values, reduction="sum")
        assert isinstance(total, Tensor)
        return total

    def mean(self, value: float) -> float:
        """The mean over processes of what each has, the same on all."""
        return float(self.sum(torch.tensor(value, device=self.accelerator.device))) / self.world

    def any(self, flag: bool) -> bool:
        """Whether it holds on any process."""
        return bool(self.sum(torch.tensor([int(flag)], device=self.accelerator.device)))

    def on_main(self, work: Callable[[], T]) -> T:
        """Do this on the main process alone; its result, or what went wrong, on every process.

        Raises:
            Eagle3Error, OSError: what `work` raises.
        """
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except (Eagle3Error, OSError) as raised:
                error = raised
        if self.world > 1:
            result, error = broadcast_object_list([result, error])
        if error is not None:
            raise error
        return cast(T, result)

    # weights

    def local(self) -> dict[str, Tensor]:
        """What this process holds of the weights, by name: the tensors that the next forward uses. Not collective."""
        return {name: self._held(p) for name, p in self.parameters.items()}

    def whole(self, local: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copies of whole weights on the CPU of the main process, empty elsewhere.

        Args:
            local: what to make whole, shaped as `local()` (averages of weights); None: the weights themselves.
        """
        return self._collect((name, self._gather(name, x)) for name, x in (local or self.local()).items())

    def plain(self, local: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The module with whole weights on every process, to call outside training, in any order and number.

        It is the trained module itself under plain PyTorch and DDP, unless `local` is given; else a copy, the same one
        each time.
        """
        if local is None and not self.hooked:
            return self.module
        for name, x in (local or self.local()).items():
            self._copy.get_parameter(name).data = self._gather(name, x).clone()
        return self._copy

    def localize(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What each process holds of whole tensors that the main process gives: the inverse of `whole`."""
        found = {}
        for name, held in self.local().items():
            found[name] = torch.empty_like(held)
            self._fill(found[name], self._spread(whole.get(name), self._shape(name)))
        return found

    def load(self, weights: Mapping[str, Tensor], states: States) -> None:
        """Take up whole weights, buffers and optimiser states that the main process gives (others: empty ones).

        The tensors are not copied, where they can be used as they are.
        """
        buffers = {k: v for k, v in self.module.state_dict().items() if k not in self.parameters}
        with torch.no_grad():
            for name in self.parameters:
                self._set(name, self._spread(weights.get(name), self._shape(name)))
            for name, buffer in buffers.items():
                buffer.copy_(self._spread(weights.get(name), buffer.shape, buffer.dtype))
                self._copy.get_buffer(name).copy_(buffer)
        self._load_states(self._spread_states(states))

    def buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to the weights, on the CPU. Not collective."""
        return {
            k: v.detach().to("cpu", copy=True) for k, v in self.module.state_dict().items() if k not in self.parameters
        }

    def states(self) -> States:
        """Whole optimiser states on the CPU of the main process; empty elsewhere, or before the first step."""
        found: States = {}
        for name in self.parameters:
            state = self._collect(self._whole_state(name))
            if self.is_main and state:
                found[name] = state
        return found

    # what DeepSpeed does otherwise

    def _held(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach()

    def _shape(self, name: str) -> torch.Size:
        return self.parameters[name].shape

    def _gather(self, name: str, local: Tensor) -> Tensor:
        return local.full_tensor() if isinstance(local, DTensor) else local

    def _fill(self, local: Tensor, whole: Tensor) -> None:
        local.copy_(_shard(whole, local))

    def _set(self, name: str, whole: Tensor) -> None:
        self._fill(self._held(self.parameters[name]), whole)

    def _whole_state(self, name: str) -> Iterator[tuple[str, Any]]:
        for key, value in self.optimizer.state.get(self.parameters[name], {}).items():
            yield key, self._gather(name, value) if isinstance(value, Tensor) else value

    def _load_states(self, states: Iterator[tuple[str, dict[str, Any]]]) -> None:
        groups = self.optimizer.state_dict()["param_groups"]
        ids = [i for group in groups for i in group["params"]]
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        number = {id(p): i for p, i in zip(parameters, ids, strict=True)}
        loaded = {}
        for name, state in states:
            p = self.parameters[name]
            # states of another shape (step counters, 8-bit blocks) belong to no shard
            loaded[number[id(p)]] = {
                k: _shard(v, p) if isinstance(v, Tensor) and v.shape == p.shape else v for k, v in state.items()
            }
        self.optimizer.load_state_dict({"state": loaded, "param_groups": groups})

    # from and to the main process

    def _collect(self, items: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        found = {}
        for name, x in items:
            if self.is_main:
                found[name] = x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x
        return found

    def _spread(self, whole: Tensor | None, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        """The main process's tensor on every process's device."""
        device = self.accelerator.device
        if self.world == 1:
            assert whole is not None
            return whole.to(device)
        tensor = whole.to(device) if whole is not None else torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(tensor, src=0)
        return tensor

    def _spread_states(self, states: States) -> Iterator[tuple[str, dict[str, Any]]]:
        """The main process's states, one parameter at a time."""
        told = [{n: {k: _told(v) for k, v in s.items()} for n, s in states.items()}]
        if self.world > 1:
            broadcast_object_list(told)
        for name, state in told[0].items():
            mine = states.get(name, {})
            yield name, {k: self._receive(mine.get(k), v) for k, v in state.items()}

    def _receive(self, value: Any, told: Any) -> Any:
        return self._spread(value, *told) if isinstance(told, tuple) else told


def _told(value: Any) -> Any:
    """What other processes need to know beforehand: shape and dtype of a tensor, a number (a step counter) itself."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) and value.dim() > 0 else value


def _shard(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this process holds, as `like` is held."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
