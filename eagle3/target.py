"""The frozen target: any Hugging Face causal LM driven through the attention seam, checked when it is loaded."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3.attention import SEAM, AttentionContext, DenseCausal, attending, register_seam
from eagle3.errors import ConfigError, UnsupportedTargetError
from eagle3.loading import LOAD_ERRORS, decoder_layers, load_model
from eagle3.rope import position_limit

ALLOWED_LAYERS = {"full_attention", "sliding_attention"}
PROBE_TOKENS = 48
_REBUILT = "logits rebuilt from the last hidden state differ from the model's by"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str) -> torch.dtype | None:
    """The torch dtype called `name`; "auto" is None (the target's own)."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """The torch device called `name`.

    Raises:
        ConfigError: torch does not know it, or this machine does not have it.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use cpu, cuda, cuda:1, ...") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} was asked for; torch sees {torch.cuda.device_count()} CUDA GPUs")
    return device


class Target:
    """A causal LM whose every attention layer goes through the context handed to `hidden`.

    Attributes:
        layers: the decoder layers that are loaded; fewer than num_layers in a target for offline features.
        num_layers, hidden_size, vocab_size (lm_head rows): of the whole target.
        fingerprint: short hash of architecture and weights; the same checkpoint gives the same in float32 and bfloat16.
        usable_vocab: ids below it belong to the tokenizer (all of vocab_size without one).
        eos_ids: every end-of-sequence id of the generation config, the config and the tokenizer.
        max_positions: positions a row may use (see rope.position_limit).
        collective: the layers are divided among the processes of the run: all call `hidden`, with the same rows.
        lock: held during forwards, and by who captures hidden states of one, so that threads may share a target.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        path: str = "(in memory)",
        num_layers: int | None = None,
        collective: bool = False,
    ):
        """`num_layers`: of the whole target, where the model was cut to its first ones."""
        if why := _refusal(model):
            raise UnsupportedTargetError(f"{type(model).__name__}: {why}")
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.path = path
        self.collective = collective
        self.text_config = model.config.get_text_config(decoder=True)
        _, self.layers = decoder_layers(model, self.text_config.num_hidden_layers)
        self.num_layers = num_layers or len(self.layers)
        self.hidden_size = self.text_config.hidden_size
        self.lm_head = model.get_output_embeddings()
        self.vocab_size = self.lm_head.weight.shape[0]
        self.usable_vocab = min(self.vocab_size, len(tokenizer)) if tokenizer is not None else self.vocab_size
        self.eos_ids = eos_ids(model.config, model.generation_config, tokenizer)
        self.max_positions = position_limit(self.text_config)
        self.lock = threading.RLock()
        self._decoder = model.get_decoder()
        self._logit_rules = _logit_rules(self.text_config)
        self._stock_attention = _stock_attention(self.text_config)
        register_seam()
        try:
            self._probe()
        except Exception:
            self._use(self._stock_attention)
            raise
        self.fingerprint = self._fingerprint()
        # what is told of the architecture is told of the whole target
        self.text_config.num_hidden_layers = self.num_layers

    @classmethod
    def load(
        cls,
        path: str | Path,
        dtype: str = "auto",
        device: str = "cpu",
        tokenizer: bool = True,
        layers: int | None = None,
        placement: str | Sequence[int | str] = "whole",
    ) -> "Target":
        """Load a folder or hub id (sharded or not, tied or not) and probe it.

        Args:
            path: folder, hub id, or the name of the embedded default (eagle3.embedded.EMBEDDED).
            dtype: auto (the checkpoint's), float32, bfloat16, float16.
            layers: read only the first `layers` decoder layers, with embedding, final norm and lm_head. Such a target
                embeds, makes logits and describes itself (num_layers, fingerprint, ...) as the whole one, but refuses
                to run.
            placement: of the decoder layers: whole (all on `device`), device_map (spread over the devices that this
                process sees), tensor_parallel (each divided among the processes of the run, which then all call
                `hidden` together), or a place for each (device index, cpu, disk). All else lies on `device`.
        Raises:
            ConfigError: no such folder, dtype or device, or weights that are broken or incomplete.
            UnsupportedTargetError: the architecture cannot be driven through the seam, or not be cut to `layers`.
        """
        from transformers import AutoTokenizer

        folder, torch_dtype, place = resolve_path(path), parse_dtype(dtype), parse_device(device)
        try:
            model, depth = load_model(folder, torch_dtype, place, layers, placement)
            tok = AutoTokenizer.from_pretrained(folder) if tokenizer else None
        except LOAD_ERRORS as error:
            raise ConfigError(f"target {str(path)!r} cannot be loaded: {_first_line(error)}") from error
        if placement != "tensor_parallel":
            return cls(model, tok, str(path), depth)
        try:
            return cls(model, tok, str(path), depth, collective=True)
        except LOAD_ERRORS as error:
            # heads or experts that the ranks cannot share evenly, plans of transformers that do not run
            raise UnsupportedTargetError(
                f"{type(model).__name__} does not run divided among {torch.distributed.get_world_size()} processes: "
                f"{_first_line(error)}; use another number of them, device_map or offline features"
            ) from error

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def embed(self, ids: Tensor) -> Tensor:
        """What the target's embedding module gives for `ids` (with its scale, where the module has one)."""
        return self.model.get_input_embeddings()(ids)

    def hidden(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Last hidden states [T, H], after the final norm, of one packed row.

        Args:
            ids, positions: int64 [T].
            ctx: where K/V go and what each row sees.
        Raises:
            ConfigError: not all layers were loaded.
        """
        self.need_layers("hidden states")
        return self._hidden(ids, positions, ctx)

    def _hidden(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        with self.lock, attending(ctx):
            output = self._decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, ctx=ctx)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., H], scaled and soft-capped as the model does."""
        return self._ruled(self.lm_head(hidden))

    def logits_of(self, ids: Tensor) -> Callable[[Tensor], Tensor]:
        """The function from last hidden states [..., H] to the logits [..., n] of the tokens `ids` (int64 [n]) alone.

        It holds a copy of their rows of lm_head, unless they are all of them in order.
        """
        if torch.equal(ids, torch.arange(self.vocab_size, device=ids.device)):
            return self.logits
        weight, bias = self.lm_head.weight[ids], None if self.lm_head.bias is None else self.lm_head.bias[ids]
        return lambda hidden: self._ruled(F.linear(hidden, weight, bias))

    def _ruled(self, logits: Tensor) -> Tensor:
        for rule in self._logit_rules:
            logits = rule(logits)
        return logits

    @contextmanager
    def stock(self) -> Iterator[Any]:
        """The model with transformers' own attention, for `generate` and comparisons."""
        self.need_layers("the model's own forwards")
        self._use(self._stock_attention)
        try:
            yield self.model
        finally:
            self._use(SEAM)

    def need_layers(self, purpose: str) -> None:
        """Raise ConfigError if the target was loaded without some of its decoder layers."""
        if len(self.layers) < self.num_layers:
            raise ConfigError(
                f"{purpose} need all {self.num_layers} decoder layers of {self.path}; {len(self.layers)} were loaded, "
                "which is enough for offline features only"
            )

    def _fingerprint(self) -> str:
        """From lm_head and the first layer, which a cut target has, too."""
        text = f"{type(self.model).__name__}/{self.num_layers}/{self.hidden_size}/{self.vocab_size}"
        digest = hashlib.sha256(text.encode())
        for weight in (self.lm_head.weight, *_matrices(self.layers[0])):
            sample = weight.detach()[:: max(1, weight.shape[0] // 64), :64].to("cpu", torch.bfloat16)
            digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _use(self, implementation: str) -> None:
        subs = self.model.config.sub_configs
        self.model.set_attn_implementation({"text_config": implementation} if "text_config" in subs else implementation)

    @torch.inference_mode()
    def _probe(self) -> None:
        """One stock and one seam forward of the same random tokens: every layer arrives, logits agree."""
        count = min(PROBE_TOKENS, self.max_positions)
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.usable_vocab, (count,), generator=draw).to(self.device)
        positions = torch.arange(count, device=self.device)
        self._use("eager")
        stock = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
        if not stock.isfinite().all():
            raise UnsupportedTargetError(
                f"{type(self.model).__name__}: logits are not finite in {self.dtype}; load it in float32 or bfloat16"
            )
        self._use(SEAM)
        ctx = DenseCausal([count], plain=True)
        ours = self._model_logits(ids, positions, ctx)
        self._check_calls(ctx.windows)
        self._check_close("logits through the attention seam differ from the model's own by", ours, stock, 16)
        # apart from attention: a lost soft-cap of the logits hides in 16 ulp of bfloat16
        rebuilt = self.logits(self._hidden(ids, positions, DenseCausal([count], plain=True)))
        self._check_close(_REBUILT, rebuilt, ours, 1)

    def _model_logits(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """Logits [T, V] that the model itself makes of what it reads through the seam."""
        with attending(ctx):
            model = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, ctx=ctx)
        return model.logits[0]

    def _check_close(self, what: str, ours: Tensor, theirs: Tensor, ulps: int) -> None:
        """Raise if logits differ by more than `ulps` units of the dtype at the largest one."""
        largest = theirs.float().abs().max().item()
        error = (ours.float() - theirs.float()).abs().max().item()
        allowed = ulps * torch.finfo(self.dtype).eps * largest
        if not error <= allowed:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__}: {what} {error:.3g}; {allowed:.3g} is allowed "
                f"({ulps} ulp of {self.dtype} at the largest logit, {largest:.3g})"
            )

    def _check_calls(self, windows: dict[int, int | None]) -> None:
        count = len(self.layers)
        if sorted(windows) != list(range(count)):
            raise UnsupportedTargetError(
                f"{type(self.model).__name__}: attention layers {sorted(windows)} of {count} came to the seam"
            )
        kinds = _layer_kinds(self.text_config)[:count]
        expects = "sliding_attention" in kinds if kinds else bool(self.text_config.to_dict().get("sliding_window"))
        if expects != any(windows.values()):
            raise UnsupportedTargetError(
                f"{type(self.model).__name__}: its sliding window is in the mask only, not in the attention call"
            )

    def check_teacher(self, ids: Tensor, positions: Tensor, rows: int = 64) -> None:
        """Rebuilt teacher logits equal the model's within 4 ulp at the largest logit, on up to `rows` rows.

        Args:
            ids, positions: int64 [T], one document.
        Raises:
            UnsupportedTargetError: the head would be taught from other logits than the model's.
        """
        ids, positions = ids[:rows], positions[:rows]
        rebuilt = self.logits(self.hidden(ids, positions, DenseCausal([len(ids)])))
        self._check_close(_REBUILT, rebuilt, self._model_logits(ids, positions, DenseCausal([len(ids)])), 4)


def resolve_path(path: str | Path) -> str:
    """The folder or hub id behind `path`; the embedded default's name becomes its cached folder."""
    from eagle3.embedded import EMBEDDED, embedded_model_path

    if str(path) == EMBEDDED:
        return str(embedded_model_path())
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(f"target folder {str(path)!r} has no config.json")
    if folder.is_file():
        raise ConfigError(f"target {str(path)!r} is a file; give its folder, a hub id, or {EMBEDDED!r}")
    if not folder.exists() and (folder.is_absolute() or str(path).startswith(".") or len(folder.parts) > 2):
        raise ConfigError(f"target folder {str(path)!r} does not exist; give a folder, a hub id, or {EMBEDDED!r}")
    return str(folder)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _matrices(layer: nn.Module) -> Iterator[Tensor]:
    """The layer's matrices, wherever they lie; all ranks iterate together where they are divided."""
    for module in layer.modules():
        with _present(module):
            weights: Iterator[Any] = module.parameters(recurse=False)
            for weight in weights:
                if weight.dim() == 2:
                    # a rank's own part of a divided one is a DTensor
                    yield weight.full_tensor() if hasattr(weight, "full_tensor") else weight


@contextmanager
def _present(module: Any) -> Iterator[None]:
    """The module's own weights are there inside the block, although accelerate's hook keeps them elsewhere."""
    hook = module._hf_hook if hasattr(module, "_hf_hook") else None
    if hook is not None:
        hook.pre_forward(module)
    yield
    if hook is not None:
        hook.post_forward(module, None)


def _layer_kinds(config) -> list[str]:
    return config.to_dict().get("layer_types") or []


def _refusal(model) -> str | None:
    """Why the model cannot be driven through the seam, as far as can be told before a forward."""
    odd = set(_layer_kinds(model.config.get_text_config(decoder=True))) - ALLOWED_LAYERS
    if odd:
        return f"layer types {sorted(odd)} are not supported; allowed are {sorted(ALLOWED_LAYERS)}"
    if model._is_stateful:
        return f"it carries recurrent state (its layers hold {_layer_parts(model)}); only attention is supported"
    if not model._can_set_attn_implementation():
        own = "attention classes of its own" + (" with ALiBi position biases" if _has_alibi(model.config) else "")
        return f"it brings {own}, which ignore transformers' AttentionInterface"
    if model.get_output_embeddings() is None:
        return "it has no lm_head: not a causal LM"
    return None


def _layer_parts(model) -> str:
    """Class names of what the layers are made of, norms apart: they tell which kind of layer it is."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    parts = {type(part).__name__ for layers in lists for layer in layers for part in layer.children()}
    return ", ".join(sorted(name for name in parts if not name.endswith("Norm")))


def _has_alibi(config) -> bool:
    match config.model_type:
        case "bloom":
            return True
        case "falcon":
            return config.alibi
        case "mpt":
            return config.attn_config.alibi
    return False


def eos_ids(config: Any, generation_config: Any = None, tokenizer: Any = None) -> tuple[int, ...]:
    """Every id that ends a reply, ascending: of the config, the generation config and the tokenizer.

    Args:
        config: the model's own config; ids of its text part count.
        generation_config, tokenizer: None where there is none.
    """
    named = [config.get_text_config(decoder=True).eos_token_id]
    if generation_config is not None:
        named.append(generation_config.eos_token_id)
    if tokenizer is not None:
        named.append(tokenizer.eos_token_id)
    flat = [i for x in named if x is not None for i in (x if isinstance(x, list | tuple) else [x])]
    if odd := [i for i in flat if type(i) is not int]:
        raise ConfigError(f"eos_token_id holds {odd[0]!r}; it must be a token id or a list of them")
    return tuple(sorted(set(flat)))


def _logit_rules(config) -> list[Callable[[Tensor], Tensor]]:
    """What the model does to lm_head's output: Cohere multiplies, Granite divides, Gemma soft-caps."""
    fields = config.to_dict()
    rules: list[Callable[[Tensor], Tensor]] = []
    if (scale := fields.get("logit_scale")) is not None:
        rules.append(lambda x: x * scale)
    if (divisor := fields.get("logits_scaling")) is not None:
        rules.append(lambda x: x / divisor)
    if (cap := fields.get("final_logit_softcapping")) is not None:
        rules.append(lambda x: torch.tanh(x / cap) * cap)
    return rules


def _stock_attention(config) -> str:
    """transformers' implementation to compare with; its sdpa drops Gemma-2's soft-cap in some releases."""
    capped = config.to_dict().get("attn_logit_softcapping") is not None
    # a model that was wrapped before no longer knows what it had
    return "eager" if capped or config._attn_implementation == SEAM else config._attn_implementation
