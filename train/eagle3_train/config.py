"""The trainer's settings: one default, in one place. YAML keys and dotted flags are these names."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from eagle3.chats import check_template_options
from eagle3.config import HeadOptions
from eagle3.embedded import EMBEDDED
from eagle3.errors import ConfigError
from eagle3_kernels.loss_terms import check_terms

# draft vocabularies whose coverage is shown
COVERAGE_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class DataConfig:
    """Where the chats come from.

    Args:
        files: chats in .jsonl, .json (both also .gz) or .parquet; folders or patterns of such files; hub:org/name,
            hub:org/name@split or hub:org/name:config@split. A chat is `messages`, `conversations` or `turns`.
        max_length: tokens of a row; longer ones are cut.
        eval_rows: rows held out for the simulated tau (greedy replies only).
        streaming: read the sources as they are trained on, none kept; needs a vocab_map.
        shuffle_buffer: rows that a stream is shuffled among.
        vocab_map: file of build_vocab_map.py; None = made of the training rows.
        template_options: extra variables for the chat template (such as enable_thinking).
        workers: processes that render the chats.
    """

    files: tuple[str, ...] = ()
    max_length: int = 512
    eval_rows: int = 64
    streaming: bool = False
    shuffle_buffer: int = 10_000
    vocab_map: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict, hash=False)
    workers: int = 1

    def __post_init__(self):
        object.__setattr__(self, "files", tuple(map(os.path.expanduser, self.files)))
        if self.vocab_map is not None:
            object.__setattr__(self, "vocab_map", os.path.expanduser(self.vocab_map))
        check_template_options("data.template_options", self.template_options)
        _at_least("data.max_length", self.max_length, 3)
        _at_least("data.eval_rows", self.eval_rows, 1)
        _at_least("data.shuffle_buffer", self.shuffle_buffer, 1)
        _at_least("data.workers", self.workers, 1)
        if self.streaming and self.workers > 1:
            raise ConfigError(
                f"data.workers is {self.workers}, but each process renders a stream by itself as it trains; set "
                "data.workers: 1"
            )


@dataclass(frozen=True)
class FeaturesConfig:
    """Where the target's features come from.

    Args:
        source: online (the target runs for every batch), memory (kept in the RAM of each process), hybrid (kept in
            `store`: filled in the first epoch, read in the next), offline (read from `store`; the target's layers
            are not loaded).
        store: folder of the feature store, on a file system that all nodes share.
        dtype: of what is kept: auto (the target's), float32, bfloat16, float8 (with a scale per token and layer; the
            teacher's states stay bfloat16).
        shard_mib: size of a shard of the store, in MiB; each process holds one in memory while it is filled.
    """

    source: str = "online"
    store: str | None = None
    dtype: str = "auto"
    shard_mib: float = 256.0

    def __post_init__(self):
        _one_of("features.source", self.source, ("online", "memory", "hybrid", "offline"))
        _one_of("features.dtype", self.dtype, ("auto", "float32", "bfloat16", "float8"))
        if not 0 < self.shard_mib < math.inf:
            raise ConfigError(f"features.shard_mib is {self.shard_mib}; it must be above 0")
        if self.store is not None:
            object.__setattr__(self, "store", os.path.expanduser(self.store))
        if self.source in ("hybrid", "offline") and self.store is None:
            raise ConfigError(f"features.source is {self.source}; give features.store, the folder of the store")


@dataclass(frozen=True)
class TTTConfig:
    """The rollout.

    Args:
        steps: TTT steps in training, and the depth of the simulated chain.
        decay: weight of step k is decay^k.
        weights: decay, or dpace: times each row's expected gain in accepted length (D-PACE).
        feature_noise: standard deviation of Gaussian noise on the features, in training alone.
        checkpointing: recompute each step in the backward pass (memory for time).
    """

    steps: int = 4
    decay: float = 0.8
    weights: str = "decay"
    feature_noise: float = 0.0
    checkpointing: bool = False

    def __post_init__(self):
        _at_least("ttt.steps", self.steps, 1)
        _one_of("ttt.weights", self.weights, ("decay", "dpace"))
        if not 0 <= self.feature_noise < math.inf:
            raise ConfigError(f"ttt.feature_noise is {self.feature_noise}; it must be 0 or more")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"ttt.decay is {self.decay}; it must be in (0, 1]")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, with linear warm-up and cosine decay.

    Args:
        name: adamw, muon (the matrices between embedding and lm_head by Muon, the rest by AdamW), adamw8bit (moments of
            8 bits; needs bitsandbytes).
        lr: peak learning rate, of either part of muon.
        beta1: first-moment decay of AdamW.
        beta2: second-moment decay of AdamW.
        momentum: of Muon.
        weight_decay: decoupled, on matrices only.
        warmup_ratio: share of the steps that warm up.
        final_ratio: learning rate at the end, as a share of the peak.
        clip: largest gradient norm.
        ema: decay per step of an average of the weights, which is then what is evaluated and exported; 0 = none.
    """

    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    weight_decay: float = 0.0
    warmup_ratio: float = 0.03
    final_ratio: float = 0.02
    clip: float = 1.0
    ema: float = 0.0

    def __post_init__(self):
        _one_of("optim.name", self.name, ("adamw", "muon", "adamw8bit"))
        if not (0 < self.lr < math.inf and self.clip > 0 and 0 <= self.weight_decay < math.inf):
            raise ConfigError(
                f"optim.lr {self.lr}, optim.clip {self.clip} and optim.weight_decay {self.weight_decay}: the first two "
                "must be above 0, the last 0 or more"
            )
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 <= self.warmup_ratio < 1):
            raise ConfigError("optim.beta1, optim.beta2 and optim.warmup_ratio must be in [0, 1)")
        if not (0 <= self.momentum < 1 and 0 <= self.ema < 1):
            raise ConfigError("optim.momentum and optim.ema must be in [0, 1)")
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError(f"optim.final_ratio is {self.final_ratio}; it must be in [0, 1]")


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during the run; the last step is always evaluated.

    Args:
        every: steps between evaluations on the held-out rows (loss, simulated tau); best/ is the best of these.
        patience: stop after this many evaluations without a better simulated tau; 0 = never.
        engine_every: steps between evaluations by the engine itself (real tau of chain and tree); 0 = none.
        prompts: JSONL of prompts for the engine; None = the shipped ones.
        prompt_count: first prompts of that file to answer.
        new_tokens: most tokens of an answer.
    """

    every: int = 100
    patience: int = 0
    engine_every: int = 0
    prompts: str | None = None
    prompt_count: int = 8
    new_tokens: int = 64

    def __post_init__(self):
        for name, least in (("every", 1), ("patience", 0), ("engine_every", 0), ("prompt_count", 1), ("new_tokens", 2)):
            _at_least(f"eval.{name}", getattr(self, name), least)
        if self.prompts is not None:
            object.__setattr__(self, "prompts", os.path.expanduser(self.prompts))


@dataclass(frozen=True)
class TrainConfig:
    """Train an EAGLE-3 head for one target.

    Args:
        target: folder, hub id, or smollm2-135m-instruct (the embedded default).
        target_placement: where the target's layers lie: whole (in every process), device_map (spread over the devices
            that a process has), tensor_parallel (each divided among all processes).
        output: folder of the run: best/, last/, checkpoints/, metrics.jsonl, run.json.
        data: where the chats come from.
        head: the head's architecture.
        ttt: the rollout.
        loss: name -> weight of the terms of the loss: soft_ce, kl, reverse_kl, tv, lk_alpha, lk_lambda, hard_ce.
        optim: the optimiser.
        eval: evaluation during the run.
        features: where the target's features come from.
        init_head: warm start from this head's folder (its architecture and vocabulary map are kept).
        dtype: of the target: auto (its own), float32, bfloat16, float16.
        device: cpu, cuda, ... ; auto lets accelerate choose.
        autocast: dtype of the head's matrix products: bfloat16 or float32; weights are fp32 always.
        rows_per_step: chats of one optimizer step, over all processes.
        tokens_per_batch: most tokens in one forward of one process (data.max_length or more).
        max_steps: optimizer steps; None = max_tokens or max_minutes ends the run. The first limit that is reached does,
            and the learning rate's schedule ends there.
        max_tokens: tokens trained on.
        max_minutes: minutes of updates; what is learned then depends on the machine's speed.
        save_every: steps between checkpoints.
        log_every: steps between metrics records.
        resume: auto (continue what `output` holds), never (refuse a folder that holds a run).
        seed: of initialisation and data order.
        threads: torch threads; None leaves torch's choice.
        log_with: trackers through accelerate: wandb, tensorboard, trackio, mlflow.
        project: the trackers' project name.
        group: in W&B and trackio, the group that the run belongs to (a sweep).
        run_name: its name there; None = the trackers' choice.
    """

    target: str = EMBEDDED
    target_placement: str = "whole"
    output: str = "runs/head"
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadOptions = field(default_factory=HeadOptions)
    ttt: TTTConfig = field(default_factory=TTTConfig)
    loss: dict[str, float] = field(default_factory=lambda: {"soft_ce": 1.0}, hash=False)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    init_head: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    autocast: str = "bfloat16"
    rows_per_step: int = 4
    tokens_per_batch: int = 4096
    max_steps: int | None = 1000
    max_tokens: int | None = None
    max_minutes: float | None = None
    save_every: int = 100
    log_every: int = 10
    resume: str = "auto"
    seed: int = 0
    threads: int | None = None
    log_with: tuple[str, ...] = ()
    project: str = "eagle3"
    group: str | None = None
    run_name: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "log_with", tuple(self.log_with))
        try:
            check_terms(self.loss)
        except ValueError as error:
            raise ConfigError(f"loss: {error}") from None
        object.__setattr__(self, "output", os.path.expanduser(self.output))
        if self.init_head is not None:
            object.__setattr__(self, "init_head", os.path.expanduser(self.init_head))
        for name in ("rows_per_step", "tokens_per_batch", "save_every", "log_every"):
            _at_least(name, getattr(self, name), 1)
        self._check_limits()
        if self.tokens_per_batch < self.data.max_length:
            raise ConfigError(
                f"tokens_per_batch is {self.tokens_per_batch}; one chat may have data.max_length, "
                f"{self.data.max_length}: raise the first or lower the second"
            )
        _one_of("target_placement", self.target_placement, ("whole", "device_map", "tensor_parallel"))
        if self.target_placement != "whole" and self.features.source == "offline":
            raise ConfigError(
                f"target_placement is {self.target_placement}, but features.source: offline does not load the target's "
                "layers; set target_placement: whole"
            )
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed is {self.seed}; it must fit 64 bits")
        _one_of("resume", self.resume, ("auto", "never"))
        _one_of("autocast", self.autocast, ("bfloat16", "float32"))
        if self.init_head is not None and self.data.vocab_map is not None:
            raise ConfigError(
                "init_head brings its own vocabulary map, which belongs to its weights; leave out data.vocab_map "
                "(--data.vocab_map null)"
            )
        if self.data.streaming and self.features.source != "online":
            raise ConfigError(
                f"features.source is {self.features.source}, which keeps every chat; with data.streaming use online"
            )
        if self.eval.engine_every and self.features.source == "offline":
            raise ConfigError(
                "eval.engine_every needs the target's layers, which features.source: offline does not load; set "
                "eval.engine_every: 0"
            )
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu|npu)(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; use auto, cpu, cuda or cuda:0")

    def _check_limits(self) -> None:
        limits = {name: getattr(self, name) for name in ("max_steps", "max_tokens", "max_minutes")}
        if all(value is None for value in limits.values()):
            raise ConfigError("the run has no end: give max_steps, max_tokens or max_minutes")
        for name, value in limits.items():
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}; it must be above 0")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use {', '.join(allowed[:-1])} or {allowed[-1]}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be {least} or more")
