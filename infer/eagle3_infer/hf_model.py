"""A user's transformers model, driven by the engine for a while, then as it was. Knows no generation settings."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from eagle3.attention import SEAM
from eagle3.target import Target
from eagle3_infer.engine import Engine

Engines: TypeAlias = WeakKeyDictionary[Any, tuple[int, Engine]]


class _Kept:
    """The target made of a model, and the engines on it. Lies on the model and dies with it.

    Attributes:
        engines: by generator, with their slots.
        lock: one run at a time has the model's attention.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.engines: Engines = WeakKeyDictionary()
        self._target: Target | None = None
        self._place: Any = None

    def wrap(self, model: Any) -> Target:
        """The model's target; made anew where the model was copied, moved, cast or given other embeddings."""
        target = self._target
        place = model.get_input_embeddings(), model.get_output_embeddings(), model.device, model.dtype
        if target is None or target.model is not model or self._place != place:
            self.engines.clear()
            target = self._target = _wrapped(model)
            self._place = place
        return target

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # copied or pickled with its model it becomes None
        return type(None), ()


_making = threading.Lock()


def _kept(model: Any) -> _Kept:
    """What lies on the model; put there by whoever comes first, as two would have two locks."""
    with _making:
        kept = model.__dict__.get("_eagle3")
        if kept is None:
            kept = model._eagle3 = _Kept()
        return kept


def _wrapped(model: Any) -> Target:
    """A target that leaves the model's parameters as trainable as they were."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    try:
        return Target(model, path=model.name_or_path or "(in memory)")
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def driven(model: Any) -> Iterator[tuple[Target, Engines]]:
    """Target and engines of the model, which meanwhile has the seam and is in eval mode; then it is as it was."""
    kept = _kept(model)
    with kept.lock:
        attention = {"": model.config._attn_implementation}
        for name in model.config.sub_configs:
            attention[name] = getattr(model.config, name)._attn_implementation
        in_training = [module for module in model.modules() if module.training]
        try:
            model.eval()
            target = kept.wrap(model)
            model.set_attn_implementation({"text_config": SEAM} if "text_config" in attention else SEAM)
            yield target, kept.engines
        finally:
            model.set_attn_implementation(attention)
            for module in in_training:
                module.training = True
