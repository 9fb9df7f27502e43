"""Capture the target's hidden states into one preallocated feature buffer. Knows layers and rows, not tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3_kernels.capture_copy import capture_copy


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high layer: outputs of layers 1, L//2 - 1 and L - 4.

    Raises:
        ConfigError: fewer than 7 layers, where two of them coincide.
    """
    if num_layers < 7:
        raise ConfigError(
            f"the target has {num_layers} layers; the default capture layers need 7 or more: "
            "name them with head.capture_layers"
        )
    return 1, num_layers // 2 - 1, num_layers - 4


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers in ascending order, which is the column order of `fc`.

    Raises:
        ConfigError: a layer is named twice or does not exist.
    """
    ordered = tuple(sorted(layers))
    if len(set(ordered)) != len(ordered) or (ordered and not 0 <= ordered[0] <= ordered[-1] < num_layers):
        raise ConfigError(
            f"capture layers {list(layers)} must be distinct and in [0, {num_layers - 1}] "
            "(layer i = the output of the 0-based decoder layer i)"
        )
    return ordered


class Capture:
    """Hooks on the chosen decoder layers that copy their outputs into columns of `[max_rows, n * H]`.

    Use:
        with capture.rows(T):
            target.hidden(...)
        capture.features                 # [T, n * H], valid until the next forward

    An empty layer set allocates nothing and hooks nothing.
    """

    def __init__(self, target, layers: Sequence[int], max_rows: int):
        self.layers = check_layers(layers, target.num_layers)
        self.hidden_size = target.hidden_size
        if self.layers:
            target.need_layers("captured features")
        self._modules: list[nn.Module] = [target.layers[i] for i in self.layers]
        self._rows = 0
        shape = (max_rows, len(self.layers) * self.hidden_size)
        self.buffer = torch.empty(shape, dtype=target.dtype, device=target.device) if self.layers else None

    @property
    def features(self) -> Tensor:
        """Features [T, n * H] of the last forward: a view into the buffer."""
        if self.buffer is None:
            raise RuntimeError("no capture layers were chosen")
        return self.buffer[: self._rows]

    @contextmanager
    def rows(self, count: int) -> Iterator[None]:
        """Capture the `count` packed rows of the one forward inside the block.

        Raises:
            RuntimeError: more rows than the buffer has, another number of rows, or none or several forwards.
            UnsupportedTargetError: a layer that hands on several streams of hidden states (AltUp).
        """
        if self.buffer is None:
            yield
            return
        if count > self.buffer.shape[0]:
            raise RuntimeError(f"{count} rows exceed the capture buffer of {self.buffer.shape[0]}")
        self._rows = count
        written = [0] * len(self.layers)
        handles = [
            module.register_forward_hook(self._writer(column, written)) for column, module in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if written != [1] * len(self.layers):
            raise RuntimeError(f"capture layers {self.layers} ran {written} times in one forward, not once")

    def _writer(self, column: int, written: list[int]):
        def write(_module, _args, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.dim() > 3:
                raise UnsupportedTargetError(
                    f"layer {self.layers[column]} hands on {hidden.shape[0]} streams of hidden states (AltUp, as in "
                    "Gemma 3n); a head reads one: decode this target without a head"
                )
            hidden = hidden.reshape(-1, hidden.shape[-1])
            if hidden.shape[0] != self._rows:
                raise RuntimeError(f"layer {self.layers[column]} gave {hidden.shape[0]} rows, expected {self._rows}")
            assert self.buffer is not None
            # a layer of a spread target may lie on another device
            capture_copy(hidden.to(self.buffer.device), self.buffer, column)
            written[column] += 1

        return write
